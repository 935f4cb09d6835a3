// The search on the page of other trainers' keys: every word has to stand in a row's name, counterpart or note.
(() => {
  const place = document.getElementById("keys");
  if (!place) return;
  const SHOWN = 40;
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "num_generations, --kl-coef, clip_higher ..." });
  input.setAttribute("aria-label", "Search keys of other trainers");
  const count = document.createElement("p");
  const list = document.createElement("dl");
  place.append(input, count, list);
  const element = (name, text, kind) => Object.assign(document.createElement(name), { textContent: text, className: kind || "" });
  const row = ([trainer, theirs, ours, preset, note]) => {
    const box = document.createElement("div");
    const title = document.createElement("dt");
    title.append(element("code", theirs), element("span", ` of ${trainer} → `, "of"), element(ours.includes(".") ? "code" : "strong", ours));
    box.append(title);
    const more = [preset && `default there: ${preset}`, note].filter(Boolean).join("; ");
    if (more) box.append(element("dd", more));
    return box;
  };
  fetch(place.dataset.source).then((answer) => answer.json()).then((rows) => {
    const texts = rows.map((one) => one.join(" ").toLowerCase());
    const show = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = words.length ? rows.filter((_, number) => words.every((word) => texts[number].includes(word))) : [];
      const exact = (one) => (one[1].toLowerCase() === words.join(" ") ? 0 : 1);
      found.sort((a, b) => exact(a) - exact(b));
      list.replaceChildren(...found.slice(0, SHOWN).map(row));
      count.textContent = words.length ? `${found.length} of ${rows.length} keys` + (found.length > SHOWN ? `, the first ${SHOWN}` : "") : `${rows.length} keys`;
    };
    input.addEventListener("input", show);
    show();
  }).catch(() => { count.textContent = "The list of keys cannot be loaded from here; lachesis explain KEY has it."; });
})();
