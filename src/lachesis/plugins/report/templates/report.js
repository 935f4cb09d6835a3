"use strict";
/* The charts of the report, and one cursor for all of them. */
let report = { charts: [], timing: null, rollouts: [] };
const page = { showStep: null, smooth: false, cursor: null };

/* The same with two digits and no unit, for a line of several; the title names the unit. */
function brief(value, unit) {
  if (value === null) return "–";
  const shown = unit === "share" ? 100 * value : value;
  return format(Math.abs(shown) >= 100 ? shown : Number(shown.toPrecision(2)), "");
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

let stepRange = [0, 1];
function spanOfSteps() {
  const ends = report.charts.flatMap((chart) => chart.series.flatMap((series) => [series.x[0], series.x[series.x.length - 1]]));
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

function buildChart(chart) {
  const single = chart.series.length === 1;
  const value = make("output", { class: "value" });
  const unit = !single && chart.unit ? make("small", {}, chart.unit === "share" ? "%" : chart.unit) : "";
  const title = make("h3", { tabindex: "0" }, chart.title, unit);
  if (chart.explanation) title.dataset.tip = chart.explanation;
  const legend = make("div", { class: "series" });
  const readings = chart.series.map((series, index) => {
    const reading = make("b");
    if (!single) legend.append(make("span", {}, make("i", { class: fillClass(index) + again(index) }), `${series.label} `, reading));
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
    plot.append(shape("path", { class: `band ${fillClass(index)}`, d: areaPath(box, series.x, lows, highs) }));
  }
  if (line !== series.y) plot.append(shape("path", { class: `line raw ${lineClass(index)}`, d: linePath(box, series.x, series.y) }));
  plot.append(shape("path", { class: `line ${lineClass(index)}`, d: linePath(box, series.x, line) }));
  if (!marked) return;
  series.x.forEach((step, at) => {
    if (series.y[at] !== null && series.y[at] >= low) {
      plot.append(shape("circle", { class: `dot ${fillClass(index)}`, r: 3.4, cx: box.x(step), cy: box.y(series.y[at]) }));
    }
  });
}

/* A link to a place of this page opens what it is in, and leaves the address as it is: the live page's has its token. */
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-place]");
  const there = link && byId(decodeURIComponent(link.hash.slice(1)));
  if (!there) return;
  event.preventDefault();
  there.closest("details").open = true;
  document.querySelectorAll(".pointed").forEach((other) => other.classList.remove("pointed"));
  there.classList.add("pointed");
  there.scrollIntoView({ block: "center" });
});

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

/* A chart whose lines are flat, as its last values. */
function constant(chart) {
  const last = (series) => { const value = series.y.at(-1); return value !== null && Math.abs(value) < 1e-9 ? 0 : value; };
  const values = chart.series.map((series) => (chart.series.length > 1 ? `${series.label} ` : "") + format(last(series), chart.unit));
  const item = make("span", { tabindex: "0" }, `${chart.title} `, make("b", {}, values.join(", ")));
  if (chart.explanation) item.dataset.tip = chart.explanation;
  return item;
}

/* Draw a report into the page's elements, in the place of the one before. A cursor and the choice of smoothing are kept. */
let redraw = () => {}, chosenSmooth = null, watchedWidth = null;
function showReport(data) {
  report = data;
  stepRange = spanOfSteps();
  drawn.length = 0;
  byId("charts").replaceChildren();
  const flat = report.charts.filter((chart) => chart.flat);
  for (const chart of report.charts.filter((chart) => !chart.flat)) {
    const built = buildChart(chart);
    byId("charts").append(built.card);
    drawn.push(built);
  }
  if (flat.length) byId("charts").append(make("p", { class: "flat" }, "Constant: ", ...flat.map(constant)));
  if (report.timing) drawn.push(buildTiming(report.timing));
  const longest = Math.max(0, ...report.charts.flatMap((chart) => chart.series.map((series) => series.x.length)));
  page.smooth = byId("smooth").checked = chosenSmooth ?? longest > 60;
  redraw = () => drawn.forEach((chart) => chart.draw());
  byId("smooth").addEventListener("change", (event) => { page.smooth = chosenSmooth = event.target.checked; redraw(); });
  redraw();
  followWidth();
  for (const [enter, leave] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    byId("charts").addEventListener(enter, (event) => { if (event.target.dataset.tip) showTip(event.target, [event.target.dataset.tip]); });
    byId("charts").addEventListener(leave, (event) => { if (event.target.dataset.tip) hideTip(); });
  }
  if (report.rollouts.length) startRollouts(report.rollouts);
}
function followWidth() {
  if (watchedWidth) watchedWidth.disconnect();
  let width = byId("charts").clientWidth;
  watchedWidth = new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    redraw();
  });
  watchedWidth.observe(byId("charts"));
}
