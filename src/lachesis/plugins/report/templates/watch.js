/* Asks the server for what is new, and puts it in the place of what was there; where one was reading one stays. */
const names = JSON.parse(byId("run-names").textContent);
const COMPARE = names.length;
const token = (/token=([\w-]+)/.exec(location.hash) || [])[1];
const watched = { run: 0, tag: "" };

function choose(index) {
  Object.assign(watched, { run: index, tag: "" });
  kept.step = null;
  kept.group = 0;
  byId("found").replaceChildren();
  byId("one").replaceChildren();
  byId("runs").hidden = names.length === 1;
  showTabs("runs", names.length > 1 ? [...names, "Compare"] : names, index, choose);
  byId("fleet").replaceChildren();
  byId("history").hidden = index === COMPARE;
  return refresh();
}

const statusLine = (title, ...content) => make("div", {}, make("dt", {}, title ? `${title} ` : ""), make("dd", {}, ...content));
/* A wait has a bar that fills up until its deadline. */
function waitLine({ title, text, share }, at) {
  const bar = share === null ? [] : [" ", make("meter", { min: 0, max: 1, high: .8, value: share, title: `${format(share, "share")} of its time` })];
  return statusLine(at ? "" : title, text, ...bar);
}
const ENGINE_COLUMNS = ["engine", "state", "proved version", "requests", "tokens in progress", "done", "for", ""];
function engineRow(engine) {
  const version = engine.version === null ? "none" : String(engine.version);
  const numbers = [engine.in_flight, engine.expected_tokens, engine.completed].map((value) => format(value));
  return make("tr", { class: `engine ${engine.state}` }, ...[engine.url, engine.state, version, ...numbers, format(Math.round(10 * engine.for_s) / 10, "s"), engine.reason].map((cell) => make("td", {}, cell)));
}
function showNow({ status, lead, waits, engines, paused, goes_on }) {
  for (const id of ["checkpoint", "pause", "stop"]) byId(id).hidden = !token || !goes_on;
  const leading = (title, text, at) => make("div", at ? {} : { class: `state ${text}` }, make("dt", {}, title), make("dd", {}, text));
  byId("lead").replaceChildren(...lead.map(([title, text], at) => leading(title, text, watched.run === COMPARE ? 1 : at)));
  byId("waits").replaceChildren(...waits.map(waitLine));
  byId("status").replaceChildren(...status.map(([title, text]) => statusLine(title, text)));
  byId("status").parentElement.hidden = !status.length;
  byId("fleet").replaceChildren(...(engines.length ? [make("div", { class: "card table" }, make("table", {}, make("tr", {}, ...ENGINE_COLUMNS.map((name) => make("th", {}, name))), ...engines.map(engineRow)))] : []));
  byId("pause").textContent = paused ? "Resume" : "Pause after this step";
  byId("pause").dataset.asks = paused ? "resume" : "pause";
}

async function refresh() {
  const { run, tag } = watched;
  const answer = await fetch(`${run === COMPARE ? "compare" : "data"}?run=${run}&known=${encodeURIComponent(tag)}`);
  if (!answer.ok) throw new Error(await answer.text());
  const news = await answer.json();
  if (run !== watched.run) return;
  showNow(news);
  if (news.html === null) return;
  watched.tag = news.tag;
  const open = [...byId("body").querySelectorAll("details")].map((element) => element.open);
  hideTip();
  byId("body").innerHTML = news.html;
  byId("body").querySelectorAll("details").forEach((element, at) => { element.open = Boolean(open[at]); });
  if (byId("charts")) showReport(news.data);
}

async function ask(what) {
  const answer = await fetch(`${what}?run=${watched.run}`, { method: "POST", headers: { "X-Lachesis-Token": token } });
  byId("connection").textContent = await answer.text();
}

function history() {
  if (page.prompt === undefined) return;
  const form = byId("search");
  form.reset();
  form.elements.prompt.value = page.prompt;
  form.closest("details").open = true;
  form.requestSubmit();
}

for (const what of ["stop", "checkpoint"]) byId(what).addEventListener("click", () => ask(what));
byId("pause").addEventListener("click", () => ask(byId("pause").dataset.asks));
byId("history").addEventListener("click", history);

async function follow(first) {
  try {
    await (first ? choose(0) : refresh());
    if (byId("connection").dataset.lost === "true") Object.assign(byId("connection"), { textContent: "" }).dataset.lost = "false";
  } catch (error) {
    byId("connection").textContent = `no answer: ${error.message}`;
    byId("connection").dataset.lost = "true";
  }
  setTimeout(follow, 2000);
}
follow(true);
