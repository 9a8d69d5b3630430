// Bars of several wholes: the parts of the one that is chosen are told below.
import { chooser } from "./choose.js";
import { element } from "./words.js";

export function stacks(figure) {
  const rows = [...figure.querySelectorAll("tr[data-said]")],
    said = element("p", { class: "said" });
  const words = (at) => rows[at].dataset.said;
  const show = (at) => {
    said.textContent = words(at);
    rows.forEach((row, one) => row.classList.toggle("chosen", one === at));
  };
  const host = figure.querySelector(".wide");
  host.after(said);
  const choice = chooser(host, {
    label: "What each is made of",
    count: rows.length,
    first: 0,
    words,
    show,
    upright: true,
  });
  rows.forEach((row, at) => row.addEventListener("click", () => choice.pick(at)));
  show(0);
}
