/* The rollout viewer: every token coloured by its probability, with what cannot be seen in its text as a sign. */
const BOUNDS = {{ bounds | tojson }};
function tokenClass(logprob, given) {
  if (given) return "t given";
  if (logprob === null) return "t unknown";
  const probability = Math.exp(logprob);
  return `t p${BOUNDS.filter((bound) => probability < bound).length}`;
}

/* Line breaks stay line breaks. */
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

/* A sequence as token_spans of tokens.py makes it. */
function tokenNodes(sequence) {
  const given = new Set(sequence.given);
  const nodes = sequence.pieces.map((piece, index) => {
    const node = make("span", { class: tokenClass(sequence.logprobs[index], given.has(index)), "data-i": index });
    node.append(...(isSpecial(piece) ? [make("span", { class: "special" }, piece)] : visible(piece)));
    return node;
  });
  if (sequence.after) nodes.push(make("span", { class: "more" }, ` … and ${plural(sequence.after, "token")} more`));
  return nodes;
}

function tokenTip(sequence, index, given) {
  const logprob = sequence.logprobs[index], probability = Math.exp(logprob);
  const row = (label, value) => make("div", {}, make("span", {}, label), make("b", {}, value));
  const rows = sequence.given.includes(index) ? [row(...given)] : logprob === null ? [row("logprob", "unknown")]
    : [row("logprob", logprob.toFixed(3).replace("-", "−")), row("probability", probability >= 1e-4 ? format(probability, "share") : "< 0.01 %")];
  return [make("code", {}, JSON.stringify(sequence.pieces[index])), ...rows];
}
/* Show a token's tip at the pointer; ``given`` is what it says of tokens that were not sampled. */
function watchTokens(element, sequence, given) {
  const over = (event) => {
    const token = event.target.closest(".t");
    if (token) showTip(token, tokenTip(sequence(), Number(token.dataset.i), given));
  };
  for (const kind of ["pointerover", "pointerdown"]) element.addEventListener(kind, over);
  element.addEventListener("pointerout", hideTip);
}
