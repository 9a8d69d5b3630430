// A flame graph from the root down: each part as wide as its share of what lives at a moment.
import { hierarchy, partition } from "d3-hierarchy";
import { bytes, element, share } from "./words.js";

const ROW = 22,
  NARROWEST = 0.0015,
  DEEPEST = 24;

/** Paths to a storage, from the root to its name. */
export const WAYS = {
  module: (one) => [...one.module.split("."), one.name],
  "source line": (one) => [
    one.source.replace(/:\d+$/, ""),
    one.source,
    `${one.operator}${one.label ? ` ${one.label}` : ""}`,
  ],
  category: (one) => [one.category, ...one.module.split("."), one.name],
};

/** Storages as a tree; each node has the `sizes` of its categories. */
export function tree(storages, way) {
  const node = (name) => ({ name, own: 0, below: new Map(), sizes: new Map() });
  const root = node("all that lives");
  for (const one of storages) {
    let at = root;
    for (const name of way(one)) {
      if (!at.below.has(name)) at.below.set(name, node(name));
      at = at.below.get(name);
      at.sizes.set(one.category, (at.sizes.get(one.category) ?? 0) + one.bytes);
    }
    at.own += one.bytes;
  }
  const made = hierarchy(root, (one) => [...one.below.values()])
    .sum((one) => one.own)
    .sort((a, b) => b.value - a.value);
  return partition()(made);
}

const mostly = (sizes) => [...sizes].reduce((most, one) => (one[1] > most[1] ? one : most), [undefined, -1])[0];

export class Flame {
  constructor(colours, said) {
    Object.assign(this, { colours, said, text: "" });
    this.node = element("div", {
      class: "flame",
      role: "group",
      "aria-label": "Flame graph: arrow keys move, Enter looks closer, Escape goes back",
      keydown: (event) => this.key(event),
    });
  }

  show(root) {
    const path =
      this.focus
        ?.ancestors()
        .reverse()
        .slice(1)
        .map((node) => node.data.name) ?? [];
    this.root = this.focus = root;
    for (const name of path) this.focus = this.focus.children?.find((node) => node.data.name === name) ?? this.focus;
    this.draw();
  }

  /** Mark what has this text in its name. */
  search(text) {
    this.text = text.toLowerCase();
    this.draw();
  }

  look(node, at = node) {
    this.focus = node;
    this.draw();
    this.cells.get(at)?.focus();
  }

  draw() {
    const { focus, root } = this,
      span = focus.x1 - focus.x0 || 1,
      whole = root.value || 1;
    this.cells = new Map();
    const isHit = (node) => this.text && node.data.name.toLowerCase().includes(this.text);
    const shown = [...focus.ancestors().reverse(), ...focus.descendants().slice(1)].filter(
      (node) => node.depth <= focus.depth + DEEPEST,
    );
    for (const node of shown) {
      const above = node.depth < focus.depth,
        width = above ? 1 : (node.x1 - node.x0) / span;
      if (width < NARROWEST || !node.value) continue;
      const words = `${node.data.name}: ${bytes(node.value)}, ${share(node.value / whole)}`;
      const cell = element(
        "button",
        {
          type: "button",
          title: words,
          "aria-label": words,
          tabindex: node === focus ? 0 : -1,
          class: `${above ? "above " : ""}${isHit(node) ? "hit" : ""}`,
          click: () => this.look(node),
        },
        width > 0.03 ? node.data.name : "",
      );
      const left = above ? 0 : (node.x0 - focus.x0) / span, at = `top:${node.depth * ROW}px;left:${100 * left}%`;
      const shade = `var(--${this.colours(mostly(node.data.sizes))})`;
      cell.style.cssText = `${at};width:${100 * width}%;height:${ROW - 1}px;background:${shade}`;
      this.cells.set(node, cell);
    }
    this.node.replaceChildren(...this.cells.values());
    this.node.style.height = `${(1 + Math.max(0, ...[...this.cells.keys()].map((node) => node.depth))) * ROW}px`;
    this.say(isHit);
  }

  say(isHit) {
    const { focus, root } = this,
      path = focus
        .ancestors()
        .reverse()
        .slice(1)
        .map((node) => node.data.name)
        .join(" / ");
    let found = "";
    if (this.text) {
      let sum = 0;
      root.each((node) => {
        if (isHit(node) && !node.ancestors().slice(1).some(isHit)) sum += node.value;
      });
      found = `; found ${bytes(sum)}, ${share(sum / (root.value || 1))}`;
    }
    const size = `${bytes(focus.value)}, ${share(focus.value / (root.value || 1))}`;
    this.said.textContent = `${path || root.data.name}: ${size}${found}`;
  }

  key(event) {
    const at = [...this.cells].find(([, cell]) => cell === document.activeElement)?.[0];
    if (!at) return;
    const seen = at.parent?.children.filter((node) => this.cells.has(node)) ?? [],
      place = seen.indexOf(at);
    const to = {
      ArrowUp: at.parent,
      ArrowDown: at.children?.find((node) => this.cells.has(node)),
      ArrowLeft: seen[place - 1],
      ArrowRight: seen[place + 1],
      Home: this.root,
    }[event.key];
    if (event.key === "Escape") this.look(this.focus.parent ?? this.root, this.focus.parent ?? this.root);
    else if (!to) return;
    else this.cells.get(to)?.focus();
    event.preventDefault();
  }
}
