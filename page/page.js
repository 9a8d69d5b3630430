// What makes a page of graphmem one to look around in. It asks nobody for anything: all data is in the page.
import { curves, recolour } from "./chart.js";
import { choices } from "./choices.js";
import { Flame, WAYS, tree } from "./flame.js";
import { points } from "./points.js";
import { read } from "./run.js";
import { segments } from "./segments.js";
import { stacks } from "./stacks.js";
import { enhance, grid, searchBox, stand } from "./tables.js";
import { Timeline } from "./timeline.js";
import { bytes, count, element, share } from "./words.js";

/** Tables of a moment: how rows are made of its storages, and their columns. */
const size = { title: "requested", value: (row) => row.bytes, words: bytes, isFigure: true };
const word = (title, name = title) => ({ title, value: (row) => row[name] });
const summed = (name) => ({
  rows: (storages, whole) =>
    [...Map.groupBy(storages, (one) => one[name])].map(([key, ones]) => {
      const sum = ones.reduce((so_far, one) => so_far + one.bytes, 0);
      return { [name]: key, bytes: sum, count: ones.length, share: sum / whole };
    }),
  columns: [
    word(name),
    size,
    { title: "share", value: (row) => row.share, words: share, isFigure: true },
    { title: "storages", value: (row) => row.count, words: count, isFigure: true },
  ],
});
const TABLES = {
  storages: {
    rows: (storages) => storages,
    columns: [
      size,
      word("for", "category"),
      word("storage", "name"),
      word("operator"),
      word("module"),
      word("source"),
      word("made in", "phase"),
    ],
  },
  operators: summed("operator"),
  modules: summed("module"),
  lines: summed("source"),
  phases: summed("phase"),
};

/** Buttons of which one is chosen. */
function tabs(label, names, choose) {
  const made = names.map((name) => element("button", { type: "button", role: "tab", click: () => pick(name) }, name));
  const list = element(
    "div",
    {
      role: "tablist",
      "aria-label": label,
      keydown: (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key],
          at = made.indexOf(document.activeElement);
        if (by && at >= 0) made.at((at + by) % made.length).click();
      },
    },
    ...made,
  );
  function pick(name) {
    names.forEach((one, at) => {
      made[at].setAttribute("aria-selected", one === name);
      made[at].tabIndex = one === name ? 0 : -1;
      if (one === name && list.contains(document.activeElement)) made[at].focus();
    });
    choose(name);
  }
  return { list, pick };
}

/** What lives at the chosen moment: a flame graph and tables. */
class Moment {
  constructor(run) {
    this.run = run;
    this.text = "";
    this.title = element("h3");
    const said = element("p", { class: "said", "aria-live": "polite" });
    this.flame = new Flame(
      (category) => (category === undefined ? "c9" : `c${run.categories.indexOf(category) % 15}`),
      said,
    );
    this.grids = Object.fromEntries(
      Object.entries(TABLES).map(([name, { columns }]) => [name, grid(columns, `${name} at the moment`)]),
    );
    const place = element("div", { role: "tabpanel", "aria-label": "Table of the moment" });
    this.ways = tabs("Flame graph by", Object.keys(WAYS), (way) => ((this.way = way), this.drawFlame()));
    this.tables = tabs(
      "Table of",
      Object.keys(TABLES),
      (name) => (place.replaceChildren(this.grids[name].node), (this.table = name), this.drawTable()),
    );
    const search = searchBox(
      "Search flame graph and table",
      (text) => ((this.text = text.toLowerCase()), this.flame.search(text), this.drawTable()),
    );
    this.node = element(
      "div",
      {},
      this.title,
      element("div", { class: "tools" }, this.ways.list, search),
      said,
      this.flame.node,
      element("div", { class: "tools" }, this.tables.list),
      place,
    );
  }

  show(event) {
    this.storages = this.run
      .liveAt(event)
      .map((one) => this.run.storage(one))
      .sort((a, b) => b.bytes - a.bytes);
    this.whole = this.storages.reduce((sum, one) => sum + one.bytes, 0) || 1;
    const words = event === this.run.peak ? "the peak" : "this moment";
    const size = `${bytes(this.whole)} requested in ${count(this.storages.length)} storages`;
    this.title.textContent = `What lives at ${words}, event ${count(event)}: ${size}`;
    if (this.way) return (this.drawFlame(), this.drawTable());
    this.ways.pick("module");
    this.tables.pick("storages");
  }

  drawFlame() {
    this.flame.show(tree(this.storages, WAYS[this.way]));
  }

  drawTable() {
    const { rows, columns } = TABLES[this.table];
    const found = rows(this.storages, this.whole).filter((row) =>
      columns.some((column) => String(column.value(row)).toLowerCase().includes(this.text)),
    );
    this.grids[this.table].show(found.sort((a, b) => b.bytes - a.bytes));
  }
}

async function moments(host) {
  const run = await read(host.dataset.tables),
    moment = new Moment(run);
  const timeline = new Timeline(run, (event) => {
    const at = Math.max(0, Math.min(run.size - 1, event));
    timeline.show(at);
    moment.show(at);
  });
  host.replaceChildren(timeline.node, moment.node, segments(run));
  timeline.draw();
  timeline.choose(run.peak);
  host.dataset.ready = "yes";
}

document.querySelectorAll("table:not(.heat)").forEach(enhance);
const isPhone = matchMedia("(max-width: 640px)").matches;
for (const part of document.querySelectorAll(".wide")) {
  const table = part.querySelector("table:not(.heat)");
  if (part.scrollWidth > part.clientWidth && table?.tHead && isPhone) stand(table);
  if (part.scrollWidth > part.clientWidth) part.tabIndex = 0; // to scroll it by keys
}
document.querySelectorAll(".curves").forEach(curves);
document.querySelectorAll(".stacks").forEach(stacks);
document.querySelectorAll(".points").forEach(points);
document.querySelectorAll(".choices").forEach(choices);
const host = document.getElementById("moments");
if (host) moments(host);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
for (const [event, value] of [
  ["beforeprint", "yes"],
  ["afterprint", ""],
]) {
  addEventListener(event, () => {
    document.documentElement.dataset.print = value; // paper is white
    recolour();
  });
}
