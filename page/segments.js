// The allocator's segments at the peak: what is held of each, and the holes.
import { grid } from "./tables.js";
import { bytes, count, element, largest } from "./words.js";

const SVG = "http://www.w3.org/2000/svg",
  WIDE = 1000;

/** The blocks of a segment from left to right, as wide as it is beside the largest one: blue what is held. */
function drawn(segment, most) {
  const svg = document.createElementNS(SVG, "svg"),
    path = { held: "", free: "" };
  svg.setAttribute("viewBox", `0 0 ${WIDE} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  let at = 0;
  for (const block of segment.blocks) {
    const width = (WIDE * Math.abs(block)) / most;
    path[block > 0 ? "held" : "free"] += `M${at.toFixed(2)} 1h${width.toFixed(2)}v8h${(-width).toFixed(2)}z`;
    at += width;
  }
  for (const [name, d] of Object.entries(path)) {
    const part = document.createElementNS(SVG, "path");
    part.setAttribute("d", d);
    part.setAttribute("class", name);
    svg.append(part);
  }
  return svg;
}

export function segments(run) {
  if (!run.segments.length) return "";
  const rows = run.segments
    .map((segment) => {
      const holes = segment.blocks.filter((block) => block < 0).map((block) => -block);
      const size = segment.blocks.reduce((sum, block) => sum + Math.abs(block), 0),
        free = holes.reduce((sum, hole) => sum + hole, 0);
      return {
        ...segment,
        size,
        held: size - free,
        holes: holes.length,
        hole: largest(holes),
        number: segment.blocks.length - holes.length,
      };
    })
    .sort((a, b) => b.size - a.size);
  const most = rows[0].size;
  const figure = (title, name, words) => ({ title, value: (row) => row[name], words, isFigure: true });
  const word = (title, name = title) => ({ title, value: (row) => row[name] });
  const table = grid(
    [
      figure("segment", "size", bytes),
      figure("held", "held", bytes),
      figure("blocks", "number", count),
      figure("holes", "holes", count),
      figure("largest hole", "hole", bytes),
      word("kind"),
      word("stream"),
      ...(rows.some((row) => row.pool) ? [word("private pool", "pool")] : []),
      { title: "layout", value: (row) => row.size, draw: (row) => drawn(row, most) },
    ],
    "segments at the peak",
  );
  table.show(rows);
  const sum = (name) => bytes(rows.reduce((all, row) => all + row[name], 0));
  const hole = bytes(largest(rows.map((row) => row.hole)));
  const kept = `${sum("held")} are held; the largest hole is ${hole}.`;
  const said = `${sum("size")} reserved in ${count(rows.length)} segments, of which ${kept}`;
  return element(
    "div",
    { class: "segments" },
    element("h3", {}, "The allocator's segments at the peak"),
    element("p", {}, said),
    table.node,
  );
}
