// The list of runs.

import { get, link } from "./api.js";
import { chip, fill, h, many, number, plain, sparkline, visible, words } from "./dom.js";
import { rowKeys } from "./rows.js";

const chosen = new Set();
let wanted = "", order = "newest first";
const gained = (run) => (run.held_out === null ? null : run.held_out - run.held_out_first);
const lasted = (run) => (Date.parse(run.written) - Date.parse(run.created)) / 1000;
const STATES = { running: 0, "not begun": 2 };
const SORTS = { // what counts, the largest first; names rise
  "newest first": (run) => Date.parse(run.created), "oldest first": (run) => -Date.parse(run.created), "by name": null, "highest reward": (run) => (run.what === "reward" ? run.reward : null),
  "highest held-out": (run) => run.held_out, "most gained": gained, "longest": lasted, "largest model": (run) => run.size, "most tokens a second": (run) => run.tokens_s,
};

export async function runs(main) {
  const body = h("div", {}), keys = rowKeys(() => body), status = h("span", { class: "dim" }), actions = h("span", { class: "bar" });
  let shown = "", answer = null;
  async function draw() {
    answer = await get("runs");
    const text = JSON.stringify(answer);
    if (text !== shown) paint();
    shown = text;
  }
  function paint() {
    const all = answer.runs, marked = [...body.querySelectorAll("[data-row]")].findIndex((row) => row.classList.contains("marked"));
    for (const name of chosen) if (!all.some((run) => run.name === name)) chosen.delete(name);
    const names = all.map((run) => run.name).filter((name) => chosen.has(name));
    const known = (run) => [run.name, run.command, run.state, run.algorithm, run.model, run.machine, run.created].join(" ").toLowerCase();
    const found = all.filter((run) => wanted.toLowerCase().split(/\s+/).every((word) => known(run).includes(word))).sort(compare);
    status.textContent = `${found.length < all.length ? `${number(found.length)} of ` : ""}${many(all.length, "run")}, ${all.filter((r) => r.state === "running").length} running`;
    fill(actions,
      names.length > 0 && h("a", { class: "button", href: link("curves", [names.join(",")]) }, `Curves of ${names.length}`),
      names.length === 2 && h("a", { class: "button", href: link("diff", names) }, "Diff"),
      names.length > 0 && h("button", { class: "quiet", onclick: () => { chosen.clear(); paint(); } }, "clear"));
    fill(body, all.length ? list(found, paint) : empty(answer.root));
    body.querySelectorAll("[data-row]")[marked]?.classList.add("marked");
  }
  const filter = h("input", { type: "search", class: "wide", placeholder: "name, model, algorithm, machine ( / )", "aria-label": "filter", value: wanted, oninput: () => { wanted = filter.value.trim(); paint(); } });
  const sort = h("select", { "aria-label": "sort", onchange: () => { order = sort.value; paint(); } }, Object.keys(SORTS).map((name) => h("option", { value: name, selected: name === order }, name)));
  await draw();
  fill(main, h("h1", {}, "Runs"), h("div", { class: "bar" }, filter, sort, status, h("span", { class: "grow" }), actions), body);
  return { keys, news: draw, keepScroll: false };
}

function compare(a, b) {
  if (order === "by name") return a.name.localeCompare(b.name);
  const value = (run) => SORTS[order](run) ?? -Infinity, states = order === "newest first" ? (STATES[a.state] ?? 1) - (STATES[b.state] ?? 1) : 0;
  return states || Number(value(b) > value(a)) - Number(value(b) < value(a));
}

function empty(root) {
  return h("div", { class: "card" }, h("p", {}, `There is no run in ${root} yet.`), h("p", { class: "dim" }, "`tandem demo` makes one in minutes; it appears here as it begins."));
}

const COLUMNS = ["", "run", "state", "step", "begun", "reward", "trend", "held-out reward", "tok/s", "s/step", "failures"];
function list(sorted, redraw) {
  return h("div", { class: "card scroll" }, h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, COLUMNS.map((name, i) => h("th", { class: `c${i}` }, name)))),
    h("tbody", {}, sorted.map((run) => row(run, redraw)))));
}

function duration(seconds) {
  const [days, hours, minutes] = [86400, 3600, 60].map((unit) => Math.floor(seconds / unit));
  if (!(seconds >= 0)) return "";
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

function amount(count) {
  const [size, unit] = count >= 1e9 ? [1e9, "B"] : count >= 1e5 ? [1e6, "M"] : [1, ""];
  return count ? `${number(Number((count / size).toPrecision(3)))}${unit} trained parameters` : "";
}

function row(run, redraw) {
  const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : 0, learned = run.what === "reward", begun = new Date(run.created);
  const toggle = (event) => { event.target.checked ? chosen.add(run.name) : chosen.delete(run.name); redraw(); };
  const model = run.model.split("/").filter(Boolean).slice(-3).join("/");
  const cells = [
    h("input", { type: "checkbox", checked: chosen.has(run.name), onchange: toggle, "aria-label": `choose ${run.name}` }),
    [h("a", { href: link("curves", [run.name]) }, run.name), h("small", {}, [run.command, run.algorithm].filter(Boolean).join(" · ")),
      run.warnings.length > 0 && h("small", {}, h("a", { class: "warn", href: link("curves", [run.name]), title: plain(run.warnings.join("\n")) }, many(run.warnings.length, "warning"))),
      run.broken > 0 && h("small", { class: "warn" }, `${run.broken} unreadable rows`),
      h("div", { class: "about dim", title: plain(`${run.model}\n${run.machine}`) }, visible([model, amount(run.size), run.machine.split(",")[0].replaceAll("(R)", "")].filter(Boolean).join(" · ")))],
    [chip(run.state, run.state), run.failed && h("small", { class: "bad-text", title: plain(run.failed) }, visible(run.failed))],
    [`${number(run.step)}${run.steps ? ` / ${number(run.steps)}` : ""}`, h("i", { class: "progress", vars: { "--share": `${100 * share}%` } })],
    [Number.isNaN(begun.valueOf()) ? "–" : begun.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }), h("small", { title: "from its begin to the last that it wrote" }, duration(lasted(run)))],
    learned && run.reward !== null ? run.reward.toFixed(3) : "–",
    [sparkline(run.trend, `${run.what} by step`), !learned && run.reward !== null && h("small", {}, `${words(run.what)} ${number(run.reward, 3)}`)],
    run.held_out === null ? "–" : [run.held_out_first !== run.held_out && h("span", { class: "dim" }, `${run.held_out_first.toFixed(3)} → `), run.held_out.toFixed(3), h("small", {}, `± ${(run.interval ?? 0).toFixed(3)}`),
      Number.isFinite(run.best.reward) && h("small", { title: "the best evaluation, of best.json" }, `best ${run.best.reward.toFixed(3)} at ${number(run.best.step)}`)],
    run.tokens_s ? number(Math.round(run.tokens_s)) : "–",
    number(run.step_s, 3),
    run.errors ? h("a", { class: "warn", href: link("episodes", [run.name], { errors: 1 }) }, number(run.errors)) : "0",
  ];
  return h("tr", { "data-row": true }, cells.map((cell, i) => h("td", { class: `c${i} ${i > 2 ? "num" : ""}`, "data-label": COLUMNS[i] }, cell)));
}
