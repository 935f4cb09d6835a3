"use strict";
/* Elements, numbers in words, the tooltip and the theme: what every page with a script needs. */
const byId = (id) => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function shape(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return element;
}

/* One button for each label, of which one is chosen. */
function showTabs(id, labels, chosen, choose) {
  byId(id).replaceChildren(...labels.map((label, index) => {
    const tab = make("button", { type: "button", "aria-pressed": String(index === chosen) }, label);
    tab.addEventListener("click", () => choose(index));
    return tab;
  }));
}

/* Numbers for people: three digits, thousands as k, shares in percent. */
const SCALES = [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]];
function format(value, unit, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${significant(100 * value, digits)} %`;
  const [, scale, letter] = SCALES.find(([bound]) => Math.abs(value) >= bound);
  const text = significant(value / scale, digits) + letter;
  return ["s", "GB", "tokens/s"].includes(unit) ? `${text} ${unit}` : text;
}
const plural = (count, word) => `${format(count)} ${word}${count === 1 ? "" : "s"}`;
function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replaceAll("-", "−");
  return String(Number(value.toPrecision(Math.max(digits, size >= 1000 ? 4 : 3)))).replace("-", "−");
}

/* One tooltip for titles and tokens. */
function showTip(target, content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const at = target.getClientRects()[0], size = tip.getBoundingClientRect();
  const above = at.top - size.height - 8;
  tip.style.left = `${Math.max(6, Math.min(innerWidth - size.width - 6, at.left))}px`;
  tip.style.top = `${above > 4 ? above : at.bottom + 8}px`;
}
const hideTip = () => { byId("tip").hidden = true; };

/* The button changes the theme, and the browser remembers it. */
function themes() {
  const button = byId("theme"), names = ["auto", "light", "dark"];
  const apply = (name) => {
    document.documentElement.style.colorScheme = name === "auto" ? "" : name;
    button.textContent = `Theme: ${name}`;
    button.dataset.name = name;
  };
  const stored = () => { try { return localStorage.getItem("lachesis-theme"); } catch { return null; } };
  const store = (name) => { try { localStorage.setItem("lachesis-theme", name); } catch { /* no storage for files here */ } };
  apply(names.includes(stored()) ? stored() : "auto");
  button.addEventListener("click", () => {
    const name = names[(names.indexOf(button.dataset.name) + 1) % names.length];
    apply(name);
    store(name);
  });
}
themes();
