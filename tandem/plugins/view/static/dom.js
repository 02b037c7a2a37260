// Elements, texts and numbers. A text reaches the page as a text node and in no other way.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

// Characters that change what one reads without being seen: controls, directions, invisible ones, half pairs.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|\p{Cs}/gu;

// Return nodes of a text in which those characters are names.
export function visible(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    const code = match[0].codePointAt(0);
    const name = code < 32 ? String.fromCodePoint(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    nodes.push(h("span", { class: "hidden-character", title: "not printed" }, name));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

export const plain = (text) => text.replace(HIDDEN, "\ufffd");

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export const words = (text) => String(text).replaceAll("_", " ");

export function chip(text, kind = "") {
  return h("span", { class: `chip ${kind}` }, words(text));
}

// A colour between red and green for a reward, given the lowest and the highest around it.
export function rewardVars(reward, low, high) {
  const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return { "--hue": String(Math.round(8 + 142 * Math.min(1, Math.max(0, share)))) };
}

// A table whose cells name their columns, for a screen that is too narrow for them.
export function table(columns, rows) {
  return h("div", { class: "scroll" }, h("table", { class: "config" }, h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { "data-label": columns[i], class: i ? "" : "dim" }, cell)))))));
}

// How values spread: a bar for each stretch of them; whole numbers share no bar with halves of others.
export function histogram(title, values) {
  if (values.length < 2) return null;
  const low = Math.min(...values), high = Math.max(...values), unit = values.every(Number.isInteger) ? 1 : 0, span = high - low + unit;
  const width = unit ? Math.ceil(span / 24) : span / 24 || 1, counts = Array(Math.max(1, Math.ceil(span / width - 1e-9))).fill(0);
  for (const value of values) counts[Math.min(counts.length - 1, Math.floor((value - low) / width))] += 1;
  const most = Math.max(...counts), from = (i) => low + i * width, mean = values.reduce((sum, v) => sum + v, 0) / values.length;
  const stretch = (i) => (unit && width === 1 ? number(from(i)) : `${number(from(i), 3)} to ${number(unit ? from(i + 1) - 1 : from(i + 1), 3)}`);
  return h("figure", { class: "histogram" }, h("figcaption", {}, title, h("small", {}, `mean ${number(mean, 3)}`)),
    h("div", { class: "bars" }, counts.map((count, i) => h("i", { title: `${stretch(i)}: ${number(count)} of ${number(values.length)}`, vars: { "--share": String(count / most) } }))),
    h("div", { class: "ends dim" }, h("span", {}, number(low, 3)), high > low && h("span", {}, number(high, 3))));
}

export function sparkline(values, label) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 120 28");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  if (values.length > 1) {
    const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
    const line = document.createElementNS(ns, "polyline");
    line.setAttribute("points", values.map((v, i) => `${(2 + (116 * i) / (values.length - 1)).toFixed(1)},${(25 - (22 * (v - low)) / span).toFixed(1)}`).join(" "));
    svg.append(line);
  }
  return svg;
}
