"use strict";
/* The figures of the rollout API, asked for every two seconds while somebody looks. No library, nothing loaded. */
const INTERVAL = 2000;
const seen = { key: "", shown: null, chosen: 0, last: 0 };

function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function ago(seconds) {
  if (seconds < 3) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

/* -- the run and what it waits for */
function showRun({ run, waiting, queue }) {
  say("title", run.registered ? run.wandb_project || "Rollouts" : "Rollouts");
  const words = run.registered
    ? [run.wandb_group, `batches of ${plural(run.batch_size, "sequence")}`, `at most ${format(run.max_token_len)} tokens each`, run.acknowledge ? "batches are acknowledged" : ""]
    : ["environments may post; a trainer registers with POST /register"];
  byId("words").replaceChildren(...words.filter(Boolean).map((word) => make("span", {}, word)));
  say("step", String(run.step));
  say("steps", run.registered && run.num_steps > 0 ? ` / ${run.num_steps}` : "");
  document.title = `${run.registered ? `step ${run.step}` : "no trainer"} · rollouts · Lachesis`;
  const full = queue.limit !== null && queue.weight >= 0.98 * queue.limit;
  const [tone, text] = !run.registered ? ["idle", "No trainer has registered."]
    : !run.started ? ["idle", "A trainer has registered and has not asked for a batch yet; environments wait for that."]
    : full && waiting ? ["problem", `The queue is full, yet ${waiting}: raise --max-queued-tokens.`]
    : full ? ["warning", "The queue is full: posts are answered with 429 until the trainer takes a batch."]
    : waiting ? ["idle", `The trainer waits: ${waiting}.`] : ["good", "A batch is ready for the trainer."];
  byId("state").dataset.tone = tone;
  say("state-text", text);
}

/* -- the queue: a bar of what each environment has in it, with a mark for every batch */
function colour(index) { return index < 0 ? "none" : `f${index % 6}`; }
function showQueue({ run, queue, environments }) {
  const parts = environments.map((env, index) => [env.name, env.queued, colour(index)]);
  if (queue.others) parts.push(["no environment", queue.others, "none"]);
  const batch = run.batch_size || 0;
  const scale = Math.max(queue.sequences, batch, 1) * (queue.sequences > batch ? 1 : 1.0001);
  const full = parts.filter(([, count]) => count > 0);
  byId("track").replaceChildren(...full.map(([name, count, tone]) => make("i", { class: tone, style: `width:${(100 * count) / scale}%`, title: `${name}: ${plural(count, "sequence")}` })));
  byId("parts").replaceChildren(...full.map(([name, count, tone]) => make("span", {}, make("i", { class: tone }), `${name} `, make("b", {}, format(count)))));
  const marks = [make("span", { style: "left:0" }, "0")];
  if (batch) {
    const every = Math.max(1, Math.ceil(scale / batch / 8));
    for (let n = every; n * batch <= scale; n += every) marks.push(make("span", { style: `left:${(100 * n * batch) / scale}%`, class: n * batch > 0.97 * scale ? "end" : "" }, n === 1 ? "1 batch" : String(n)));
  }
  byId("ruler").replaceChildren(...marks);
  const words = [`${plural(queue.sequences, "sequence")} in ${plural(queue.groups, "group")}, ${plural(queue.tokens, "token")}`];
  if (queue.outstanding) words.push(`${plural(queue.outstanding, "batch").replace("batchs", "batches")} not acknowledged yet`);
  if (queue.redelivered) words.push(`${format(queue.redelivered)} handed out again`);
  say("queue-words", words.join("; "));
  byId("limit").hidden = queue.limit === null;
  if (queue.limit !== null) {
    Object.assign(byId("meter"), { max: queue.limit, high: 0.9 * queue.limit, optimum: 0, value: queue.weight });
    say("limit-words", `${format(queue.weight)} of ${format(queue.limit)}${queue.full ? `, ${plural(queue.full, "post")} refused` : ""}`);
  }
}

/* -- the flow: three small curves */
const CURVES = [["groups_per_s", "Groups a second"], ["tokens_per_s", "Tokens a second"], ["batches_per_min", "Batches a minute"]];
const charts = CURVES.map(([id, title]) => {
  const value = make("b", {}, "–"), svg = shape("svg", { viewBox: "0 0 100 64", preserveAspectRatio: "none", role: "img", "aria-label": title });
  const chart = { id, value, svg, xs: [], ys: [], now: 0, pointed: null };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    chart.pointed = (event.clientX - box.left) / box.width;
    drawChart(chart);
  });
  svg.addEventListener("pointerleave", () => { chart.pointed = null; drawChart(chart); });
  byId("charts").append(make("article", { class: "chart", "data-chart": id }, make("header", {}, title, value), svg));
  return chart;
});
function drawChart(chart) {
  const { svg, xs, ys } = chart;
  svg.replaceChildren(shape("line", { class: "base", x1: 0, x2: 100, y1: 64, y2: 64 }));
  chart.value.textContent = format(chart.now);
  if (xs.length < 2) return;
  const span = Math.max(60, -xs[0]), top = Math.max(...ys, 1e-9);
  const box = { x: (at) => 100 + (100 * at) / span, y: (value) => 62 - (58 * value) / top };
  svg.append(shape("path", { class: "area", d: areaPath(box, xs, ys.map(() => -top / 29), ys) }), shape("path", { class: "line", d: linePath(box, xs, ys) }));
  if (chart.pointed === null) return;
  const at = nearest(xs, (chart.pointed - 1) * span), x = box.x(xs[at]);
  svg.append(shape("line", { class: "at", x1: x, x2: x, y1: 0, y2: 64 }));
  chart.value.textContent = `${format(ys[at])}, ${ago(-xs[at])}`;
}
function showFlow({ rates, curves }) {
  for (const chart of charts) {
    Object.assign(chart, { xs: curves.age.map((age) => -age), ys: curves[chart.id], now: rates[chart.id] });
    drawChart(chart);
  }
  const minutes = Math.round((curves.age[0] || 0) / 60);
  say("flow-words", curves.age.length < 2 ? "curves begin in a few seconds" : minutes < 2 ? "the last minute" : `the last ${minutes} minutes`);
}

/* -- environments and what was set aside */
function showEnvironments({ environments, run }) {
  byId("rows").replaceChildren(...environments.map((env, index) => {
    const cells = [format(env.weight, "share"), format(env.minimum, "share"), format(env.group_size), format(env.queued), format(env.buffered), format(env.groups) + (env.set_aside ? ` (${format(env.set_aside)} set aside)` : ""), format(env.score), env.state === "left" ? "left" : ago(env.silent_s)];
    const name = make("td", {}, make("i", { class: colour(index) }), env.name);
    return make("tr", { class: env.state }, name, ...cells.map((cell) => make("td", {}, cell)));
  }));
  byId("no-environments").hidden = environments.length > 0;
  say("no-environments", run.started ? "None has registered." : "None has registered; they may once a trainer has asked for its first batch.");
  const silent = environments.filter((env) => env.state === "silent").length;
  say("environments-words", silent ? `${silent} silent: not counted in shares and minimums` : "");
}
function showSetAside({ set_aside, now }) {
  byId("set-aside").hidden = !set_aside.count && !set_aside.strict;
  say("misfit-words", set_aside.count ? `${plural(set_aside.count, "group")} that no trainer could use; the last ones are at /set_aside` : "nothing: every group could be used");
  byId("misfits").replaceChildren(...set_aside.last.map((misfit) => make("li", {}, make("span", {}, make("b", {}, misfit.environment), misfit.reason), make("time", {}, ago(now - misfit.at)))));
}

/* -- the latest rollout, every token coloured by its probability */
function showSequence() {
  const group = seen.shown, sequence = group.sequences[seen.chosen];
  const labels = group.sequences.map(({ score, index }) => (score === null ? `no. ${index + 1}` : `score ${format(score)}`));
  showTabs("tabs", labels, seen.chosen, (index) => { seen.chosen = index; showSequence(); });
  byId("tokens").className = group.has_text ? "tokens" : "tokens ids";
  byId("tokens").replaceChildren(...tokenNodes(sequence));
  const parts = [group.environment || "no environment", `${plural(group.size, "sequence")}`, `${plural(sequence.tokens, "token")}, ${format(sequence.trained)} trained on`];
  if (!group.has_text) parts.push("token ids: start with --tokenizer to read text");
  say("latest-words", parts.join(" · "));
}
function showLatest({ latest, latest_key }) {
  if (byId("hold").checked && seen.shown) return;
  if (!latest_key) Object.assign(seen, { key: "", shown: null, chosen: 0 });
  if (latest) {
    Object.assign(seen, { key: latest_key, shown: latest.sequences.length ? latest : null, chosen: 0 });
    hideTip();
    if (seen.shown) showSequence();
  }
  byId("rollout").hidden = !seen.shown;
  byId("no-rollout").hidden = Boolean(seen.shown);
  say("no-rollout", latest_key ? "The latest group is too large to show; /latest_example has it." : "No group has been queued yet.");
  if (!seen.shown) say("latest-words", "");
}
watchTokens(byId("tokens"), () => seen.shown.sequences[seen.chosen], ["not trained on", ""]);

/* -- asking */
async function ask() {
  try {
    const reply = await fetch(`dashboard/data?latest=${encodeURIComponent(seen.key)}`, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    const figures = await reply.json();
    for (const show of [showRun, showQueue, showFlow, showEnvironments, showSetAside, showLatest]) show(figures);
    seen.last = Date.now();
    byId("pulse").className = "pulse";
    say("pulse-text", "live");
  } catch {
    byId("pulse").className = "pulse lost";
    say("pulse-text", seen.last ? `no answer since ${ago((Date.now() - seen.last) / 1000).replace(" ago", "")}` : "no answer");
  }
}
async function watch() {
  if (!document.hidden) await ask();
  setTimeout(watch, INTERVAL);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });

watch();
