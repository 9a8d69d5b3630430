// Tables that are sorted by a click on a title, and searched.
import { count, element } from "./words.js";

const MANY = 12; // rows from which a table of the page is worth searching
const SHOWN = 100; // rows of a table that are drawn before more are asked for

const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });

/** Make buttons of titles; `order(column, direction)` sorts: 1 up, -1 down, 0 as it came. */
function sortable(titles, isFigure, order) {
  titles.forEach((title, column) => {
    if (!title.textContent) return;
    const button = element("button", { type: "button", class: "sort" }, ...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const turns = isFigure(column) ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
      const next = turns[(turns.indexOf(title.getAttribute("aria-sort") ?? "none") + 1) % 3];
      titles.forEach((one) => one.removeAttribute("aria-sort"));
      if (next !== "none") title.setAttribute("aria-sort", next);
      order(column, { ascending: 1, descending: -1, none: 0 }[next]);
    });
  });
}

export function searchBox(label, search) {
  return element("input", {
    type: "search",
    placeholder: label,
    "aria-label": label,
    input: (event) => search(event.target.value),
  });
}

/** A table that stands in the page: sorted by its values, searched by its words. */
export function enhance(table) {
  const titles = [...table.querySelectorAll("thead tr > *")],
    body = table.tBodies[0];
  if (!titles.length || !body) return;
  const rows = [...body.rows];
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  if (rows.length > 1) {
    const isFigure = (column) => titles[column].classList.contains("n");
    sortable(titles, isFigure, (column, direction) => {
      const sorted = direction
        ? [...rows].sort((a, b) => direction * compare(value(a, column), value(b, column)))
        : rows;
      body.append(...sorted);
    });
  }
  if (rows.length > MANY) {
    const search = (text) =>
      rows.forEach((row) => (row.hidden = !row.textContent.toLowerCase().includes(text.toLowerCase())));
    table.parentElement.before(searchBox("Search these rows", search));
  }
}

/** Cells of a row below one another, where a row is wider than a phone: each figure with the title of its column. */
export function stand(table) {
  const titles = [...table.tHead.rows[0].cells].map((title) => title.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, column) => (cell.dataset.title = titles[column]));
  }
  table.classList.add("tall");
}

/** A table of `columns` ({title, value, words?, isFigure?, draw?}) for rows that change: {node, show(rows)}. */
export function grid(columns, label) {
  const titles = columns.map(({ title, isFigure }) =>
    element("th", { scope: "col", class: isFigure ? "n" : "" }, title),
  );
  const body = element("tbody"),
    said = element("p", { class: "said" });
  const table = element(
    "table",
    {},
    element("caption", { class: "aside" }, label),
    element("thead", {}, element("tr", {}, ...titles)),
    body,
  );
  let rows = [],
    room = SHOWN,
    by = null;
  const cell = (row) => (column) => {
    const value = column.value(row),
      words = column.words ? column.words(value) : String(value);
    return element(
      "td",
      { class: column.isFigure ? "n" : column.draw ? "bar" : "" },
      column.draw ? column.draw(row) : words,
    );
  };
  function draw() {
    const sorted = by ? [...rows].sort((a, b) => by.direction * compare(by.value(a), by.value(b))) : rows;
    body.replaceChildren(...sorted.slice(0, room).map((row) => element("tr", {}, ...columns.map(cell(row)))));
    const rest = rows.length - room;
    said.replaceChildren(`${count(Math.min(room, rows.length))} of ${count(rows.length)} rows `);
    if (rest > 0) said.append(element("button", { type: "button", click: () => ((room *= 10), draw()) }, "Show more"));
  }
  sortable(
    titles,
    (column) => columns[column].isFigure,
    (column, direction) => {
      by = direction ? { value: columns[column].value, direction } : null;
      draw();
    },
  );
  return {
    node: element(
      "div",
      {},
      element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, table),
      said,
    ),
    show: (found) => ((rows = found), (room = SHOWN), draw()),
  };
}
