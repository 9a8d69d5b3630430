// Choices as points by two figures: the nearest to the pointer, or the next by key, is named below.
import { axes, chart, drawLimit } from "./chart.js";
import { chooser } from "./choose.js";
import { colour, element, largest, tick } from "./words.js";

const SIZE = 5; // radius of a point

/** Shapes of the groups, which tell them apart without colours; each is a path around a point. */
const SHAPES = [
  (p, x, y, r) => p.arc(x, y, r, 0, 2 * Math.PI),
  (p, x, y, r) => (p.moveTo(x, y - r), p.lineTo(x + r, y), p.lineTo(x, y + r), p.lineTo(x - r, y), p.closePath()),
  (p, x, y, r) => p.rect(x - 0.8 * r, y - 0.8 * r, 1.6 * r, 1.6 * r),
  (p, x, y, r) => (p.moveTo(x, y - r), p.lineTo(x + r, y + r), p.lineTo(x - r, y + r), p.closePath()),
  (p, x, y, r) => (p.moveTo(x - r, y), p.lineTo(x + r, y), p.moveTo(x, y - r), p.lineTo(x, y + r)),
];
const COLOURS = ["yes", "c4", "c5", "no", "quiet"];
const style = (group) => ({ shape: SHAPES[group % SHAPES.length], colour: COLOURS[group % COLOURS.length] });

/** A group's mark for the legend. */
function mark({ shape, colour: name }) {
  const canvas = element("canvas", { width: 24, height: 24, class: "mark", "aria-hidden": "true" });
  const draw = () => {
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, 24, 24);
    paint(context, shape, colour(name), 12, 12, 9);
  };
  draw();
  return { canvas, draw };
}

function paint(context, shape, ink, x, y, radius) {
  const path = new Path2D();
  shape(path, x, y, radius);
  context.fillStyle = context.strokeStyle = ink;
  context.lineWidth = radius / 3;
  context.fill(path);
  context.stroke(path);
}

export function points(figure) {
  const { axes: ways, groups, limit, chosen } = JSON.parse(figure.dataset.points);
  const words = ways.map(({ unit }) => tick(unit));
  const all = groups
    .flatMap(([group, ones], at) => ones.map(([x, y, name]) => ({ x, y, name, group, style: style(at) })))
    .sort((a, b) => a.x - b.x || a.y - b.y);
  if (!all.length) return;
  const best = all.findIndex((one) => one.name === chosen);
  let at = best < 0 ? 0 : best;
  const named = ({ x, y, name, group }, place) =>
    `${name}: ${words[0](x)}, ${words[1](y)}, ${group}${place === best ? " (chosen)" : ""}`;
  const host = element("div", { class: "plot" }),
    said = element("p", { class: "said" });
  const keys = groups
    .map(([name, ones], group) => [`${name} (${ones.length})`, mark(style(group)), ones.length])
    .filter(([, , count]) => count);
  const legend = element(
    "p",
    {},
    ...keys.map(([name, { canvas }]) => element("span", { class: "key" }, canvas, name)),
  );
  figure.prepend(host, said, legend);
  const right = Math.max(largest(all.map((one) => one.x)), limit ? limit[0] : 0),
    top = largest(all.map((one) => one.y)) || 1;
  const place = (u, one) => [u.valToPos(one.x, "x", true), u.valToPos(one.y, "y", true)];
  const draw = (u) => {
    const ratio = devicePixelRatio;
    keys.forEach(([, key]) => key.draw());
    if (limit) drawLimit(u, [limit[0], `${limit[1]}, ${words[0](limit[0])}`], "x");
    const order = all.map((one, place) => [one, place]).sort(([, a], [, b]) => (a === best) - (b === best));
    for (const [one, number] of order) {
      const [x, y] = place(u, one);
      paint(u.ctx, one.style.shape, colour(one.style.colour), x, y, SIZE * ratio);
      if (number === best) ring(u.ctx, x, y, 2 * SIZE * ratio, colour("accent"), 3 * ratio);
      if (number === at) ring(u.ctx, x, y, 1.5 * SIZE * ratio, colour("ink"), 1.5 * ratio);
    }
  };
  const { plot } = chart(
    {
      scales: { x: { time: false, range: () => [0, 1.05 * right] }, y: { range: () => [0, 1.08 * top] } },
      axes: axes(ways[1].unit, ways[0].name, ways[0].unit, ways[1].name),
      cursor: { x: false, y: false, points: { show: false }, drag: { x: false, y: false } },
      series: [{}, { show: true, paths: () => null, points: { show: false } }],
      hooks: {
        draw: [draw],
        ready: [(u) => u.over.addEventListener("click", () => choice.pick(nearest(u)))],
        setCursor: [(u) => tell(u.cursor.left >= 0 ? nearest(u) : at)],
      },
    },
    [all.map((one) => one.x), all.map((one) => one.y)],
    host,
    300,
  );
  function nearest(u) {
    const far = (one) => Math.hypot(u.valToPos(one.x, "x") - u.cursor.left, u.valToPos(one.y, "y") - u.cursor.top);
    return all.reduce((found, one, number) => (far(one) < far(all[found]) ? number : found), 0);
  }
  function tell(number) {
    said.textContent = named(all[number], number);
  }
  tell(at);
  const choice = chooser(host, {
    label: `${ways[1].name} over ${ways[0].name}`,
    count: all.length,
    first: at,
    words: (number) => named(all[number], number),
    show: (number) => ((at = number), tell(number), plot.redraw(false, false)),
  });
}

function ring(context, x, y, radius, ink, width) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.strokeStyle = ink;
  context.lineWidth = width;
  context.stroke();
}
