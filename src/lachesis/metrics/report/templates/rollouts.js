"use strict";
/* Sample rollouts: a slider over the steps, a tab a prompt, every token coloured by its probability. */
const LEVELS = [[0.9, "p0"], [0.7, "p1"], [0.5, "p2"], [0.3, "p3"], [0.1, "p4"], [0.03, "p5"], [0.01, "p6"], [0, "p7"]];
const LONG = 40;

function tokenClass(logprob, given) {
  if (given) return "t given";
  if (logprob === null || logprob === undefined) return "t unknown";
  const probability = Math.exp(logprob);
  return `t ${LEVELS.find(([bound]) => probability >= bound)[1]}`;
}

/* What cannot be seen in a text, as a visible sign; line breaks stay line breaks. */
const SIGNS = { "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" };
function visible(text) {
  const nodes = [];
  let plain = "";
  const sign = (mark, after = "") => {
    if (plain) nodes.push(plain);
    plain = after;
    nodes.push(make("span", { class: "mark-char" }, mark));
  };
  const blank = text.trim() === "";
  for (const character of text) {
    const code = character.codePointAt(0);
    if (SIGNS[character]) sign(SIGNS[character], character === "\n" ? "\n" : "");
    else if (character === " " && blank) sign("·");
    else if (code < 32) sign(String.fromCodePoint(0x2400 + code));
    else if (code === 127 || (code >= 0x80 && code < 0xa0) || (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2060 && code <= 0x2069) || code === 0xfeff) {
      sign(`U+${code.toString(16).toUpperCase().padStart(4, "0")}`);
    } else plain += character;
  }
  if (plain) nodes.push(plain);
  if (!text.length) nodes.push(make("span", { class: "mark-char" }, "∅"));
  return nodes;
}
const isSpecial = (text) => /^<[^\s<>]+>$|^\[[A-Z/_]{2,}\]$/.test(text);

function tokenNodes(sample) {
  const given = new Set(sample.given || []);
  const nodes = sample.pieces.map((piece, index) => {
    const node = make("span", { class: tokenClass(sample.logprobs[index], given.has(index)), "data-i": index });
    node.append(...(isSpecial(piece) ? [make("span", { class: "special" }, piece)] : visible(piece)));
    return node;
  });
  if (sample.cut) nodes.push(make("span", { class: "more" }, ` … and ${sample.cut} more tokens`));
  return nodes;
}

function tokenTip(sample, index) {
  const logprob = sample.logprobs[index] ?? null;
  const row = (label, value) => make("div", {}, make("span", {}, label), make("b", {}, value));
  const code = make("code", {}, JSON.stringify(sample.pieces[index]));
  if ((sample.given || []).includes(index)) return [code, row("not sampled", "given")];
  if (logprob === null) return [code, row("logprob", "unknown")];
  const probability = Math.exp(logprob);
  const percent = probability >= 0.0001 ? `${significant(100 * probability)} %` : "< 0.01 %";
  return [code, row("logprob", logprob.toFixed(3).replace("-", "−")), row("probability", percent)];
}

function leaning(advantage, scale) {
  const bar = make("span", { class: "lean" });
  const width = Math.min(50, (50 * Math.abs(advantage)) / scale);
  bar.append(make("i", { class: advantage >= 0 ? "up" : "down", style: `width:${width}%` }));
  return bar;
}

function sampleCard(sample, scale) {
  const header = make("header", {}, make("span", {}, "reward ", make("b", {}, format(sample.reward, ""))));
  if (sample.advantage !== null) {
    const sign = sample.advantage > 0 ? "+" : "";
    header.append(make("span", { title: "advantage" }, "advantage ", leaning(sample.advantage, scale), make("b", {}, sign + significant(sample.advantage))));
  }
  const reasons = { stop: "ended", length: "cut off", abort: "aborted" };
  const footer = make("footer", {}, make("span", { class: sample.finish }, reasons[sample.finish] || sample.finish), ` after ${sample.tokens} tokens, weights ${sample.version}`);
  const body = make("pre");
  body.append(...(sample.pieces ? tokenNodes(sample) : visible(sample.text)));
  const card = make("article", { class: "sample" }, header, body, footer);
  const over = (event) => {
    const token = event.target.closest(".t");
    if (token) showTip(token, tokenTip(sample, Number(token.dataset.i)));
  };
  body.addEventListener("pointerover", over);
  body.addEventListener("pointerdown", over);
  body.addEventListener("pointerout", hideTip);
  return card;
}

function startRollouts(rollouts) {
  const slider = byId("step");
  const chosen = { index: rollouts.length - 1, group: 0 };
  slider.max = String(rollouts.length - 1);
  LEVELS.forEach(([bound, name]) => byId("ramp").append(make("span", { class: name, title: `probability ${bound} and above` }, bound ? `≥ ${bound}`.replace("0.", ".") : "< .01")));

  function showGroup() {
    const entry = rollouts[chosen.index];
    chosen.group = Math.min(chosen.group, entry.groups.length - 1);
    const group = entry.groups[chosen.group];
    byId("groups").replaceChildren(...(entry.groups.length < 2 ? [] : entry.groups.map((_, index) => {
      const tab = make("button", { type: "button", "aria-pressed": String(index === chosen.group) }, `Prompt ${index + 1}`);
      tab.addEventListener("click", () => { chosen.group = index; showGroup(); });
      return tab;
    })));
    byId("prompt").replaceChildren(...visible(group.prompt));
    const shown = group.samples.length;
    byId("samples-note").textContent = shown < group.size ? `${shown} of ${group.size}, best and worst` : "best first";
    const scale = Math.max(1, ...group.samples.map((sample) => Math.abs(sample.advantage ?? 0)));
    byId("samples").className = group.samples.some((sample) => sample.tokens > LONG) ? "samples long" : "samples";
    byId("samples").replaceChildren(...group.samples.map((sample) => sampleCard(sample, scale)));
  }
  function showIndex(index) {
    chosen.index = Math.min(rollouts.length - 1, Math.max(0, index));
    slider.value = String(chosen.index);
    const { step } = rollouts[chosen.index];
    slider.setAttribute("aria-valuetext", `step ${step}`);
    byId("step-label").textContent = `step ${step}`;
    byId("rollout-facts").textContent = factsAt(step);
    hideTip();
    showGroup();
  }
  slider.addEventListener("input", () => showIndex(Number(slider.value)));
  byId("previous").addEventListener("click", () => showIndex(chosen.index - 1));
  byId("next").addEventListener("click", () => showIndex(chosen.index + 1));
  page.showStep = (step) => {
    showIndex(nearest(rollouts.map((entry) => entry.step), step));
    byId("rollouts").scrollIntoView();
  };
  const asked = /^#step=(\d+)$/.exec(location.hash);
  if (asked) page.showStep(Number(asked[1]));
  else showIndex(chosen.index);
}

/* Reward and accuracy at a step, beside the title. */
function factsAt(step) {
  const words = [];
  for (const [id, word] of [["reward", "mean reward"], ["evaluation/accuracy", "held-out accuracy"]]) {
    const chart = report.charts.find((candidate) => candidate.id === id);
    if (!chart) continue;
    const series = chart.series[0], at = series.x.findLastIndex((measured) => measured <= step);
    if (at < 0) continue;
    words.push(`${word} ${format(series.y[at], chart.unit)}${series.x[at] === step ? "" : ` (step ${series.x[at]})`}`);
  }
  return words.join(", ");
}

if (report.rollouts.length) startRollouts(report.rollouts);
