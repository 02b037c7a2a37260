// The list of runs.

import { get, link } from "./api.js";
import { chip, fill, h, many, number, plain, sparkline, visible, words } from "./dom.js";
import { rowKeys } from "./rows.js";

const chosen = new Set();

export async function runs(main) {
  const body = h("div", {}), keys = rowKeys(() => body);
  let shown = "";
  async function draw() {
    const answer = await get("runs"), text = JSON.stringify(answer);
    if (text === shown) return;
    shown = text;
    const marked = [...body.querySelectorAll("[data-row]")].findIndex((row) => row.classList.contains("marked"));
    for (const name of chosen) if (!answer.runs.some((run) => run.name === name)) chosen.delete(name);
    fill(body, answer.runs.length ? list(answer.runs, draw, () => { shown = ""; draw(); }) : empty(answer.root));
    body.querySelectorAll("[data-row]")[marked]?.classList.add("marked");
  }
  await draw();
  fill(main, h("h1", {}, "Runs"), body);
  return { keys, news: draw, keepScroll: false };
}

function empty(root) {
  return h("div", { class: "card" }, h("p", {}, `There is no run in ${root} yet.`), h("p", { class: "dim" }, "`tandem demo` makes one in minutes; it appears here as it begins."));
}

function list(all, draw, redraw) {
  const names = all.map((run) => run.name).filter((name) => chosen.has(name));
  const order = { running: 0, "not begun": 2 };
  const sorted = [...all].sort((a, b) => (order[a.state] ?? 1) - (order[b.state] ?? 1) || b.created.localeCompare(a.created));
  return [
    h("div", { class: "bar" },
      h("span", { class: "dim" }, `${many(all.length, "run")}, ${all.filter((r) => r.state === "running").length} running`),
      h("span", { class: "grow" }),
      names.length > 0 && h("a", { class: "button", href: link("curves", [names.join(",")]) }, `Curves of ${names.length}`),
      names.length === 2 && h("a", { class: "button", href: link("diff", names) }, "Diff"),
      names.length > 0 && h("button", { class: "quiet", onclick: () => { chosen.clear(); redraw(); } }, "clear")),
    h("div", { class: "card scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["", "run", "state", "step", "reward", "", "held-out", "tok/s", "s/step", "failures"].map((t, i) => h("th", { class: `c${i}` }, t)))),
      h("tbody", {}, sorted.map((run) => row(run, redraw))))),
  ];
}

function row(run, redraw) {
  const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : 0;
  const held = run.held_out === null ? "–" : `${run.held_out.toFixed(3)}`;
  const toggle = (event) => { event.target.checked ? chosen.add(run.name) : chosen.delete(run.name); redraw(); };
  return h("tr", { "data-row": true },
    h("td", { class: "c0" }, h("input", { type: "checkbox", checked: chosen.has(run.name), onchange: toggle, "aria-label": `choose ${run.name}` })),
    h("td", { class: "c1" }, h("a", { href: link("curves", [run.name]) }, run.name), h("small", {}, run.command),
      run.warnings.length > 0 && h("small", {}, h("a", { class: "warn", href: link("curves", [run.name]), title: plain(run.warnings.join("\n")) }, many(run.warnings.length, "warning"))),
      run.broken > 0 && h("small", { class: "warn" }, `${run.broken} unreadable rows`)),
    h("td", { class: "c2" }, chip(run.state, run.state), run.failed && h("small", { class: "bad-text", title: plain(run.failed) }, visible(run.failed))),
    h("td", { class: "c3 num" }, `${number(run.step)}${run.steps ? ` / ${number(run.steps)}` : ""}`, h("i", { class: "progress", vars: { "--share": `${100 * share}%` } })),
    h("td", { class: "c4 num" }, run.reward === null ? "–" : run.reward.toFixed(3), run.what !== "reward" && h("small", {}, words(run.what))),
    h("td", { class: "c5" }, sparkline(run.trend, `${run.what} by step`)),
    h("td", { class: "c6 num" }, held, run.held_out !== null && h("small", {}, `± ${(run.interval ?? 0).toFixed(3)}`),
      Number.isFinite(run.best.reward) && h("small", { title: "the best evaluation, of best.json" }, `best ${run.best.reward.toFixed(3)} at ${number(run.best.step)}`)),
    h("td", { class: "c7 num" }, run.tokens_s ? number(Math.round(run.tokens_s)) : "–"),
    h("td", { class: "c8 num" }, number(run.step_s, 3)),
    h("td", { class: "c9 num" }, run.errors ? h("a", { class: "warn", href: link("episodes", [run.name], { errors: 1 }) }, number(run.errors)) : "0"));
}
