// Curves on uPlot, in the colours of the page, with round ticks in binary units.
import uPlot from "uplot";
import { chooser } from "./choose.js";
import { colour, element, largest, steps, swatch, tick } from "./words.js";

const charts = new Set();
const FONT = "12px system-ui, sans-serif";
const NEAR = 2; // up to so many times the highest value the limit is drawn

/** Draw all anew: the colours are others. */
export const recolour = () => charts.forEach((chart) => chart.redraw(false, true));

/** Steps where an event has a column of its own; where many share one, uPlot's line of each column's range. */
const stepped = uPlot.paths.stepped({ align: 1 }),
  linear = uPlot.paths.linear();
export const paths = (u, series, from, to) => (to - from > 2 * u.bbox.width ? linear : stepped)(u, series, from, to);

/** Steps of an axis of counts: there is nothing between two of them. */
const WHOLE_STEPS = Array.from({ length: 40 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

export const line = (name, width = 2) => ({ stroke: () => colour(name), width, paths, points: { show: false } });
export const area = (name) => ({ ...line("page", 0.5), fill: () => colour(name) });

/** The axis below, with its label, and the one to the left. */
export function axes(unit, label, xUnit, leftLabel) {
  const shared = {
    font: FONT,
    labelFont: FONT,
    stroke: () => colour("quiet"),
    grid: { stroke: () => colour("rule"), width: 1 },
    ticks: { stroke: () => colour("rule") },
  };
  return [
    {
      ...shared,
      label,
      labelSize: 18,
      size: 30,
      incrs: xUnit === "count" ? WHOLE_STEPS : steps(xUnit),
      values: ticksIn(xUnit),
      grid: { show: false },
    },
    { ...shared, size: 72, incrs: steps(unit), values: ticksIn(unit), ...(leftLabel ? { label: leftLabel, labelSize: 18 } : {}) },
  ];
}

/** The labels of an axis in a unit; none where there is no room for one. */
const ticksIn = (unit) => (_, ticks) => ticks.map((value) => (value == null ? "" : tick(unit)(value)));

/** The highest value that is shown: with the limit, if that is near. */
export const top = (highest, limit) =>
  1.04 * (limit && limit[0] <= NEAR * highest ? Math.max(limit[0], highest) : highest || 1);

/** A line through the plot at a limit, of y or of x, with its name. */
export function drawLimit(u, [value, words], scale = "y") {
  if (value > u.scales[scale].max) return;
  const { ctx, bbox } = u,
    at = Math.round(u.valToPos(value, scale, true)),
    ratio = devicePixelRatio,
    isLevel = scale === "y";
  ctx.save();
  ctx.strokeStyle = colour("no");
  ctx.lineWidth = 2 * ratio;
  ctx.beginPath();
  ctx.moveTo(isLevel ? bbox.left : at, isLevel ? at : bbox.top);
  ctx.lineTo(isLevel ? bbox.left + bbox.width : at, isLevel ? at : bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left"; // where curves are low
  ctx.textBaseline = "top";
  const width = ctx.measureText(words).width + 6 * ratio,
    left = isLevel ? bbox.left + 2 * ratio : Math.max(bbox.left, at - width - 3 * ratio),
    top = (isLevel ? at : bbox.top) + 2 * ratio;
  ctx.fillStyle = colour("page");
  ctx.fillRect(left, top, width, 15 * ratio);
  ctx.fillStyle = colour("no");
  ctx.fillText(words, left + 2 * ratio, top + ratio);
  ctx.restore();
}

/** A chart as wide as its host, and later too. */
export function chart(options, data, host, height) {
  const made = new uPlot({ width: host.clientWidth || 300, height, legend: { show: false }, ...options }, data, host);
  const follow = new ResizeObserver(() => made.setSize({ width: host.clientWidth, height }));
  follow.observe(host);
  charts.add(made);
  return { plot: made, end: () => (follow.disconnect(), charts.delete(made), made.destroy()) };
}

const ROOM = 64; // pixels of a label below

/** Axes of values that double from one to the next: both by powers, a label below for as many as there is room for. */
function byPowers(xs, values, limit) {
  const flat = [...values.flat(), ...(limit ? [limit[0]] : [])].filter((value) => value > 0);
  const [least, most] = [flat.reduce((found, value) => Math.min(found, value)), largest(flat)];
  const levels = Array.from({ length: 46 }, (_, at) => [1, 2, 5][at % 3] * 10 ** (Math.floor(at / 3) - 3));
  const seen = levels.filter((value, at) => (levels[at + 1] ?? value) > least && (levels[at - 1] ?? 0) < most);
  const splits = (u) => {
    const every = Math.ceil((ROOM * xs.length) / (u.bbox.width / devicePixelRatio));
    return xs.filter((_, at) => (xs.length - 1 - at) % every === 0);
  };
  return {
    scales: {
      x: { time: false, distr: 3, log: 2, range: () => [xs[0] * 0.9, xs.at(-1) * 1.1] },
      y: { distr: 3, log: 10, range: () => [seen[0], seen.at(-1)] },
    },
    below: { splits, incrs: undefined, filter: (_, ticks) => ticks },
    left: { splits: () => seen, incrs: undefined, filter: (_, ticks) => ticks },
  };
}

/** The curves of a figure: values over time, or over a size. */
export function curves(figure) {
  const { unit, names, values, over, axis, limit, marks, at, doubling } = JSON.parse(figure.dataset.curves);
  const highest = largest(values.map(largest)),
    words = tick(unit),
    host = element("div", { class: "plot" });
  const xs = over ?? values[0].map((_, index) => index);
  const said = element("p", { class: "said" });
  const nearest = (index) =>
    [over ? `${axis} ${tick("count")(xs[index])}` : "", ...names.map((name, one) => `${name} ${words(values[one][index])}`)]
      .filter(Boolean)
      .join(", ");
  const legend = element(
    "p",
    {},
    ...names.map((name, one) => element("span", { class: "key" }, swatch(`c${one}`), name)),
  );
  const isFar = !doubling && limit && limit[0] > NEAR * highest;
  if (isFar) legend.append(`far above: ${limit[1]}, ${words(limit[0])}`);
  figure.prepend(host, said, legend);
  const [below, left] = axes(unit, axis, "count");
  if (!over) below.values = (_, ticks) => ticks.map(() => "");
  const powers = doubling
    ? byPowers(xs, values, limit)
    : { scales: { x: { time: false }, y: { range: () => [0, top(highest, limit)] } } };
  const { plot } = chart(
    {
      scales: powers.scales,
      axes: [{ ...below, ...powers.below }, { ...left, ...powers.left }],
      cursor: { drag: { x: true, y: false } },
      series: [
        {},
        ...names.map((_, one) => ({
          ...line(`c${one}`),
          ...(over ? { paths: linear, points: { show: true, size: 7, fill: () => colour("page") } } : {}),
        })),
      ],
      hooks: {
        setCursor: [(u) => (said.textContent = u.cursor.idx == null ? "" : nearest(u.cursor.idx))],
        draw: [
          (u) => limit && drawLimit(u, [limit[0], `${limit[1]}, ${words(limit[0])}`]),
          (u) =>
            drawMarks(
              u,
              [...marks, ...(at ? [at[0]] : [])].map((mark) => xs[mark]),
            ),
        ],
      },
    },
    [xs, ...values],
    host,
    260,
  );
  chooser(host, {
    label: `${names.join(", ")} up to ${words(highest)}`,
    count: xs.length,
    first: xs.length - 1,
    words: nearest,
    show: (index) => plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: plot.valToPos(values[0][index], "y") }),
  });
}

function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  ctx.fillStyle = colour("no");
  for (const mark of marks) ctx.fillRect(u.valToPos(mark, "x", true) - 1, bbox.top + bbox.height - 8, 2, 8);
}
