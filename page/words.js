// Figures as words, as graphmem.units and graphmem.reports.document write them; and elements.
const THREE = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
const UNITS = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];

/** Numbers with so many digits after the point, halves to the even one. */
const digits = (least, most) =>
  new Intl.NumberFormat("en-US", {
    minimumFractionDigits: least,
    maximumFractionDigits: most,
    roundingMode: "halfEven",
  });
const TWO = digits(2, 2),
  ONE = digits(1, 1),
  FEW = digits(0, 2),
  WHOLE = digits(0, 0);

const inUnits = (count, numbers) => {
  const unit = UNITS.find(([factor]) => Math.abs(count) >= factor);
  return unit ? `${numbers.format(count / unit[0])} ${unit[1]}` : `${numbers.format(count)} B`.replace(/\.0+ B/, " B");
};

export const bytes = (count) => inUnits(count, TWO);
export const count = (number) => WHOLE.format(number);
export const share = (part) => `${ONE.format(100 * part)} %`;

/** Labels of an axis in a unit: no more digits than they need. */
export const tick = (unit) =>
  ({
    bytes: (n) => inUnits(n, FEW),
    share: (n) => `${FEW.format(100 * n)} %`,
    seconds: (n) => `${THREE.format(n)} s`,
  })[unit] ?? FEW.format;

/** Steps of an axis in a unit; undefined: the chart's own. */
export const steps = (unit) => (unit === "bytes" ? Array.from({ length: 60 }, (_, power) => 2 ** power) : undefined);

/** A new element with attributes (functions are listeners) and children. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** The value of a variable of the style sheet, as it is now. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const swatch = (name) => {
  const made = element("span", { class: "swatch" });
  made.style.background = `var(--${name})`;
  return made;
};

/** The largest of many values. */
export const largest = (values) => values.reduce((most, value) => (value > most ? value : most), 0);
