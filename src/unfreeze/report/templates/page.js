// What a picture shows under the pointer, and a button that copies the command. The page is whole without this.
"use strict";
const SVG = "http://www.w3.org/2000/svg";

for (const figure of document.querySelectorAll("figure[data-series]")) {
  const series = JSON.parse(figure.dataset.series);
  for (const svg of figure.querySelectorAll("svg[data-axes]")) tell(figure, svg, series);
}
for (const command of document.querySelectorAll("pre.command")) copyable(command);

// series: [{name, unit, x: [...], y: [...]}], x rising; the first one leads.
function tell(figure, svg, series) {
  const [left, top, right, bottom, x0, x1, y0, y1, xLog, yLog] = svg.dataset.axes.split(" ").map(Number);
  const across = (x) => left + (right - left) * share(x, x0, x1, xLog);
  const down = (y) => bottom - (bottom - top) * share(y, y0, y1, yLog);
  const line = add(svg, "line", { y1: top, y2: bottom, class: "at" });
  const dots = series.map((_, i) => add(svg, "circle", { r: 3.5, class: "at" }));
  const words = figure.querySelector("output") || document.createElement("output");
  figure.querySelector("figcaption").append(words);
  let at = -1;

  function show(index) {
    at = Math.max(0, Math.min(series[0].x.length - 1, index));
    const x = series[0].x[at];
    line.setAttribute("x1", across(x));
    line.setAttribute("x2", across(x));
    const said = series.map((one, i) => {
      const near = nearest(one.x, x);
      dots[i].setAttribute("cx", across(one.x[near]));
      dots[i].setAttribute("cy", down(one.y[near]));
      const where = one.x[near] === x ? "" : ` (${number(one.x[near])})`;
      return `${one.name} ${number(one.y[near])}${one.unit}${where}`;
    });
    words.textContent = `${figure.dataset.x} ${number(x)}: ${said.join(", ")}`;
    svg.classList.add("told");
  }
  function hide() {
    svg.classList.remove("told");
    words.textContent = "";
  }
  function point(event) {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const part = (place - left) / (right - left);
    const x = xLog ? x0 * Math.pow(x1 / x0, part) : x0 + (x1 - x0) * part;
    show(nearest(series[0].x, x));
  }
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  // what is chosen by a click or Enter is told to the page, which may open it
  const choose = () => at < 0 || figure.dispatchEvent(new CustomEvent("choose", { detail: series[0].x[at], bubbles: true }));
  svg.addEventListener("click", choose);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Enter") choose();
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(at + step);
  });
}

// Where a value lies between two limits, 0 to 1.
function share(value, low, high, log) {
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1);
}

// The index of the entry closest to x in a rising list.
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

function number(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
}

function add(parent, name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function copyable(command) {
  const button = document.createElement("button");
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(command);
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "selected";
    }
  });
  command.after(button);
}
