// Cases of which one is seen: a slider for each setting that is a number, a list for each that is not. A cell of a heat
// map chooses its own.
import { element } from "./words.js";

const isNumber = (text) => /^[\d,.]+$/.test(text);

export function choices(host) {
  const axes = JSON.parse(host.dataset.axes),
    cases = [...host.querySelectorAll("[data-at]")];
  const known = cases.map((one) => JSON.parse(one.dataset.at)),
    chosen = known[Math.max(0, cases.findIndex((one) => !one.hidden))].slice();
  const missing = element("p", { class: "said", hidden: "" }, "This combination was not analysed.");
  const show = (axis, value) => {
    chosen[axis] = value;
    const at = known.findIndex((values) => values.every((one, place) => one === chosen[place]));
    cases.forEach((one, place) => (one.hidden = place !== at));
    missing.hidden = at >= 0;
  };
  const shown = []; // what shows a value in the control of each axis
  const controls = axes.map(([name, values], axis) => {
    if (values.length < 2) return "";
    if (!values.every(isNumber)) {
      const options = values.map((value) => element("option", {}, value));
      const list = element("select", { change: () => show(axis, list.value) }, ...options);
      list.value = chosen[axis];
      shown[axis] = (value) => (list.value = value);
      return element("label", {}, `${name} `, list);
    }
    const told = element("output", {}, chosen[axis]);
    shown[axis] = (value) => {
      slider.value = values.indexOf(value);
      told.textContent = value;
      slider.setAttribute("aria-valuetext", value);
    };
    const slider = element("input", {
      type: "range",
      min: 0,
      max: values.length - 1,
      value: values.indexOf(chosen[axis]),
      "aria-label": name,
      "aria-valuetext": chosen[axis],
      input: () => {
        const value = values[slider.value];
        shown[axis](value);
        show(axis, value);
      },
    });
    return element("label", { class: "slider" }, `${name} `, slider, told);
  });
  host.prepend(element("div", { class: "tools" }, ...controls), missing);
  for (const cell of document.querySelectorAll(".heat [data-case]")) {
    const values = JSON.parse(cell.dataset.case);
    if (!known.some((one) => one.join("\0") === values.join("\0"))) continue;
    const click = () => {
      values.forEach((value, axis) => (shown[axis]?.(value), show(axis, value)));
      host.scrollIntoView({ block: "nearest" });
    };
    cell.replaceChildren(element("button", { type: "button", click }, ...cell.childNodes));
  }
}
