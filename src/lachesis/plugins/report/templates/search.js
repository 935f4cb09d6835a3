/* Searches all rollouts of the run, and shows one of them turn by turn. */
const answered = async (path, values) => {
  const asked = new URLSearchParams({ run: watched.run, ...values });
  const answer = await fetch(`${path}?${asked}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};
const cells = (values, kind = "td") => values.map((value) => make(kind, {}, ...[value].flat()));
const tableOf = (titles, rows) => make("div", { class: "card table" }, make("table", {}, make("tr", {}, ...cells(titles, "th")), ...rows));
const inResults = (...nodes) => byId("found").replaceChildren(...nodes);

function turnNode(turn) {
  const body = make("pre");
  body.append(...(turn.sequence ? tokenNodes(turn.sequence) : visible(turn.text)));
  if (turn.sequence) watchTokens(body, () => turn.sequence, ["not sampled", "given"]);
  return make("section", { class: turn.sampled ? "turn sampled" : "turn" }, make("h3", {}, turn.role), body);
}

async function showOne(place) {
  const { hit, turns } = await answered("rollout", { place });
  const facts = `${hit.place}, prompt ${hit.prompt_id}, reward ${format(hit.reward, "")}, advantage ${format(hit.advantage, "")}, ${plural(hit.tokens, "token")}, ended by ${hit.finish}, weights ${[...new Set(hit.versions)].join(" to ")}`;
  byId("one").replaceChildren(make("p", { class: "facts-of-one" }, facts), make("div", { class: "card" }, ...turns.map(turnNode)));
}

/* What goes wrong is said where the answer would be. */
async function tell(element, work) {
  try { await work(); } catch (error) { element.replaceChildren(make("p", { class: "quiet" }, error.message)); }
}

async function find() {
  byId("one").replaceChildren();
  const values = Object.fromEntries([...new FormData(byId("search"))].filter(([, value]) => value !== ""));
  const { hits, more, failures } = await answered("rollouts", values);
  if (failures) {
    inResults(tableOf(["step", "cause", "prompt", "what was wrong"], failures.map((one) => make("tr", {}, ...cells([format(one.step), one.cause, one.prompt_id, visible(one.message)])))));
    return;
  }
  const rows = hits.map((hit) => {
    const open = make("button", { type: "button", "data-place": hit.place }, hit.place);
    open.addEventListener("click", () => tell(byId("one"), () => showOne(hit.place)));
    return make("tr", {}, ...cells([open, format(hit.reward, ""), hit.prompt_id, visible(hit.excerpt)]));
  });
  inResults(make("p", { class: "quiet" }, `${plural(hits.length, "rollout")}${more ? ", and more" : ""}`), tableOf(["place", "reward", "prompt", "text"], rows));
}
byId("search").addEventListener("submit", (event) => { event.preventDefault(); tell(byId("found"), find); });
