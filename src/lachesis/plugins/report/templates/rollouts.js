/* Sample rollouts: a slider over the steps, a tab a prompt. */
const LONG = 40;

function leaning(advantage, scale) {
  const bar = make("span", { class: "lean" });
  const width = Math.min(50, (50 * Math.abs(advantage)) / scale);
  bar.append(make("i", { class: advantage >= 0 ? "up" : "down", style: `width:${width}%` }));
  return bar;
}

function pictures(sources, where) {
  return sources.map((src, index) => make("img", { src, alt: `image ${index + 1} of ${where}` }));
}

function sampleCard(sample, scale) {
  const header = make("header", {}, make("span", {}, "reward ", make("b", {}, format(sample.reward, ""))));
  if (sample.advantage !== null) {
    const sign = sample.advantage > 0 ? "+" : "";
    header.append(make("span", { title: "advantage" }, "advantage ", leaning(sample.advantage, scale), make("b", {}, sign + significant(sample.advantage))));
  }
  const reasons = { stop: "ended", length: "cut off", abort: "aborted" };
  const footer = make("footer", {}, make("span", { class: sample.finish }, reasons[sample.finish] || sample.finish), ` after ${sample.tokens} tokens, weights ${sample.version}`, ...(sample.logged || []).map((words) => make("span", { class: "logged" }, ` · ${words}`)));
  const body = make("pre");
  body.append(...(sample.pieces ? tokenNodes(sample) : visible(sample.text)));
  const card = make("article", { class: "sample" }, header, ...pictures(sample.images, "the answers of tools"), body, footer);
  watchTokens(body, () => sample, ["not sampled", "given"]);
  return card;
}

/* How the rewards of all completions of a step are spread: a bar a range. */
function spread(rewards) {
  if (!rewards) return [];
  const { low, high, counts } = rewards, most = Math.max(...counts), bar = 12, height = 40;
  const at = (index) => significant(low + ((high - low) * index) / counts.length);
  const svg = shape("svg", { viewBox: `0 0 ${bar * counts.length} ${height}`, width: bar * counts.length, height });
  counts.forEach((count, index) => {
    const tall = (height * count) / most;
    const range = low === high ? significant(low) : `${at(index)} to ${at(index + 1)}`;
    const drawn = shape("rect", { x: bar * index, y: height - tall, width: bar - 1, height: tall });
    drawn.append(shape("title", {}, `${range}: ${plural(count, "completion")}`));
    svg.append(drawn);
  });
  const all = plural(counts.reduce((sum, count) => sum + count, 0), "completion");
  const range = low === high ? `all ${significant(low)}` : `${significant(low)} to ${significant(high)}`;
  return [svg, make("figcaption", {}, `rewards of ${all}: ${range}`)];
}

/* Which is shown: of a page whose rollouts grow, the latest until somebody chooses another step. */
const kept = { step: null, group: 0 };
function startRollouts(rollouts) {
  const slider = byId("step");
  const at = kept.step === null ? -1 : rollouts.findIndex((entry) => entry.step === kept.step);
  const chosen = { index: at < 0 ? rollouts.length - 1 : at, group: kept.group };
  slider.max = String(rollouts.length - 1);

  function showGroup() {
    const entry = rollouts[chosen.index];
    kept.group = chosen.group = Math.min(chosen.group, entry.groups.length - 1);
    const group = entry.groups[chosen.group];
    const labels = entry.groups.length < 2 ? [] : entry.groups.map((_, index) => `Prompt ${index + 1}`);
    showTabs("groups", labels, chosen.group, (index) => { chosen.group = index; showGroup(); });
    page.prompt = group.id;
    byId("prompt").replaceChildren(...pictures(group.images, "the prompt"), ...visible(group.prompt));
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
    kept.step = chosen.index === rollouts.length - 1 ? null : step;
    slider.setAttribute("aria-valuetext", `step ${step}`);
    byId("step-label").textContent = `step ${step}`;
    byId("rollout-facts").textContent = factsAt(step);
    byId("spread").replaceChildren(...spread(rollouts[chosen.index].rewards));
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
