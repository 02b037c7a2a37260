// Every episode of a run: filter, sort, search; a click opens one.

import { get, link } from "./api.js";
import { chip, fill, h, many, number, plain, rewardVars, visible, words } from "./dom.js";
import { rowKeys } from "./rows.js";

const PAGE = 200, SNIPPET = 240; // SNIPPET: that the server sends of a text
const SORTS = { "-step": "newest first", step: "oldest first", "-reward": "highest reward", reward: "lowest reward", "-tokens": "longest", tokens: "shortest", "-turns": "most turns" };

export async function episodes(main, [run], params) {
  const query = Object.fromEntries(params), fields = {}, list = h("div", { class: "episodes" }), status = h("span", { class: "dim" });
  let offset = Number(query.offset || 0), answer = null, turn = 0, timer = 0, over = false;
  delete query.offset;

  async function load() {
    const own = ++turn;
    const found = await get("episodes", { run, ...query, offset, limit: PAGE });
    if (own !== turn || over) return;
    answer = found;
    history.replaceState(null, "", link("episodes", [run], { ...query, offset: offset || "" }));
    draw();
    if (!found.complete) timer = setTimeout(reload, 150);
  }

  const reload = () => load().catch((error) => { status.textContent = error.message; });

  function change(name, value) {
    if (value) query[name] = value; else delete query[name];
    offset = 0;
    clearTimeout(timer);
    timer = setTimeout(reload, name === "q" ? 120 : 0);
  }

  function draw() {
    const { rows, count, total, mean, complete, facets, damaged } = answer;
    for (const name of ["kind", "outcome", "stop", "category"]) {
      const texts = facets[name] || [], select = fields[name];
      if (select.dataset.texts !== JSON.stringify(texts)) {
        select.dataset.texts = JSON.stringify(texts);
        fill(select, h("option", { value: "" }, `any ${name}`), texts.map((t) => h("option", { value: t, selected: query[name] === t }, words(plain(t)))));
      }
      select.hidden = texts.length < 2 && !query[name];
    }
    const bad = Object.keys(damaged).length;
    status.textContent = `${number(count)} of ${number(total)} episodes${complete ? "" : ", reading more"}${mean === null ? "" : `, mean reward ${mean.toFixed(3)}`}${bad ? `; ${bad} damaged files left out` : ""}`;
    const rewards = rows.map((r) => r.reward), low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
    const marked = [...list.querySelectorAll("[data-row]")].findIndex((r) => r.classList.contains("marked"));
    fill(list, together(rows).map((group) => problem(run, group, low, high)), rows.length === 0 && h("p", { class: "dim pad" }, complete ? "No episode is like that." : "Reading ..."));
    list.querySelectorAll("[data-row]")[marked]?.classList.add("marked");
    before.disabled = offset === 0;
    after.disabled = offset + PAGE >= count;
    for (const [format, anchor] of Object.entries(exports)) anchor.href = `/api/export?${new URLSearchParams({ run, ...query, format })}`;
  }

  const select = (name, options = []) => (fields[name] = h("select", { "aria-label": name, onchange: (e) => change(name, e.target.value) }, options));
  const input = (name, type, placeholder, width) => h("input", { type, placeholder, "aria-label": placeholder, value: query[name] || "", class: width, step: "any", oninput: (e) => change(name, e.target.value.trim()) });
  const page = (by) => { offset = Math.max(0, offset + by); reload(); scrollTo(0, 0); };
  const before = h("button", { onclick: () => page(-PAGE) }, "← before"), after = h("button", { onclick: () => page(PAGE) }, "after →");
  const exports = { jsonl: h("a", { download: true }, "JSONL"), parquet: h("a", { download: true }, "Parquet") };
  const sort = select("sort", Object.entries(SORTS).map(([value, text]) => h("option", { value, selected: (query.sort || "-step") === value }, text)));
  fill(main,
    h("div", { class: "bar filters" },
      input("q", "search", "search texts, prompts, uids ( / )", "wide"),
      select("kind"), select("outcome"), select("stop"), select("category"),
      h("span", { class: "pair" }, input("reward_from", "number", "reward ≥", "tiny"), input("reward_to", "number", "≤", "tiny")),
      h("span", { class: "pair" }, input("step_from", "number", "step ≥", "tiny"), input("step_to", "number", "≤", "tiny")),
      h("label", { class: "dim" }, h("input", { type: "checkbox", checked: query.errors === "1", onchange: (e) => change("errors", e.target.checked ? "1" : "") }), " failures"),
      sort),
    h("div", { class: "bar" }, status, h("span", { class: "grow" }), query.uid && chip(`uid ${plain(query.uid)}`), h("span", { class: "dim" }, "export ", exports.jsonl, " · ", exports.parquet)),
    h("div", { class: "card" }, list), h("div", { class: "bar" }, before, after));
  await load();
  return { keys: { ...rowKeys(() => list), left: () => offset > 0 && page(-PAGE), right: () => !after.disabled && page(PAGE) }, news: (names) => names.has(run) && load(), close: () => { over = true; clearTimeout(timer); } };
}

// Rows side by side that are attempts at one problem in a step, and among them those alike: [[[row, ...], ...], ...]
function together(rows) {
  const groups = [];
  let last = null;
  for (const row of rows) {
    const place = `${row.kind} ${row.step} ${row.group}`;
    if (place !== last) groups.push(new Map());
    last = place;
    const { snippet, reward, stop, tokens, turns, outcome, error } = row, alike = snippet.length < SNIPPET ? JSON.stringify([snippet, reward, stop, tokens, turns, outcome, error]) : row.row;
    const group = groups.at(-1);
    group.set(alike, [...(group.get(alike) || []), row]);
  }
  return groups.map((group) => [...group.values()]);
}

function problem(run, group, low, high) {
  const one = group[0][0], open = (row) => link("episode", [run, row.kind, String(row.step), String(row.row)]);
  return h("div", { class: "problem" },
    h("div", { class: "meta" }, h("b", {}, `${one.step}:${plain(one.uid)}`), one.kind !== "train" ? chip(one.kind.replace("eval_", "held-out "), "info") : one.outcome !== "train" && chip(one.outcome, "warn"),
      one.answer && h("span", {}, " expected ", h("code", {}, visible(one.answer))), h("div", { class: "asked" }, visible(one.prompt.slice(-200).replace(/\s+/g, " ")))),
    group.map((rows) => h("div", { class: "episode-row", "data-row": true },
      h("span", { class: "reward", vars: rewardVars(rows[0].reward, low, high) }, number(rows[0].reward, 3)),
      h("a", { class: "said", href: open(rows[0]) }, visible(rows[0].snippet.replace(/\s+/g, " ") || rows[0].error || "(nothing)")),
      h("span", { class: "meta" }, rows[0].error && chip("failure", "bad"), rows[0].turns > 1 && `${rows[0].turns} turns · `, `${many(rows[0].tokens, "token")} · ${words(rows[0].stop)}`, rows.map((row) => h("a", { href: open(row) }, ` #${row.sample}`))))));
}
