// A picture of which one place is chosen, by keys too: a slider to those who hear it.

/** Make `host` a slider over `count` places, which stand beside or below (`upright`) one another; `words` names one,
 * `show` draws it as chosen. Returns {pick}. */
export function chooser(host, { label, count, first, words, show, upright }) {
  let at = first;
  const say = () => {
    host.setAttribute("aria-valuenow", at);
    host.setAttribute("aria-valuetext", words(at));
  };
  const pick = (number) => {
    at = Math.max(0, Math.min(count - 1, number));
    say();
    show(at);
  };
  const attributes = { tabindex: 0, role: "slider", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": count - 1 };
  for (const [name, value] of Object.entries(attributes)) host.setAttribute(name, value);
  host.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? Math.max(1, Math.round(count / 20)) : 1;
    const keys = { ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: count - 1 };
    const to = { ...keys, ...(upright ? { ArrowUp: at - far, ArrowDown: at + far } : {}) }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    pick(to);
  });
  say();
  return { pick };
}
