// The run over its events: what is requested, stacked; what is allocated and reserved; phases, and the card's edge.
import { area, axes, chart, drawLimit, line, top } from "./chart.js";
import { bytes, colour, count, element, largest, swatch } from "./words.js";

const MOST_LAYERS = 10,
  LEAST_EVENTS = 10;
const part = (path) => path.split(".").slice(0, 2).join(".") || "(no module)";

/** How the stack is divided: the group of a storage, its name, and whether groups have an order and colours. */
const STACKS = {
  category: (run) => ({
    key: (one) => run.storages.category[one],
    name: (key) => run.categories[key],
    ordered: true,
    most: 20,
  }),
  module: (run) => ({
    key: (one) => part(run.strings[run.storages.module[one]]),
    name: (key) => key,
    most: MOST_LAYERS,
  }),
  phase: (run) => ({
    key: (one) => run.phaseAt(run.storages.born[one]),
    name: (key) => `made in ${run.phases[key]}`,
    most: MOST_LAYERS,
  }),
};

export class Timeline {
  constructor(run, choose) {
    Object.assign(this, {
      run,
      choose,
      moment: run.peak,
      stretches: run.stretches(),
      highest: largest(run.events.reserved),
      shown: [0, run.size - 1],
    });
    this.host = element("div", {
      class: "plot",
      tabindex: "0",
      role: "slider",
      "aria-label": "Event of the run",
      "aria-valuemin": 0,
      "aria-valuemax": run.size - 1,
      keydown: (event) => this.key(event),
      wheel: (event) => this.wheel(event),
    });
    this.strip = element("div", { class: "strip", "aria-hidden": "true" });
    this.said = element("div", { class: "readout" });
    this.legend = element("ul", { class: "legend" });
    this.note = element("p", { class: "said" });
    this.node = element("div", {}, this.tools(), this.host, this.strip, this.said, this.legend, this.note);
  }

  tools() {
    const button = (words, label, click) =>
      element("button", { type: "button", "aria-label": label, title: label, click }, words);
    const select = element(
      "select",
      { change: () => this.stack(select.value) },
      ...Object.keys(STACKS).map((name) => element("option", {}, name)),
    );
    return element(
      "div",
      { class: "tools" },
      button("Peak", "Choose the peak (P)", () => this.choose(this.run.peak)),
      button("+", "Zoom in (+)", () => this.zoom(0.5)),
      button("−", "Zoom out (-)", () => this.zoom(2)),
      button("←", "Earlier (page up)", () => this.pan(-0.5)),
      button("→", "Later (page down)", () => this.pan(0.5)),
      button("All", "All of the run (0)", () => this.view(0, this.run.size - 1)),
      element("label", {}, "stacked by ", select),
      element(
        "span",
        { class: "hint" },
        "Drag to zoom, click to choose a moment; Ctrl + wheel zooms, Shift + wheel pans; arrow keys move.",
      ),
    );
  }

  /** Draw it, once it stands in the page. */
  draw() {
    this.stack("category");
    const { run } = this;
    const limits = () => ({ x: { time: false }, y: { range: () => [0, top(this.highest)] } });
    this.overview = chart(
      {
        scales: limits(),
        axes: [{ show: false }, { show: false }],
        padding: [2, 0, 2, 72],
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
        series: [{}, { ...line("quiet", 1), fill: () => colour("rule") }],
        hooks: {
          setSelect: [
            (u) =>
              u.select.width > 1 &&
              this.view(...[u.select.left, u.select.left + u.select.width].map((x) => u.posToVal(x, "x"))),
          ],
          setSize: [() => this.mark()],
        },
      },
      [this.xs, run.events.reserved],
      this.strip,
      44,
    ).plot;
    this.mark();
  }

  stack(by) {
    this.drawn?.end();
    const { run, host } = this,
      { key, name, ordered, most } = STACKS[by](run);
    const layers = run.layers(key, most);
    if (ordered) layers.sort((a, b) => a.keys[0] - b.keys[0]);
    layers.forEach((layer, at) => {
      layer.colour = `c${(ordered ? layer.keys[0] : at) % 15}`;
      layer.name = layer.keys.length > 1 ? `${layer.keys.length} others` : name(layer.keys[0]);
    });
    this.layers = layers;
    this.xs ??= Float64Array.from({ length: run.size }, (_, event) => event);
    const sums = [];
    for (const { values } of layers)
      sums.push(values.map((value, event) => value + (sums.length ? sums.at(-1)[event] : 0)));
    this.requested = sums.at(-1);
    const { allocated, reserved } = run.events,
      edge = run.edge && [run.edge[1], `${run.edge[0]} ends, ${bytes(run.edge[1])}`];
    const room = top(this.highest, edge);
    this.note.textContent = edge && edge[0] > room ? `Far above: ${run.edge[0]} has room for ${bytes(edge[0])} of segments.` : "";
    this.drawn = chart(
      {
        padding: [22, 8, 0, 0],
        scales: { x: { time: false, range: (_, from, to) => [from, to] }, y: { range: () => [0, room] } },
        axes: axes("bytes", "event", "count"),
        cursor: { drag: { x: true, y: false, dist: 4 }, points: { show: false } },
        series: [{}, ...layers.map((layer) => area(layer.colour)).reverse(), line("ink", 1), line("accent", 2)],
        hooks: {
          drawClear: [(u) => this.bands(u)],
          draw: [(u) => edge && drawLimit(u, edge), (u) => this.rule(u)],
          setScale: [(u, scale) => scale === "x" && this.mark()],
          setCursor: [(u) => this.read(u.cursor.left >= 0 ? u.cursor.idx : this.moment)],
          ready: [(u) => u.over.addEventListener("click", () => this.choose(u.cursor.idx))],
        },
      },
      [this.xs, ...sums.reverse(), allocated, reserved],
      host,
      360,
    );
    this.view(...this.shown);
    this.read(this.moment);
  }

  // --- what is seen

  view(from, to) {
    const last = this.run.size - 1,
      span = Math.min(Math.max(to - from, LEAST_EVENTS), last);
    const begin = Math.max(0, Math.min((from + to - span) / 2, last - span));
    this.drawn.plot.setScale("x", { min: begin, max: begin + span });
  }

  zoom(factor, center = this.moment) {
    const [from, to] = this.shown,
      at = center < from || center > to ? (from + to) / 2 : center;
    this.view(at - (at - from) * factor, at + (to - at) * factor);
  }

  pan(part) {
    const [from, to] = this.shown,
      by = (to - from) * part;
    this.view(from + by, to + by);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const turn = event.deltaY || event.deltaX,
      u = this.drawn.plot;
    if (event.ctrlKey)
      this.zoom(turn > 0 ? 1.25 : 0.8, u.posToVal(event.clientX - u.over.getBoundingClientRect().left, "x"));
    else this.pan(Math.sign(turn) * 0.1);
  }

  key(event) {
    const [from, to] = this.shown,
      { moment, run } = this;
    const step = event.shiftKey ? Math.max(1, Math.round((to - from) / 50)) : 1;
    const does = {
      ArrowLeft: () => this.choose(moment - step),
      ArrowRight: () => this.choose(moment + step),
      Home: () => this.choose(0),
      End: () => this.choose(run.size - 1),
      p: () => this.choose(run.peak),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.view(0, run.size - 1),
      PageUp: () => this.pan(-0.5),
      PageDown: () => this.pan(0.5),
    }[event.key];
    if (!does || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    does();
  }

  /** The part that is seen, in the strip. */
  mark() {
    const { min, max } = this.drawn.plot.scales.x;
    if (min == null) return;
    this.shown = [min, max];
    Object.assign(this.host.dataset, { from: Math.round(min), to: Math.round(max) });
    const u = this.overview;
    if (!u) return;
    const [left, right] = [min, max].map((value) => u.valToPos(value, "x"));
    u.setSelect({ left, width: right - left, top: 0, height: u.over.clientHeight }, false);
  }

  // --- what is drawn

  /** Bands of the phases, each with its name where there is room. */
  bands(u) {
    const { ctx, bbox } = u,
      ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, u.ctx.canvas.height);
    ctx.clip();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    this.stretches.forEach(([first, last, phase], at) => {
      const left = Math.max(bbox.left, u.valToPos(first, "x", true));
      const right = Math.min(bbox.left + bbox.width, u.valToPos(last + 1, "x", true));
      if (right - left < 1) return;
      ctx.fillStyle = colour(at % 2 ? "band" : "page");
      ctx.fillRect(left, bbox.top - 20 * ratio, right - left, bbox.height + 20 * ratio);
      ctx.fillStyle = colour("quiet");
      const room = right - left - 8 * ratio,
        [, number, name] = /^iteration (\d+) (.*)/.exec(this.run.phases[phase]) ?? [];
      const names = name ? [`${name} ${number}`, name] : [this.run.phases[phase]];
      const fitting = names.find((words) => ctx.measureText(words).width <= room);
      if (fitting) ctx.fillText(fitting, left + 4 * ratio, bbox.top - 6 * ratio);
    });
    ctx.restore();
  }

  /** A rule at the chosen moment. */
  rule(u) {
    const { ctx, bbox } = u,
      x = u.valToPos(this.moment, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    ctx.strokeStyle = colour("ink");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  /** What happens at an event, and what is held after it. */
  read(event) {
    const { run } = this;
    if (event == null) return;
    const operator = run.operatorOf(event),
      one = run.storageAt[event];
    const place = [operator.module && `in ${operator.module}`, operator.source && `at ${operator.source}`]
      .filter(Boolean)
      .join(" ");
    let what = "";
    if (one >= 0) {
      const storage = run.storage(one);
      const does = run.storages.born[one] === event ? "takes" : "gives back";
      what = `${does} ${bytes(storage.bytes)}, ${storage.category}: ${storage.name}`;
    }
    const { allocated, reserved } = run.events, sizes = { requested: this.requested, allocated, reserved };
    const levels = Object.entries(sizes).map(([name, values]) => `${name} ${bytes(values[event])}`).join(", ");
    const named = `event ${count(event)}${event === run.peak ? " (the peak)" : ""}`;
    const head = `${named}, ${run.phases[run.phaseAt(event)]}: ${levels}`;
    this.said.replaceChildren(element("p", {}, head), element("p", {}, `${operator.name} ${place} ${what}`));
    const keys = this.layers.map((layer) => [layer.colour, layer.name, layer.values[event]]);
    keys.push(
      ["ink", "allocated (line)", run.events.allocated[event]],
      ["accent", "reserved (line)", run.events.reserved[event]],
    );
    this.legend.replaceChildren(
      ...keys.map(([name, words, size]) =>
        element("li", { class: "key" }, swatch(name), `${words} `, element("b", {}, bytes(size))),
      ),
    );
    return head;
  }

  /** Show a moment that was chosen. */
  show(event) {
    this.moment = event;
    const [from, to] = this.shown,
      head = this.read(event);
    this.host.setAttribute("aria-valuenow", event);
    this.host.setAttribute("aria-valuetext", head);
    if (event < from || event > to) this.view(event - (to - from) / 2, event + (to - from) / 2);
    else this.drawn.plot.redraw(false, false);
  }
}
