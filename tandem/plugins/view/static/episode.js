// One episode: the conversation, its tokens in colour, the other attempts of its group.

import { get, link } from "./api.js";
import { chip, fill, h, many, number, plain, rewardVars, visible, words } from "./dom.js";

let paint = "logprob";
const PAINTS = {
  logprob: { title: "log-prob", note: "the less likely, the more colour" },
  version: { title: "weights", note: "a colour for each version that sampled" },
  penalty: { title: "penalty", note: "penalties of the environment" },
  advantage: { title: "advantage", note: "blue: more likely after the update, red: less likely" },
  ratio: { title: "ratio", note: "policy / sampler in the last update: blue above 1, red below" },
};

// A word of a shell's command: uids come with the data, and the command is there to be copied.
const quoted = (word) => (/^[\w./:-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

export async function episode(main, [run, kind, step, row]) {
  let shown = "", over = false, keys = {};
  async function load() {
    const one = await get("episode", { run, kind, step, row }), text = JSON.stringify(one);
    if (over || text === shown) return; // as it was: what is being read stays where it is
    shown = text;
    keys = draw(main, one, [run, kind, step]);
  }
  await load();
  const live = Object.fromEntries(["left", "right", "j", "k"].map((name) => [name, () => keys[name]()]));
  return { keys: live, keepScroll: false, news: (names) => names.has(run) && load(), close: () => { over = true; } };
}

function draw(main, one, [run, kind, step]) {
  const go = (place) => { location.hash = link("episode", [run, kind, step, String(place)]); };
  const keys = { left: () => one.row > 0 && go(one.row - 1), right: () => one.row + 1 < one.rows && go(one.row + 1) };
  const place = one.peers.findIndex((p) => p.row === one.row);
  keys.k = () => place > 0 && go(one.peers[place - 1].row);
  keys.j = () => place + 1 < one.peers.length && go(one.peers[place + 1].row);
  const rewards = one.peers.map((p) => p.reward), low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  fill(main,
    h("div", { class: "bar" },
      h("h1", {}, plain(one.name)), kind !== "train" && chip(kind.replace("eval_", "held-out "), "info"), one.category && chip(plain(one.category)),
      h("span", { class: "grow" }),
      h("button", { onclick: keys.left, disabled: one.row === 0, title: "the episode before ( ← )" }, "←"), h("span", { class: "dim" }, `${one.row + 1} / ${one.rows} of `, h("a", { href: link("step", [run, step]) }, `step ${step}`)),
      h("button", { onclick: keys.right, disabled: one.row + 1 >= one.rows, title: "the next episode ( → )" }, "→")),
    h("div", { class: "two" },
      h("div", {}, facts(one, low, high), conversation(one, run), tokens(one, run), extras(one)),
      h("aside", {}, h("section", { class: "card" }, h("h2", {}, `${many(one.peers.length, "attempt")} at this problem`), one.peers.map((peer) => attempt(peer, peer.row === one.row, low, high, link("episode", [run, kind, step, String(peer.row)]))),
        h("a", { class: "pad", href: link("episodes", [run], { uid: one.uid }) }, "This problem in all steps →")))));
  return keys;
}

function facts(one, low, high) {
  const pairs = [["reward", h("span", { class: "reward", vars: rewardVars(one.reward, low, high) }, number(one.reward))]];
  const parts = Object.keys(one.reward_parts).length ? one.reward_parts : one.env_rewards;
  if (Object.keys(parts).length > 1 || Object.values(parts).some((v) => v !== one.reward)) for (const [name, value] of Object.entries(parts)) pairs.push([plain(name), number(value)]);
  if (one.advantage !== null) pairs.push(["advantage", h("span", { title: `${one.advantage_kind} of its group's rewards` }, number(one.advantage, 3))]);
  pairs.push(["ended by", words(one.stop_reason)], ["sampled", `${number(one.tokens.sampled.filter(Boolean).length)} tokens`]);
  if (one.num_turns > 1) pairs.push(["turns", `${one.num_turns}, ${one.tokens.starts.length ? "each behind its own prompt" : "each behind all before it"}`]);
  if (one.answer) pairs.push(["expected", h("code", {}, visible(one.answer))]);
  if (one.outcome_text) pairs.push(["outcome", one.masked ? "carries no loss: its environment failed" : one.outcome_text]);
  const errors = [one.env_error, one.reward_error].filter(Boolean);
  return h("section", { class: "card" }, h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))), errors.map((e) => h("pre", { class: "warn" }, visible(e))));
}

const ROLES = ["system", "user", "assistant", "tool"];
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? "", null, 1));

function conversation(one, run) {
  return h("section", { class: "card chat" }, h("h2", {}, "Conversation"), one.conversation.map((message) => {
    const text = asText(message.text ?? message.content), calls = message.calls || [];
    return h("div", { class: `message ${ROLES.includes(message.role) ? message.role : ""} ${message.sampled ? "sampled" : ""}` },
      h("span", { class: "role" }, plain(message.result_of ? `result of ${message.result_of}` : String(message.role))),
      (message.images || []).map((name) => h("img", { src: `/api/image?${new URLSearchParams({ run, name })}`, alt: `image ${plain(String(name))}`, title: String(name) })),
      (text.trim() || !calls.length) && h("pre", { dir: "auto" }, visible(text)),
      calls.map(call));
  }));
}

function call(one) {
  return h("div", { class: "call" }, h("span", { class: "role" }, one.bad ? "call that cannot be read" : "call"),
    one.bad ? h("span", { class: "warn" }, visible(one.bad)) : h("code", {}, visible(one.name)),
    h("dl", {}, Object.entries(one.arguments).map(([name, value]) => [name && h("dt", {}, visible(name)), h("dd", {}, h("pre", { dir: "auto" }, visible(asText(value))))])));
}

function tokens(one, run) {
  const t = one.tokens, has = (name) => t[name]?.some((v, i) => t.sampled[i] && v !== null && (name !== "penalty" || v !== 0));
  const there = Object.keys(PAINTS).filter(has), box = h("div", { class: "tokens" }), readout = h("div", { class: "readout dim" }), note = h("span", { class: "scale dim" });
  if (!there.length) return h("section", { class: "card" }, h("h2", {}, "Tokens"), h("p", { class: "dim pad" }, "Nothing was sampled."));
  if (!there.includes(paint)) paint = there[0];
  const first = Math.max(0, t.sampled.indexOf(true)), text = (i) => (t.text ? t.text[i] : `${t.id[i]} `);
  const extreme = (name) => Math.max(1e-9, ...t.id.map((_, i) => (t.sampled[i] && t[name] ? Math.abs((t[name][i] ?? 0) - (name === "ratio" ? 1 : 0)) : 0)));
  const versions = [...new Set(t.version.filter((_, i) => t.sampled[i]))];
  const span = (i) => h("span", { class: t.sampled[i] ? "token" : "token read", "data-i": i }, visible(text(i).replaceAll("\n", "⏎\n")));
  const spans = t.id.slice(first).map((_, k) => span(first + k));
  const opening = h("details", {}, h("summary", {}, `${number(first)} tokens of the prompt`), h("div", { class: "tokens" }));
  opening.addEventListener("toggle", () => { const inside = opening.lastChild; if (!inside.childNodes.length) inside.append(...t.id.slice(0, first).map((_, i) => span(i))); }, { once: true });

  function shade(value, most) {
    if (value === null || value === undefined) return [28, 0];
    if (paint === "logprob") return [28, 1 - Math.exp(Math.min(0, value))];
    if (paint === "version") return [(210 + 77 * versions.indexOf(value)) % 360, 0.45];
    const signed = paint === "ratio" ? value - 1 : value;
    return [signed < 0 || paint === "penalty" ? 8 : 215, Math.abs(signed) / most];
  }

  // The colours of some values, each with its name.
  function scale(most) {
    if (paint === "logprob") return [1, 0.9, 0.5, 0.1, 0.01].map((p) => [Math.log(p), `p ${p}`]);
    const values = { version: versions.slice(0, 8), penalty: [0, most], ratio: [1 - most, 1, 1 + most], advantage: [-most, 0, most] }[paint];
    return values.map((value) => [value, number(value, 3)]).filter(([, name], i, all) => all.findIndex((one) => one[1] === name) === i);
  }

  function color() {
    const most = paint === "logprob" || paint === "version" ? 1 : extreme(paint);
    const dye = (element, value) => {
      const [hue, share] = shade(value, most);
      element.style.setProperty("--hue", String(hue));
      element.style.setProperty("--share", `${Math.round(85 * share)}%`);
      return element;
    };
    for (const element of spans) {
      const i = Number(element.dataset.i);
      dye(element, t.sampled[i] ? t[paint]?.[i] : null).classList.toggle("clipped", paint === "ratio" && Boolean(t.clipped?.[i]));
    }
    fill(note, PAINTS[paint].note, scale(most).map(([value, name]) => dye(h("i", { class: "swatch" }, name), value)));
  }

  function read(event) {
    const i = Number(event.target.closest?.("[data-i]")?.dataset.i ?? NaN);
    if (Number.isNaN(i)) return;
    const parts = [`position ${i}`, `token ${t.id[i]}`];
    if (t.sampled[i]) {
      parts.push(`log-prob ${number(t.logprob[i])} (p ${number(Math.exp(t.logprob[i]), 3)})`, `weights ${t.version[i]}`);
      for (const name of ["advantage", "ratio", "weight"]) if (t[name] && t[name][i] !== null) parts.push(`${name} ${number(t[name][i])}`);
      if (t.clipped?.[i]) parts.push("clipped");
      if (t.masked?.[i]) parts.push(`no loss: ${plain(t.masked[i])}`);
      if (t.penalty[i]) parts.push(`penalty ${number(t.penalty[i])}`);
    } else parts.push("read, not sampled");
    fill(readout, h("code", {}, visible(JSON.stringify(text(i)))), ` ${parts.join(" · ")}`);
  }
  box.addEventListener("mouseover", read);
  box.addEventListener("click", read);
  const choices = there.map((name) => h("button", { class: name === paint ? "on" : "", onclick: (e) => { paint = name; e.target.parentElement.querySelectorAll("button").forEach((b) => b.classList.toggle("on", b === e.target)); color(); } }, PAINTS[name].title));
  color();
  fill(readout, "point at a token for its values");
  const command = ["tandem", "why", run, "--episode", `${one.step}:${one.uid}:${one.sample_index}`, "--json", `${run}/why/${one.key}.json`].map(quoted).join(" ");
  return h("section", { class: "card" }, h("div", { class: "bar" }, h("h2", {}, "Tokens"), h("span", { class: "choice" }, choices), note), opening, fill(box, spans.flatMap((one, k) => (t.starts.includes(first + k) ? [h("hr", { title: "the next turn, and its prompt" }), one] : [one]))), readout,
    one.kind === "train" && !t.ratio && h("details", { class: "dim" }, h("summary", {}, t.advantage ? "ratio of each token" : "ratio and advantage of each token"), h("p", {}, "A replay of the step has more, in the folder of runs; then this page shows it:"), h("pre", {}, plain(command))));
}

function extras(one) {
  const blocks = [["Tools that it was shown", one.tools], ["Metadata of the problem", one.metadata]].filter(([, value]) => Object.keys(value).length);
  return blocks.map(([title, value]) => h("details", { class: "card" }, h("summary", {}, title), h("pre", {}, visible(JSON.stringify(value, null, 1)))));
}

function attempt(peer, own, low, high, href) {
  return h("a", { class: `peer ${own ? "own" : ""}`, href }, h("span", { class: "reward", vars: rewardVars(peer.reward, low, high) }, number(peer.reward, 3)),
    h("span", {}, h("small", { class: "dim" }, `#${peer.sample} · ${number(peer.tokens)} tokens · ${words(peer.stop)}`), h("span", { class: "said" }, visible(peer.text.slice(0, 400) || peer.error || "(nothing)"))));
}
