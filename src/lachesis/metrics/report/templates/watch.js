/* Asks the server for what is new, and puts it in the place of what was there; where one was reading one stays. */
const names = JSON.parse(byId("run-names").textContent);
const COMPARE = names.length;
const token = (/token=([\w-]+)/.exec(location.hash) || [])[1];
const watched = { run: 0, tag: "" };

function choose(index) {
  Object.assign(watched, { run: index, tag: "" });
  kept.step = null;
  kept.group = 0;
  byId("past").replaceChildren();
  showTabs("runs", names.length > 1 ? [...names, "Compare"] : names, index, choose);
  for (const id of ["checkpoint", "stop"]) byId(id).hidden = !token || index === COMPARE;
  byId("history").hidden = byId("csv").hidden = index === COMPARE;
  byId("csv").href = `metrics.csv?run=${index}`;
  return refresh();
}

function showStatus(lines) {
  byId("status").replaceChildren(...lines.map(([title, text]) => make("div", {}, make("dt", {}, title ? `${title} ` : ""), make("dd", {}, text))));
}

async function refresh() {
  const { run, tag } = watched;
  const answer = await fetch(`${run === COMPARE ? "compare" : "data"}?run=${run}&known=${encodeURIComponent(tag)}`);
  if (!answer.ok) throw new Error(await answer.text());
  const news = await answer.json();
  if (run !== watched.run) return;
  showStatus(news.status);
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

async function history() {
  if (page.prompt === undefined) return;
  const answer = await fetch(`prompt?run=${watched.run}&id=${encodeURIComponent(page.prompt)}`);
  const { met } = await answer.json();
  const rows = met.map((one) => make("tr", {}, make("td", {}, String(one.step)), make("td", {}, format(one.mean, "")), make("td", {}, ...visible(one.best))));
  byId("past").replaceChildren(make("div", { class: "card table" }, make("table", {}, make("tr", {}, make("th", {}, "step"), make("th", {}, "mean reward"), make("th", {}, "best completion")), ...rows)));
}

for (const what of ["stop", "checkpoint"]) byId(what).addEventListener("click", () => ask(what));
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
