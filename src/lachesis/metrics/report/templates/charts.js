"use strict";
/* Charts of the report: inline SVG, drawn to the size of their card. No library, nothing loaded. */
const report = JSON.parse(document.getElementById("report-data").textContent);
const page = { showStep: null, smooth: false, cursor: null };

const byId = (id) => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function shape(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return element;
}

/* Numbers for people: three digits, thousands as k, shares in percent. */
function format(value, unit, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${significant(100 * value, digits)} %`;
  const size = Math.abs(value);
  const text = size >= 1e6 ? `${significant(value / 1e6, digits)}M` : size >= 1e4 ? `${significant(value / 1e3, digits)}k` : significant(value, digits);
  return ["s", "GB", "tokens/s"].includes(unit) ? `${text} ${unit}` : text;
}
function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replaceAll("-", "−");
  return String(Number(value.toPrecision(Math.max(digits, size >= 1000 ? 4 : 3)))).replace("-", "−");
}

/* The same with two digits and no unit, for a line of several; the title names the unit. */
function brief(value, unit) {
  if (value === null) return "–";
  const shown = unit === "share" ? 100 * value : value;
  return format(Math.abs(shown) >= 100 ? shown : Number(shown.toPrecision(2)), "");
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= 0.7 * raw);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : Number(value.toPrecision(12)));
  }
  return found;
}

/* Mean over a window around each point, weighted towards it, so that nothing is shifted; gaps stay gaps. */
function smoothed(values) {
  const reach = Math.max(2, Math.min(60, Math.round(values.length / 30)));
  return values.map((value, at) => {
    if (value === null) return null;
    let sum = 0, mass = 0;
    for (let other = Math.max(0, at - reach); other <= Math.min(values.length - 1, at + reach); other++) {
      if (values[other] === null) continue;
      const weight = 1 + reach - Math.abs(other - at);
      sum += weight * values[other];
      mass += weight;
    }
    return sum / mass;
  });
}
function nearest(sorted, target) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < target) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - target) <= Math.abs(sorted[high] - target) ? low : high;
}

/* The range of y: all data, and a healthy bound where it is near. */
function domain(chart, log) {
  const reach = ({ y, band }) => (band && !log ? y.flatMap((value, at) => [value, value === null ? null : value - band[at], value === null ? null : value + band[at]]) : y);
  const values = chart.series.flatMap(reach).filter((value) => value !== null && (!log || value > 0));
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) return [0, 1];
  if (log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
  if (high - low < chart.least) {
    const middle = chart.floor === null ? (low + high) / 2 : Math.max(low, chart.floor + chart.least / 2);
    low = middle - chart.least / 2;
    high = middle + chart.least / 2;
  }
  const span = high - low || Math.abs(high) * 0.2 || 0.1;
  for (const bound of (chart.healthy || []).filter((bound) => bound !== null)) {
    if (bound < low && low - bound <= 0.6 * span) low = bound;
    if (bound > high && bound - high <= 0.6 * span) high = bound;
  }
  if (chart.floor !== null) low = Math.max(low, Math.min(chart.floor, ...chart.series.flatMap((series) => series.y.filter((value) => value !== null))));
  if (chart.floor !== null && low - chart.floor <= 1.5 * span) low = Math.min(low, chart.floor);
  if (chart.ceiling !== null) high = Math.max(high, chart.ceiling);
  const pad = 0.07 * (high - low || span);
  return [chart.floor !== null && low >= chart.floor ? Math.max(chart.floor, low - pad) : low - pad, chart.ceiling !== null && high <= chart.ceiling ? chart.ceiling : high + pad];
}

/* Scales, axes and the steps on x: what every chart has in common. */
function frame(svg, { steps, low, high, log, unit, height }) {
  const width = Math.max(180, svg.clientWidth || svg.parentElement.clientWidth);
  const left = 40, right = 12, top = 10, bottom = 22;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const [first, last] = steps;
  const span = last - first || 1;
  const scale = log ? Math.log10 : (value) => value;
  const box = {
    width, height, left, right: width - right, top, bottom: height - bottom,
    x: (step) => left + ((step - first) / span) * (width - left - right),
    y: (value) => height - bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom),
    step: (x) => first + ((x - left) / (width - left - right)) * span,
  };
  let marks = ticks(low, high, height > 200 ? 6 : 4);
  if (log) {
    marks = [];
    for (let mark = low; mark <= high * 1.001; mark *= 10) marks.push(mark);
    if (marks.length > 5) marks = marks.filter((_, index) => index % 2 === 0);
  }
  for (const mark of marks) {
    svg.append(shape("line", { class: "gridline", x1: left, x2: box.right, y1: box.y(mark), y2: box.y(mark) }));
    svg.append(shape("text", { x: left - 6, y: box.y(mark) + 3.5, "text-anchor": "end" }, format(mark, ["share", "s"].includes(unit) ? unit : "", 5)));
  }
  for (const mark of ticks(first, last, Math.max(3, Math.min(9, width / 80))).filter(Number.isInteger)) {
    svg.append(shape("text", { x: box.x(mark), y: height - 6, "text-anchor": "middle" }, String(mark)));
  }
  return box;
}

function linePath(box, xs, ys) {
  let path = "", pen = "M";
  xs.forEach((x, index) => {
    if (ys[index] === null || !Number.isFinite(box.y(ys[index]))) { pen = "M"; return; }
    path += `${pen}${box.x(x).toFixed(1)},${box.y(ys[index]).toFixed(1)}`;
    pen = "L";
  });
  return path;
}
function areaPath(box, xs, lows, highs) {
  const kept = xs.map((_, index) => index).filter((index) => lows[index] !== null && highs[index] !== null);
  if (!kept.length) return "";
  const up = kept.map((index) => `${box.x(xs[index]).toFixed(1)},${box.y(highs[index]).toFixed(1)}`);
  const back = kept.reverse().map((index) => `${box.x(xs[index]).toFixed(1)},${box.y(lows[index]).toFixed(1)}`);
  return `M${up.join("L")}L${back.join("L")}Z`;
}

let clips = 0;
function plotGroup(svg, box) {
  const id = `clip-${clips++}`;
  const clip = shape("clipPath", { id });
  clip.append(shape("rect", { x: box.left, y: box.top - 4, width: box.right - box.left + 6, height: box.bottom - box.top + 5 }));
  const group = shape("g", { "clip-path": `url(#${id})` });
  svg.append(clip, group);
  return group;
}

function drawHealthy(group, box, healthy, low, high) {
  if (!healthy) return;
  const from = Math.max(healthy[0] ?? low, low), to = Math.min(healthy[1] ?? high, high);
  if (from >= to) return;
  group.append(shape("rect", { class: "range", x: box.left, width: box.right - box.left, y: box.y(to), height: box.y(from) - box.y(to) }));
  for (const edge of healthy) {
    if (edge !== null && edge > low && edge < high) {
      group.append(shape("line", { class: "range-edge", x1: box.left, x2: box.right, y1: box.y(edge), y2: box.y(edge) }));
    }
  }
}

/* A vertical line with the step under it, and a dot on each line. */
function crosshair(svg, box) {
  const group = shape("g", { visibility: "hidden", class: "crosshair" });
  const line = shape("line", { class: "cross", y1: box.top, y2: box.bottom });
  const flag = shape("g", { class: "flag" });
  const back = shape("rect", { rx: 3, height: 15, y: box.bottom + 4 });
  const label = shape("text", { y: box.bottom + 15, "text-anchor": "middle" });
  flag.append(back, label);
  group.append(line, flag);
  svg.append(group);
  return {
    hide() { group.setAttribute("visibility", "hidden"); },
    show(step, dots) {
      const x = Math.min(box.right, Math.max(box.left, box.x(step)));
      const half = 4 + 3.3 * String(step).length;
      const middle = Math.min(box.width - half, Math.max(half, x));
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      back.setAttribute("x", middle - half); back.setAttribute("width", 2 * half);
      label.setAttribute("x", middle); label.textContent = step;
      group.querySelectorAll("circle").forEach((dot) => dot.remove());
      for (const [at, value, index] of dots) {
        if (value !== null) group.append(shape("circle", { class: `dot f${index % 3}`, r: 4, cx: box.x(at), cy: box.y(value) }));
      }
      group.setAttribute("visibility", "visible");
    },
  };
}

const allSteps = report.charts.flatMap((chart) => chart.series.flatMap((series) => [series.x[0], series.x[series.x.length - 1]]));
const stepRange = allSteps.length ? [Math.min(...allSteps), Math.max(...allSteps)] : [0, 1];

function buildChart(chart) {
  const single = chart.series.length === 1;
  const value = make("output", { class: "value" });
  const unit = !single && chart.unit ? make("small", {}, chart.unit === "share" ? "%" : chart.unit) : "";
  const title = make("h3", { tabindex: "0" }, chart.title, unit);
  if (chart.explanation) title.dataset.tip = chart.explanation;
  const legend = make("div", { class: "series" });
  const readings = chart.series.map((series, index) => {
    const reading = make("b");
    if (!single) legend.append(make("span", {}, make("i", { class: `f${index % 3}` }), `${series.label} `, reading));
    return single ? value : reading;
  });
  const svg = shape("svg", { role: "img", tabindex: "0", "aria-label": `${chart.title}, last ${format(chart.series[0].y.at(-1), chart.unit)}` });
  const card = make("article", { class: chart.wide ? "chart wide" : "chart", "data-chart": chart.id }, make("header", {}, title, value));
  if (!single) card.append(legend);
  card.append(svg);
  const positive = chart.series.flatMap((series) => series.y).filter((item) => item > 0);
  const log = chart.log && positive.length > 0 && Math.max(...positive) / Math.min(...positive) > 30;
  let box, cross;

  function draw() {
    const [low, high] = domain(chart, log);
    box = frame(svg, { steps: stepRange, low, high, log, unit: chart.unit, height: (chart.wide ? 240 : 160) - (single ? 0 : 20) });
    const plot = plotGroup(svg, box);
    drawHealthy(plot, box, chart.healthy, low, high);
    chart.series.forEach((series, index) => drawSeries(plot, box, series, { index, low, exact: chart.exact }));
    cross = crosshair(svg, box);
    point(page.cursor);
  }
  function point(step) {
    const chosen = chart.series.map((series) => (step === null ? series.x.length - 1 : nearest(series.x, step)));
    chart.series.forEach((series, index) => { readings[index].textContent = single ? format(series.y[chosen[index]], chart.unit) : brief(series.y[chosen[index]], chart.unit); });
    if (step === null) { cross.hide(); return; }
    const dots = chart.series.map((series, index) => [series.x[chosen[index]], series.y[chosen[index]], index]);
    cross.show(chart.series.length ? dots[0][0] : step, dots.filter(([, item]) => !log || item > 0));
  }
  listen(svg, () => box, chart.series[0].x);
  return { card, draw, point };
}

function drawSeries(plot, box, series, { index, low, exact }) {
  const marked = series.x.length <= 40;
  const smooth = page.smooth && !marked && !exact;
  const line = smooth ? smoothed(series.y) : series.y;
  if (series.band) {
    const half = smooth ? smoothed(series.band) : series.band;
    const lows = line.map((item, at) => (item === null || half[at] === null ? null : item - half[at]));
    const highs = line.map((item, at) => (item === null || half[at] === null ? null : item + half[at]));
    plot.append(shape("path", { class: `band f${index % 3}`, d: areaPath(box, series.x, lows, highs) }));
  }
  if (line !== series.y) plot.append(shape("path", { class: `line raw c${index % 3}`, d: linePath(box, series.x, series.y) }));
  plot.append(shape("path", { class: `line c${index % 3}`, d: linePath(box, series.x, line) }));
  if (!marked) return;
  series.x.forEach((step, at) => {
    if (series.y[at] !== null && series.y[at] >= low) {
      plot.append(shape("circle", { class: `dot f${index % 3}`, r: 3.4, cx: box.x(step), cy: box.y(series.y[at]) }));
    }
  });
}

/* One cursor for all charts: pointing at one reads every one at that step. */
const drawn = [];
function setCursor(step) {
  page.cursor = step;
  for (const chart of drawn) chart.point(step);
}
function listen(svg, box, steps) {
  const stepAt = (event) => {
    const bounds = svg.getBoundingClientRect();
    const step = Math.round(box().step(((event.clientX - bounds.left) / bounds.width) * box().width));
    return Math.min(stepRange[1], Math.max(stepRange[0], step));
  };
  svg.addEventListener("pointermove", (event) => setCursor(stepAt(event)));
  svg.addEventListener("pointerdown", (event) => setCursor(stepAt(event)));
  svg.addEventListener("pointerleave", () => setCursor(null));
  svg.addEventListener("blur", () => setCursor(null));
  svg.addEventListener("click", (event) => page.showStep && event.pointerType !== "touch" && page.showStep(stepAt(event)));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const at = page.cursor === null ? (move > 0 ? -1 : steps.length) : nearest(steps, page.cursor);
      setCursor(steps[Math.min(steps.length - 1, Math.max(0, at + move))]);
      event.preventDefault();
    } else if (event.key === "Enter" && page.showStep && page.cursor !== null) page.showStep(page.cursor);
  });
}

const partColours = { data_fetch_time: "generation", generation_time: "generation", reward_time: "reward", train_time: "train", sync_time: "sync", other: "other" };
const partColour = (part) => `var(--t-${partColours[part.name]})`;

function buildTiming(timing) {
  const means = timing.parts.map((part) => part.y.reduce((sum, item) => sum + (item ?? 0), 0) / part.y.length);
  const whole = means.reduce((sum, item) => sum + item, 0) || 1;
  byId("timing-share").append(...timing.parts.map((part, index) => make("i", { style: `flex:${(100 * means[index]) / whole};background:${partColour(part)}` })));
  const readings = timing.parts.map(() => make("b"));
  const legend = make("div", { class: "parts" }, ...timing.parts.map((part, index) =>
    make("span", {}, make("i", { style: `background:${partColour(part)}` }), `${part.label} `, readings[index])));
  const svg = shape("svg", { role: "img", tabindex: "0", "aria-label": "Seconds a step, by part" });
  byId("timing-chart").append(legend, svg);
  let box, cross;

  function draw() {
    const columns = timing.parts.map((part) => (page.smooth ? smoothed(part.y) : part.y).map((item) => item ?? 0));
    const totals = timing.x.map((_, at) => columns.reduce((sum, column) => sum + column[at], 0));
    const high = 1.15 * ([...totals].sort((a, b) => a - b)[Math.floor(0.985 * (totals.length - 1))] || 1);
    box = frame(svg, { steps: stepRange, low: 0, high, log: false, unit: "s", height: 220 });
    const plot = plotGroup(svg, box);
    let base = timing.x.map(() => 0);
    timing.parts.forEach((part, index) => {
      const top = base.map((item, at) => item + columns[index][at]);
      plot.append(shape("path", { class: "part", style: `fill:${partColour(part)}`, d: areaPath(box, timing.x, base, top) }));
      base = top;
    });
    cross = crosshair(svg, box);
    point(page.cursor);
  }
  function point(step) {
    const at = step === null ? null : nearest(timing.x, step);
    timing.parts.forEach((part, index) => {
      const share = `${Math.round((100 * means[index]) / whole)} %`;
      readings[index].textContent = at === null ? share : milliseconds(part.y[at]);
    });
    if (at === null) cross.hide(); else cross.show(timing.x[at], []);
  }
  listen(svg, () => box, timing.x);
  return { draw, point };
}
function milliseconds(seconds) {
  return seconds === null ? "–" : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${significant(seconds)} s`;
}

/* One tooltip for titles and tokens. */
function showTip(target, content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const at = target.getClientRects()[0], size = tip.getBoundingClientRect();
  const above = at.top - size.height - 8;
  tip.style.left = `${Math.max(6, Math.min(innerWidth - size.width - 6, at.left))}px`;
  tip.style.top = `${above > 4 ? above : at.bottom + 8}px`;
}
const hideTip = () => { byId("tip").hidden = true; };

function start() {
  for (const chart of report.charts) {
    const built = buildChart(chart);
    byId("charts").append(built.card);
    drawn.push(built);
  }
  if (report.timing) drawn.push(buildTiming(report.timing));
  const longest = Math.max(0, ...report.charts.flatMap((chart) => chart.series.map((series) => series.x.length)));
  page.smooth = byId("smooth").checked = longest > 60;
  const redraw = () => drawn.forEach((chart) => chart.draw());
  byId("smooth").addEventListener("change", (event) => { page.smooth = event.target.checked; redraw(); });
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    redraw();
  }).observe(byId("charts"));
  for (const [enter, leave] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    byId("charts").addEventListener(enter, (event) => { if (event.target.dataset.tip) showTip(event.target, [event.target.dataset.tip]); });
    byId("charts").addEventListener(leave, (event) => { if (event.target.dataset.tip) hideTip(); });
  }
}

function themes() {
  const button = byId("theme"), names = ["auto", "light", "dark"];
  const apply = (name) => {
    document.documentElement.style.colorScheme = name === "auto" ? "" : name;
    button.textContent = `Theme: ${name}`;
    button.dataset.name = name;
  };
  const stored = () => { try { return localStorage.getItem("lachesis-theme"); } catch { return null; } };
  const store = (name) => { try { localStorage.setItem("lachesis-theme", name); } catch { /* no storage for files here */ } };
  apply(names.includes(stored()) ? stored() : "auto");
  button.addEventListener("click", () => {
    const name = names[(names.indexOf(button.dataset.name) + 1) % names.length];
    apply(name);
    store(name);
  });
}

start();
themes();
