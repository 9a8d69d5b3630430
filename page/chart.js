// Curves on uPlot, in the colours of the page, with round ticks in binary units.
import uPlot from "uplot";
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

export function axes(unit, label, xUnit) {
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
      incrs: xUnit === "count" ? WHOLE_STEPS : undefined,
      values: (_, ticks) => ticks.map(tick(xUnit)),
      grid: { show: false },
    },
    { ...shared, size: 72, incrs: steps(unit), values: (_, ticks) => ticks.map(tick(unit)) },
  ];
}

/** The highest value that is shown: with the limit, if that is near. */
export const top = (highest, limit) =>
  1.04 * (limit && limit[0] <= NEAR * highest ? Math.max(limit[0], highest) : highest || 1);

/** A line through the plot at a limit, with its name. */
export function drawLimit(u, [value, words]) {
  if (value > u.scales.y.max) return;
  const { ctx, bbox } = u,
    y = Math.round(u.valToPos(value, "y", true)),
    ratio = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = colour("no");
  ctx.lineWidth = 2 * ratio;
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left"; // where curves are low
  ctx.textBaseline = "top";
  const width = ctx.measureText(words).width;
  ctx.fillStyle = colour("page");
  ctx.fillRect(bbox.left + 2 * ratio, y + 2 * ratio, width + 6 * ratio, 15 * ratio);
  ctx.fillStyle = colour("no");
  ctx.fillText(words, bbox.left + 4 * ratio, y + 3 * ratio);
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

/** The curves of a figure: values over time, or over a size. */
export function curves(figure) {
  const { unit, names, values, over, axis, limit, marks, at } = JSON.parse(figure.dataset.curves);
  const highest = largest(values.map(largest)),
    words = tick(unit),
    host = element("div", { class: "plot" });
  const xs = over ?? values[0].map((_, index) => index);
  const said = element("p", { class: "said", "aria-live": "polite" });
  const nearest = (index) =>
    [over ? `${axis} ${xs[index]}` : "", ...names.map((name, one) => `${name} ${words(values[one][index])}`)]
      .filter(Boolean)
      .join(", ");
  const legend = element(
    "p",
    {},
    ...names.map((name, one) => element("span", { class: "key" }, swatch(`c${one}`), name)),
  );
  if (limit && limit[0] > NEAR * highest) legend.append(`far above: ${limit[1]}, ${words(limit[0])}`);
  figure.prepend(host, said, legend);
  const axisOfX = axes(unit, axis, "count");
  if (!over) axisOfX[0].values = (_, ticks) => ticks.map(() => "");
  chart(
    {
      scales: { x: { time: false }, y: { range: () => [0, top(highest, limit)] } },
      axes: axisOfX,
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
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", `${names.join(", ")} up to ${words(highest)}`);
}

function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  ctx.fillStyle = colour("no");
  for (const mark of marks) ctx.fillRect(u.valToPos(mark, "x", true) - 1, bbox.top + bbox.height - 8, 2, 8);
}
