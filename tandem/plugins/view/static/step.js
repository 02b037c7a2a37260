// One step: what it trained on, what was left out and why, its numbers, its seconds.

import { get, link } from "./api.js";
import { COLORS } from "./chart.js";
import { chip, fill, h, histogram, many, number, plain, rewardVars, visible, words } from "./dom.js";

const narrowed = { "with signal only": false, "changed only": true };
let base = null; // the step that an evaluation is compared with
// Whether the advantages of a group move the policy; an advantage that is not known here may.
const signal = (group) => group.attempts.some((a) => a.advantage === null || Math.abs(a.advantage) > 1e-9);
const mean = (group) => group.attempts.reduce((sum, a) => sum + a.reward, 0) / group.attempts.length;
const STAGES = ["rollout_s", "reward_s", "wait_s", "check_s", "journal_s", "learn_s", "sync_s", "apply_s", "eval_s"];

export async function step(main, [run, wanted]) {
  let place = wanted;
  if (!place) {
    const { runs } = await get("runs");
    place = String(runs.find((one) => one.name === run)?.step ?? 1);
  }
  let one = null, shown = "", over = false, evaluated = [];
  const bar = h("div", { class: "bar" }), body = h("div", {});
  const go = (to) => { if (to >= one.first && to <= one.last) location.hash = link("step", [run, String(to)]); };
  const keys = { left: () => go(one.step - 1), right: () => go(one.step + 1), j: () => go(one.step + 1), k: () => go(one.step - 1) };

  async function load() {
    const keys = ["eval/sampled", "eval/greedy"], found = await get("step", { run, step: place });
    const { series } = (await get("series", { run, key: keys, points: 20000 }))[run];
    evaluated = [...new Set(Object.values(series).flatMap((s) => s.x))].sort((a, b) => a - b);
    const earlier = evaluated.filter((n) => n < found.step);
    if (!earlier.includes(base)) base = earlier[0] ?? null;
    const compared = found.groups.some((g) => g.kind !== "train") && base !== null ? await get("step", { run, step: base }) : { groups: [] };
    if (over) return;
    one = found;
    fill(bar, h("h1", {}, `Step ${one.step}`), h("span", { class: "dim" }, `of ${one.last}`), h("span", { class: "grow" }),
      evaluated.length > 0 && steps(evaluated, evaluated.includes(one.step) ? one.step : "", go),
      h("button", { onclick: keys.left, disabled: one.step <= one.first, title: "the step before ( ← )" }, "←"), h("button", { onclick: keys.right, disabled: one.step >= one.last, title: "the next step ( → )" }, "→"));
    const text = JSON.stringify([{ ...one, last: 0 }, base]);
    if (text === shown) return; // the same step of a longer run: what is being read stays where it is
    shown = text;
    const train = one.groups.filter((g) => g.kind === "train"), evaluation = one.groups.filter((g) => g.kind !== "train"), attempts = train.flatMap((g) => g.attempts);
    fill(body,
      one.damaged && h("div", { class: "card problem" }, h("pre", {}, visible(one.damaged))), account(one, train), seconds(one.numbers),
      attempts.length > 1 && h("section", { class: "card bar spread" }, histogram("Rewards of its episodes", attempts.map((a) => a.reward)), histogram("Tokens of its episodes", attempts.map((a) => a.tokens))),
      numbers(one),
      train.length > 0 && groups(h("h2", {}, `What it sampled: ${many(train.length, "group")}`), run, one.step, train, attempts.some((a) => a.advantage !== null) && "with signal only", signal),
      evaluation.length > 0 && held(evaluation, compared.groups));
  }

  const steps = (all, own, chosen) => h("select", { "aria-label": "evaluation", onchange: (e) => chosen(Number(e.target.value)) },
    own === "" && h("option", { value: "" }, "evaluations"), all.map((n) => h("option", { value: n, selected: n === own }, `evaluation ${n}`)));

  // The evaluation, beside that of another step: what was learned since, and what was lost.
  function held(evaluation, others) {
    const key = (g) => `${g.kind} ${g.uid}`, before = new Map(others.filter((g) => g.kind !== "train").map((g) => [key(g), g]));
    const change = (g) => (before.has(key(g)) ? mean(g) - mean(before.get(key(g))) : 0), kinds = [...new Set(evaluation.map((g) => g.kind))];
    const told = (kind) => { const all = evaluation.filter((g) => g.kind === kind).map(change); return `${words(kind.replace("eval_", ""))}: ${all.filter((by) => by > 0).length} learned, ${all.filter((by) => by < 0).length} lost, ${all.filter((by) => by === 0).length} as before`; };
    const heading = [h("h2", {}, `Its evaluation: ${many(evaluation.length, "group")}`), base !== null && h("label", { class: "dim" }, "compared with ", steps(evaluated.filter((n) => n < one.step), base, (to) => { base = to; load(); })), before.size > 0 && h("span", { class: "dim" }, kinds.map(told).join("; "))];
    const sorted = evaluation.map((g) => ({ ...g, before: before.get(key(g)), change: change(g) })).sort((a, b) => a.change - b.change);
    return groups(heading, run, one.step, sorted, before.size > 0 && "changed only", (g) => g.change !== 0, base);
  }

  await load();
  fill(main, bar, body);
  return { keys, news: (names) => names.has(run) && load(), close: () => { over = true; } };
}

// The terms of the loss, each as a mean over loss tokens; rl.aggregation and corrections weigh them otherwise.
function loss({ policy_loss, reference_kl, entropy, correction }, settings) {
  if (policy_loss === undefined) return null;
  const terms = [`policy loss ${number(policy_loss)}`], weight = settings["rl.kl_coef"], bonus = settings["rl.entropy_coef"];
  let sum = policy_loss, note = "";
  if (weight && reference_kl !== undefined && settings["rl.kl_in"] === "loss") { terms.push(` + ${number(weight)} × KL ${number(reference_kl)}`); sum += weight * reference_kl; }
  else if (weight && reference_kl !== undefined) note = `; KL ${number(reference_kl)} × ${number(weight)} was taken off the rewards`;
  if (bonus && entropy !== undefined) { terms.push(` - ${number(bonus)} × entropy ${number(entropy)}`); sum -= bonus * entropy; }
  if (correction !== undefined && correction !== 1) note += `; tokens were weighed by corrections, ${number(correction)} in the mean`;
  if (settings["rl.aggregation"] !== "token_mean") note += `; the update weighs tokens by rl.aggregation = ${settings["rl.aggregation"]}`;
  return `in the mean of loss tokens: ${terms.join("")}${terms.length > 1 ? ` = ${number(sum)}` : ""}${note}`;
}

function account(one, train) {
  const counts = {};
  for (const group of train) counts[group.outcome] = (counts[group.outcome] || 0) + 1;
  const attempts = train.flatMap((g) => (g.outcome === "train" ? g.attempts : []));
  const trained = train.filter((g) => g.outcome === "train"), moving = trained.filter(signal).length;
  const lines = Object.entries(counts).map(([outcome, count]) => `${many(count, "group")} ${one.outcomes[outcome] || words(outcome)}`);
  if (moving < trained.length) lines.push(`${number(moving)} of them carry a signal; in the other ${number(trained.length - moving)} every advantage is 0, which adds nothing to the policy loss`);
  const masked = attempts.filter((a) => a.masked).length, failed = attempts.filter((a) => a.error).length;
  if (attempts.length) lines.push(`${many(attempts.length, "episode")} and ${many(one.numbers.num_loss_tokens ?? attempts.reduce((sum, a) => sum + a.tokens, 0), "loss token")} went into the update`);
  for (const [version, count] of Object.entries(one.versions)) {
    const late = one.step - 1 - Number(version);
    lines.push(`${many(count, "token")} sampled by weights ${version}: ${late ? `${many(late, "step")} stale` : "fresh"}`);
  }
  if (one.numbers.masked_sequences) lines.push(`${many(one.numbers.masked_sequences, "sequence")} masked: too far from the weights that sampled them`);
  if (masked) lines.push(`${many(masked, "episode")} without loss, as the environment failed`);
  if (failed) lines.push(`${many(failed, "episode")} with an error`);
  const terms = loss(one.numbers, one.settings);
  if (terms) lines.push(terms);
  if (one.numbers.skipped_updates) lines.push(`${many(one.numbers.skipped_updates, "update")} skipped: not finite`);
  const settings = Object.entries(train.length ? one.settings : {}).map(([k, v]) => h("span", { class: "setting" }, `${k} `, h("b", {}, String(v))));
  return (lines.length > 0 || settings.length > 0) && h("section", { class: "card" }, h("h2", {}, "What it trained on"), h("ul", {}, lines.map((line) => h("li", {}, line))), h("p", { class: "settings dim" }, settings));
}

function seconds(all) {
  const parts = STAGES.map((name) => [name, all[`timings/${name}`] || 0]).filter(([, v]) => v > 0.001).map(([name, v], i) => [name, v, COLORS[i % COLORS.length]]);
  const total = parts.reduce((sum, [, v]) => sum + v, 0);
  const whole = all["timings/step_s"] ?? total, overlap = total - (all["timings/eval_s"] || 0) > 1.05 * whole;
  return total > 0 && h("section", { class: "card" }, h("h2", {}, `Seconds: ${number(whole, 3)}${overlap ? "; stages overlap, as rollouts run ahead" : ""}`),
    h("div", { class: "stack" }, parts.map(([name, v, color]) => h("i", { title: `${name} ${number(v, 3)}`, vars: { "--share": String(v / total), "--color": color } }))),
    h("p", { class: "legend" }, parts.map(([name, v, color]) => h("span", { vars: { "--color": color } }, h("i", {}), `${name.replace("_s", "")} ${number(v, 3)}`))));
}

function numbers(one) {
  const last = (n) => Number(n.startsWith("eval/"));
  const names = Object.keys(one.numbers).filter((n) => !n.startsWith("timings/")).sort((a, b) => last(a) - last(b));
  return names.length > 0 && h("details", { class: "card", open: true }, h("summary", {}, `${names.length} numbers`), h("dl", { class: "facts small" }, names.map((n) => h("div", {}, h("dt", { title: n }, plain(n)), h("dd", {}, number(one.numbers[n]))))));
}

// Groups with the rewards of their attempts; a box shows only those that `keep` keeps.
function groups(heading, run, step, all, only, keep, earlier) {
  const rewards = all.flatMap((g) => [g, g.before].filter(Boolean).flatMap((one) => one.attempts.map((a) => a.reward))), low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const squares = (g, at) => h("span", { class: "squares" }, g.attempts.map((a) => h("a", { class: `square ${a.masked || a.error ? "bad" : ""}`, vars: rewardVars(a.reward, low, high), href: link("episode", [run, g.kind, String(at), String(a.row)]), title: plain(`#${a.sample}: reward ${number(a.reward)},${a.advantage === null ? "" : ` advantage ${number(a.advantage, 3)},`} ${a.tokens} tokens, ended by ${words(a.stop)}${a.error ? `, ${a.error}` : ""}\n${a.snippet}`) }, number(a.reward, 2), a.advantage !== null && h("small", {}, `${a.advantage > 0 ? "+" : ""}${number(a.advantage, 2)}`))));
  const mark = (g) => {
    if (g.kind !== "train") return [chip(g.kind.replace("eval_", ""), "info"), g.change > 0 && [" ", chip("learned", "good")], g.change < 0 && [" ", chip("lost", "bad")]];
    return g.outcome !== "train" ? chip(g.outcome, "warn") : signal(g) ? chip("trained", "finished") : chip("advantage 0");
  };
  const rows = all.map((g) => h("div", { class: "group" },
    h("div", {}, h("b", {}, plain(g.uid)), " ", mark(g), h("span", { class: "dim" }, ` mean ${g.before ? `${number(mean(g.before), 3)} → ` : ""}${number(mean(g), 3)}`), g.answer && h("span", { class: "dim" }, " expected ", h("code", {}, visible(g.answer))), h("div", { class: "asked dim" }, visible(g.prompt.slice(-160).replace(/\s+/g, " ")))),
    h("div", { class: "squares" }, g.before && [squares(g.before, earlier), " → "], squares(g, step))));
  const none = h("p", { class: "dim" }, "None is like that."), narrow = () => { rows.forEach((row, i) => { row.hidden = Boolean(only) && narrowed[only] && !keep(all[i]); }); none.hidden = rows.some((row) => !row.hidden); };
  narrow();
  return h("section", { class: "card" }, h("div", { class: "bar" }, heading, h("span", { class: "grow" }), only && h("label", { class: "dim" }, h("input", { type: "checkbox", checked: narrowed[only], onchange: (e) => { narrowed[only] = e.target.checked; narrow(); } }), ` ${only}`)), rows, none,
    all.some((g) => g.attempts.some((a) => a.advantage !== null)) && h("p", { class: "dim" }, "A square has the reward of an attempt, and under it its advantage."));
}
