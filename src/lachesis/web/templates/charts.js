/* Curves as inline SVG, drawn to the size of their card. No library, nothing loaded. */
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

/* Lines of one chart: further ones than there are colours are dashed. */
const COLOURS = 6;
const again = (index) => (index < COLOURS ? "" : " again");
const lineClass = (index) => `c${index % COLOURS}${again(index)}`;
const fillClass = (index) => `f${index % COLOURS}`;

/* Scales, axes and the steps on x: what every chart has in common. */
function frame(svg, { steps, low, high, log, unit, height }) {
  const width = Math.max(180, svg.clientWidth || svg.parentElement.clientWidth);
  const right = 12, top = 10, bottom = 22;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  let marks = ticks(low, high, height > 200 ? 6 : 4);
  if (log) {
    marks = [];
    for (let mark = low; mark <= high * 1.001; mark *= 10) marks.push(mark);
    if (marks.length > 5) marks = marks.filter((_, index) => index % 2 === 0);
  }
  const words = marks.map((mark) => shape("text", { "text-anchor": "end" }, format(mark, ["share", "s"].includes(unit) ? unit : "", 5)));
  svg.append(...words);
  const left = Math.max(40, ...words.map((word) => Math.ceil(word.getComputedTextLength()) + 8)); // as wide as they are
  const [first, last] = steps;
  const span = last - first || 1;
  const scale = log ? Math.log10 : (value) => value;
  const box = {
    width, height, left, right: width - right, top, bottom: height - bottom,
    x: (step) => left + ((step - first) / span) * (width - left - right),
    y: (value) => height - bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom),
    step: (x) => first + ((x - left) / (width - left - right)) * span,
  };
  marks.forEach((mark, index) => {
    svg.append(shape("line", { class: "gridline", x1: left, x2: box.right, y1: box.y(mark), y2: box.y(mark) }));
    words[index].setAttribute("x", left - 6);
    words[index].setAttribute("y", box.y(mark) + 3.5);
  });
  for (const mark of ticks(first, last, Math.max(3, Math.min(9, width / 80))).filter(Number.isInteger)) {
    const word = shape("text", { y: height - 6, "text-anchor": "middle" }, String(mark));
    svg.append(word);
    word.setAttribute("x", Math.min(width - word.getComputedTextLength() / 2, box.x(mark)));
  }
  return box;
}

const place = (box, x, y) => `${box.x(x).toFixed(2)},${box.y(y).toFixed(2)}`;
function linePath(box, xs, ys) {
  let path = "", pen = "M";
  xs.forEach((x, index) => {
    if (ys[index] === null || !Number.isFinite(box.y(ys[index]))) { pen = "M"; return; }
    path += `${pen}${place(box, x, ys[index])}`;
    pen = "L";
  });
  return path;
}
function areaPath(box, xs, lows, highs) {
  const kept = xs.map((_, index) => index).filter((index) => lows[index] !== null && highs[index] !== null);
  if (!kept.length) return "";
  const up = kept.map((index) => place(box, xs[index], highs[index]));
  const back = kept.reverse().map((index) => place(box, xs[index], lows[index]));
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
        if (value !== null) group.append(shape("circle", { class: `dot ${fillClass(index)}`, r: 4, cx: box.x(at), cy: box.y(value) }));
      }
      group.setAttribute("visibility", "visible");
    },
  };
}
