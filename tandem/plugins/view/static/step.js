// One step: what it trained on, what was left out and why, its numbers, its seconds.

import { get, link } from "./api.js";
import { COLORS } from "./chart.js";
import { chip, fill, h, many, number, plain, rewardVars, visible, words } from "./dom.js";

const STAGES = ["rollout_s", "reward_s", "wait_s", "check_s", "journal_s", "learn_s", "sync_s", "apply_s", "eval_s"];

export async function step(main, [run, wanted]) {
  let place = wanted;
  if (!place) {
    const { runs } = await get("runs");
    place = String(runs.find((one) => one.name === run)?.step ?? 1);
  }
  let one = null, shown = "", over = false;
  const bar = h("div", { class: "bar" }), body = h("div", {});
  const go = (to) => { if (to >= one.first && to <= one.last) location.hash = link("step", [run, String(to)]); };
  const keys = { left: () => go(one.step - 1), right: () => go(one.step + 1), j: () => go(one.step + 1), k: () => go(one.step - 1) };

  async function load() {
    const found = await get("step", { run, step: place });
    if (over) return;
    one = found;
    fill(bar, h("h1", {}, `Step ${one.step}`), h("span", { class: "dim" }, `of ${one.last}`), h("span", { class: "grow" }),
      h("button", { onclick: keys.left, disabled: one.step <= one.first, title: "the step before ( ← )" }, "←"), h("button", { onclick: keys.right, disabled: one.step >= one.last, title: "the next step ( → )" }, "→"));
    const text = JSON.stringify({ ...one, last: 0 });
    if (text === shown) return; // the same step of a longer run: what is being read stays where it is
    shown = text;
    const train = one.groups.filter((g) => g.kind === "train"), held = one.groups.filter((g) => g.kind !== "train");
    fill(body,
      one.damaged && h("div", { class: "card problem" }, h("pre", {}, visible(one.damaged))), account(one, train), seconds(one.numbers), numbers(one),
      train.length > 0 && groups("What it sampled", run, one, train),
      held.length > 0 && groups("Its evaluation", run, one, held));
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
  const lines = Object.entries(counts).map(([outcome, count]) => `${many(count, "group")} ${one.outcomes[outcome] || words(outcome)}`);
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
  const settings = Object.entries(one.settings).map(([k, v]) => h("span", { class: "setting" }, `${k} `, h("b", {}, String(v))));
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

function groups(title, run, one, all) {
  const rewards = all.flatMap((g) => g.attempts.map((a) => a.reward)), low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const mean = (g) => g.attempts.reduce((sum, a) => sum + a.reward, 0) / g.attempts.length;
  return h("section", { class: "card" }, h("h2", {}, `${title}: ${many(all.length, "group")}`), all.map((g) => h("div", { class: "group" },
    h("div", {}, h("b", {}, plain(g.uid)), " ", g.kind === "train" ? chip(g.outcome === "train" ? "trained" : g.outcome, g.outcome === "train" ? "finished" : "warn") : chip(g.kind.replace("eval_", ""), "info"), h("span", { class: "dim" }, ` mean ${number(mean(g), 3)}`), h("div", { class: "asked dim" }, visible(g.prompt.slice(-160).replace(/\s+/g, " ")))),
    h("div", { class: "squares" }, g.attempts.map((a) => h("a", { class: `square ${a.masked || a.error ? "bad" : ""}`, vars: rewardVars(a.reward, low, high), href: link("episode", [run, g.kind, String(one.step), String(a.row)]), title: plain(`#${a.sample}: reward ${number(a.reward)},${a.advantage === null ? "" : ` advantage ${number(a.advantage, 3)},`} ${a.tokens} tokens, ended by ${words(a.stop)}${a.error ? `, ${a.error}` : ""}\n${a.snippet}`) }, number(a.reward, 2), a.advantage !== null && h("small", {}, `${a.advantage > 0 ? "+" : ""}${number(a.advantage, 2)}`)))))),
    all.some((g) => g.attempts.some((a) => a.advantage !== null)) && h("p", { class: "dim pad" }, "A square has the reward of an attempt, and under it its advantage."));
}
