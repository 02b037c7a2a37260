// Two runs: the first step, episode and token where they part.

import { get, link } from "./api.js";
import { fill, h, plain, table, visible } from "./dom.js";

export async function diff(main, [a, b]) {
  const { runs } = await get("runs"), result = h("div", {});
  const select = (own, put) => h("select", { "aria-label": "run", onchange: (e) => { location.hash = put(e.target.value); } }, h("option", { value: "" }, "choose a run"), runs.map((run) => h("option", { value: run.name, selected: run.name === own }, run.name)));
  fill(main, h("h1", {}, "Diff"), h("div", { class: "bar" }, h("b", {}, "A"), select(a, (x) => link("diff", [x, b].filter(Boolean))), h("b", {}, "B"), select(b, (x) => link("diff", [a, x])),
    b && h("a", { class: "button", href: link("curves", [[a, b].join(",")]) }, "Curves of both")), result);
  if (!(a && b)) {
    fill(result, h("p", { class: "dim pad" }, "Choose two runs: episodes, metrics and weights of their common steps are compared, to the last bit."));
    return {};
  }
  let shown = "", over = false, timer = 0, after = 0, busy = false, again = false;
  const soon = () => { timer = setTimeout(compare, Math.max(0, after - performance.now())); };
  async function compare() {
    timer = 0;
    busy = true;
    again = false;
    const began = performance.now();
    let text = "", nodes = null;
    try {
      const found = await get("diff", { run: [a, b] });
      [text, nodes] = [JSON.stringify(found), () => told(found)];
    } catch (error) { [text, nodes] = [error.message, () => h("div", { class: "card problem" }, h("pre", {}, error.message))]; }
    after = performance.now() + 5 * (performance.now() - began); // comparing long runs takes its time
    busy = false;
    if (over) return;
    if (again) soon();
    if (text !== shown) fill(result, nodes());
    shown = text;
  }
  fill(result, h("p", { class: "dim pad" }, "Comparing ..."));
  compare();
  const news = (names) => {
    if (!names.has(a) && !names.has(b)) return;
    if (busy) again = true; else if (!timer) soon();
  };
  return { news, close: () => { over = true; clearTimeout(timer); } };
}

function told(found) {
  const one = found.divergence;
  const side = (name, value) => h("div", {}, h("b", {}, name), h("pre", {}, visible(value)));
  const list = (title, rows) => rows.length > 0 && h("section", { class: "card" }, h("h2", {}, `${title}: ${rows.length} differ`), table(["", "A", "B"], rows.map((row) => [plain(row.what), visible(row.a), visible(row.b)])));
  const unsure = found.altered.length > 0;
  const heading = one ? `They part ${found.step ? `at step ${found.step}` : "before the first step"}` : unsure ? `Not known to be equal over ${found.steps} steps` : `Equal to the last bit over ${found.steps} steps`;
  return [
    h("section", { class: `card ${one || unsure ? "" : "good"}` }, h("h2", {}, heading), one && h("p", {}, visible(one.what)), one && h("div", { class: "sides" }, side("A", one.a), side("B", one.b)),
      one && found.step > 0 && h("p", {}, h("a", { href: link("step", [found.a, String(found.step)]) }, "the step in A"), " · ", h("a", { href: link("step", [found.b, String(found.step)]) }, "in B")),
      h("p", { class: "dim" }, `A has ${found.last[0]} steps, B ${found.last[1]}.`)),
    found.altered.length > 0 && h("section", { class: "card problem" }, h("h2", {}, "Not as they were written"), found.altered.map(([name, file]) => h("p", {}, `${name}: ${plain(file.what)}`))),
    list("Configuration", found.config), list("Inputs", found.inputs),
  ];
}
