// Curves of one or more runs, and how their configurations differ.

import { get, link } from "./api.js";
import { Chart, COLORS } from "./chart.js";
import { fill, h, many, number, plain, table, visible } from "./dom.js";

const DASHES = { dashed: [6, 4], dotted: [2, 3], "long dashes": [14, 4], "dash and dot": [9, 4, 2, 4], "short dashes": [3, 3], "sparse dots": [2, 8] };
const short = (key) => key.replace(/^(timings|eval)\//, "");
const constant = (lines) => lines.length > 0 && lines.every((line) => line.y.length > 1 && line.y.every((value) => value === lines[0].y[0]));
let smooth = Number(localStorage.getItem("smooth") || 0);

export async function curves(main, [joined = ""]) {
  const runs = joined.split(",").filter(Boolean), standard = await (await fetch("charts.json")).json();
  const charts = new Map(), grid = h("div", { class: "grid" }), more = h("div", { class: "grid" });
  let flat = new Set(), range = null, answer = await get("series", { run: runs, points: 2 }), wanted = "", shown = "", over = false;
  const names = () => [...new Set(Object.values(answer).flatMap((one) => one.names))];
  const usual = () => standard.map((c) => ({ ...c, keys: c.keys.filter((k) => names().includes(k)) })).filter((c) => c.keys.length);
  const others = () => {
    const known = new Set(standard.flatMap((c) => [...c.keys, c.band]));
    return names().filter((n) => !known.has(n) && (wanted === "*" || (wanted && n.includes(wanted)))).slice(0, 60).map((n) => ({ title: n, keys: [n] }));
  };

  async function load() {
    if (over) return;
    const specs = [...usual(), ...others()];
    const keys = [...new Set(specs.flatMap((c) => [...c.keys, c.band].filter(Boolean)))];
    const zoom = range ? { from: range[0], to: range[1] } : {};
    answer = await get("series", { run: runs, key: keys, points: 1600, ...zoom });
    if (!over) draw(specs);
  }

  function draw(all) {
    if (!range) flat = new Set(usual().filter((spec) => constant(lines(spec))).map((spec) => spec.title));
    const specs = all.filter((spec) => !flat.has(spec.title));
    fill(constants, flat.size > 0 && h("p", { class: "dim" }, "Constant: ", all.filter((spec) => flat.has(spec.title)).map((spec) => `${spec.title} ${number(lines(spec)[0].y[0])}`).join(" · ")));
    for (const [title, { card, chart }] of charts) if (!specs.some((s) => s.title === title)) { chart.destroy(); card.remove(); charts.delete(title); }
    const known = new Set(usual().map((s) => s.title));
    for (const spec of specs) {
      if (!charts.has(spec.title)) {
        const box = h("div", { class: "plotbox" }), note = h("small", {}), card = h("section", { class: "card chart" }, h("h2", {}, spec.title, note), box);
        (known.has(spec.title) ? grid : more).append(card);
        charts.set(spec.title, { card, note, chart: new Chart(box, spec.title, 204, zoom) });
      }
      const meaning = (key, turn) => `${turn ? Object.keys(DASHES)[turn - 1] : "solid"}: ${short(key)}`;
      charts.get(spec.title).note.textContent = runs.length > 1 && spec.keys.length > 1 ? spec.keys.map(meaning).join(", ") : "";
      charts.get(spec.title).chart.draw(lines(spec), smooth);
    }
    reset.hidden = !range;
    const told = runs.flatMap((run) => [answer[run].failed && `failed: ${answer[run].failed}`, ...answer[run].warnings].filter(Boolean).map((line) => (runs.length > 1 ? `${run}: ${line}` : line)));
    if (told.join("\n") === shown) return;
    shown = told.join("\n");
    const failed = runs.filter((run) => answer[run].failed).length, warned = told.length - failed;
    const heading = [failed && `Failed${runs.length > 1 ? `: ${many(failed, "run")}` : ""}`, warned && many(warned, "warning")].filter(Boolean).join(", ") + " (log.txt has more)";
    fill(notes, told.length > 0 && h("details", { class: "card", open: told.length < 4 }, h("summary", { class: "warn" }, heading), h("ul", {}, told.map((line) => h("li", {}, visible(line))))));
  }

  function lines(spec) {
    const found = [];
    runs.forEach((run, place) => spec.keys.forEach((key, turn) => {
      const one = answer[run]?.series[key];
      if (!one?.x.length) return;
      const line = { ...one, run, label: short(key) };
      if (runs.length > 1 && !found.some((other) => other.run === run)) line.label = turn ? `${run} ${line.label}` : run;
      line.color = COLORS[(runs.length > 1 ? place : turn) % COLORS.length];
      if (runs.length > 1 && turn) line.dash = Object.values(DASHES)[turn - 1];
      const half = turn === 0 && spec.band && answer[run].series[spec.band];
      if (half && half.x.length === one.x.length) { line.low = one.y.map((v, i) => v - half.y[i]); line.high = one.y.map((v, i) => v + half.y[i]); }
      found.push(line);
    }));
    return found;
  }

  function zoom(to) { range = to; return load(); }

  const reset = h("button", { onclick: () => zoom(null), hidden: true }, "whole run");
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smooth, oninput: () => { smooth = Number(slider.value); localStorage.setItem("smooth", smooth); draw([...usual(), ...others()]); } });
  const filter = h("input", { type: "search", class: "wide", placeholder: "other numbers: a part of the name, * for all", oninput: () => { wanted = filter.value.trim(); load(); } });
  const configuration = h("div", {}), notes = h("div", {}), constants = h("div", {});
  fill(main,
    h("div", { class: "bar" },
      runs.map((run, place) => h("span", { class: "run-chip", vars: { "--color": COLORS[place % COLORS.length] } }, runs.length > 1 && h("i", {}), h("a", { href: link("episodes", [run]) }, run),
        runs.length > 1 && h("a", { class: "x", title: "leave out", href: link("curves", [runs.filter((r) => r !== run).join(",")]) }, "×"))),
      h("span", { class: "grow" }), reset, h("label", { class: "dim" }, "smooth ", slider)),
    notes,
    grid, constants, h("div", { class: "bar" }, filter, h("span", { class: "dim" }, "drag over a chart to zoom, double-click for the whole run")), more, configuration);
  config(runs, configuration);
  const themed = () => draw([...usual(), ...others()]);
  addEventListener("theme", themed);
  return {
    shown: load, keepScroll: false,
    news: (changed) => runs.some((r) => changed.has(r)) && load(),
    close: () => { over = true; removeEventListener("theme", themed); charts.forEach(({ chart }) => chart.destroy()); },
  };
}

// A value as a recipe has it, in TOML.
function toml(value) {
  if (Array.isArray(value)) return `[${value.map(toml).join(", ")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value ?? "");
  return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)} = ${toml(one)}`).join(", ")}}`;
}

async function config(runs, box) {
  const { values, different } = await get("config", { run: runs });
  const cell = (run, key) => (values[run][key] === undefined ? "–" : plain(toml(values[run][key])));
  fill(box,
    runs.length > 1 && h("section", { class: "card" }, h("h2", {}, `Configuration: ${many(different.length, "key")} differ${different.length === 1 ? "s" : ""}`), different.length > 0 && table(["", ...runs], different.map((key) => [key, ...runs.map((run) => cell(run, key))]))),
    runs.map((run) => h("details", { class: "card" }, h("summary", {}, `Configuration${runs.length > 1 ? ` of ${run}` : ""}: all ${Object.keys(values[run]).length} keys, as a recipe has them`), h("pre", {}, Object.keys(values[run]).map((key) => `${key} = ${cell(run, key)}`).join("\n")))));
}
