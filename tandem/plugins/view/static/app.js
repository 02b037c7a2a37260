// The frame: which page the address means, the keyboard, the theme and the news.
//
// A page is a function (main, parts, params) -> { keys, news }: keys by name, and what to do when
// the server has news of some runs. Addresses are stable: #/episode/demo%2Ftrain/train/12/17

import { link, listen } from "./api.js";
import { fill, h } from "./dom.js";
import { curves } from "./curves.js";
import { diff } from "./diff.js";
import { episode } from "./episode.js";
import { episodes } from "./episodes.js";
import { runs } from "./runs.js";
import { step } from "./step.js";

const PAGES = { "": runs, curves, episodes, episode, step, diff };
const main = document.getElementById("main");
let page = {}, turn = 0;

async function show() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...parts] = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const params = new URLSearchParams(query || "");
  const own = ++turn, box = h("div", { class: "page" });
  page.close?.();
  page = {};
  navigation(name, parts);
  try {
    const opened = await (Object.hasOwn(PAGES, name) ? PAGES[name] : unknown)(box, parts, params);
    if (own !== turn) return opened?.close?.();
    page = opened || {};
  } catch (error) {
    if (own !== turn) return;
    fill(box, h("div", { class: "card problem" }, h("h1", {}, "This cannot be shown"), h("pre", {}, error.message), h("a", { href: "#/" }, "all runs")));
  }
  fill(main, box);
  page.shown?.();
  document.title = `${[name || "runs", ...parts].join(" ")} - Tandem`;
  if (!page.keepScroll) scrollTo(0, 0);
}

function unknown() { throw new Error("there is no such page"); }

function navigation(name, parts) {
  const run = (name === "" || !parts[0]) ? null : parts[0].split(",")[0];
  const tab = (page, text, href) => h("a", { href, class: name === page ? "here" : "", "aria-current": name === page ? "page" : null }, text);
  fill(document.getElementById("nav"),
    tab("", "Runs", "#/"),
    run && tab("curves", "Curves", link("curves", [name === "curves" ? parts[0] : run])),
    run && tab(name === "episode" ? "episode" : "episodes", "Episodes", link("episodes", [run])),
    run && tab("step", "Step", link("step", [run, name === "step" ? parts[1] || "" : name === "episode" ? parts[2] : ""])),
    run && tab("diff", "Diff", link("diff", [run])));
  fill(document.getElementById("crumb"), run && (name === "diff" ? parts.join(" · ") : name === "curves" ? parts[0].replaceAll(",", " · ") : run));
}

const HINT = "j/k or arrows: move · Enter: open · ←/→: before and after · /: search · x: choose · g: runs · Esc: leave a field";

addEventListener("keydown", (event) => {
  const field = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") { field?.blur(); document.getElementById("hint").classList.remove("on"); return; }
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  const name = { ArrowDown: "j", ArrowUp: "k", ArrowLeft: "left", ArrowRight: "right", Enter: "enter" }[event.key] || event.key;
  if (name === "enter" && event.target.closest?.("a, button, summary")) return;
  if (name === "/") {
    const box = document.querySelector("input[type=search]");
    if (box) { event.preventDefault(); box.focus(); box.select(); }
  } else if (name === "g") location.hash = "#/";
  else if (name === "?") { const hint = document.getElementById("hint"); hint.textContent = HINT; hint.classList.toggle("on"); }
  else if (page.keys?.[name]) { event.preventDefault(); page.keys[name](); }
});

const root = document.documentElement;
function setTheme(theme) {
  if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  dispatchEvent(new Event("theme"));
}
setTheme(localStorage.getItem("theme"));
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("theme", dark ? "light" : "dark");
  setTheme(dark ? "light" : "dark");
});

addEventListener("hashchange", show);
listen((names) => page.news?.(names), (on) => document.getElementById("live").classList.toggle("on", on));
show();
