// One chart: lines of runs and names over steps, on uPlot. A drag zooms every chart of the page.

import { number } from "./dom.js";

/* global uPlot */
export const COLORS = ["#4c7fe0", "#dd8b1f", "#1fa883", "#c9528b", "#8a6fe0", "#84a030", "#1aa0b8", "#b38020"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Room above and below; a flat line lies in the middle.
function span(u, low, high) {
  if (low === null) return [0, 1];
  const room = high > low ? (high - low) * 0.08 : Math.abs(low) * 0.5 || 1;
  return [low - room, high + room];
}

const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat(); // steps between ticks of steps
const tick = (value) => (Math.abs(value) >= 1000 ? value.toLocaleString("en") : String(Number(value.toPrecision(6))));
// What the legend says: the value under the pointer, else the last one.
function told(u, value, place, at) {
  const shown = at === null || at === undefined ? u.data?.[place]?.findLast((v) => v !== null && v !== undefined) : value;
  return shown === null || shown === undefined ? "" : number(shown);
}

const faint = (color) => `${color}3a`;

function smoothed(values, strength) {
  if (!strength) return values;
  let mean = 0, weight = 0;
  return values.map((v) => { mean = strength * mean + (1 - strength) * v; weight = strength * weight + 1 - strength; return mean / weight; });
}

// lines: [{label, color, dash, x, y, low, high}] -> uPlot's data and series
function prepare(lines, strength) {
  const tables = [], series = [{ label: "step", value: told }], bands = [];
  const add = (x, y, options) => { tables.push([x, y]); series.push({ spanGaps: true, value: told, ...options }); };
  for (const line of lines) {
    if (line.low) {
      const place = series.length;
      const hidden = { stroke: "transparent", class: "u-silent" };
      add(line.x, line.high, { ...hidden, label: `${line.label} high` });
      add(line.x, line.low, { ...hidden, label: `${line.label} low` });
      bands.push({ series: [place, place + 1], fill: `${line.color}26` });
    }
    if (strength) add(line.x, line.y, { stroke: faint(line.color), width: 1, class: "u-silent", label: `${line.label} raw` });
    add(line.x, smoothed(line.y, strength), { stroke: line.color, width: 1.7, dash: line.dash, label: line.label });
  }
  const data = tables.length ? uPlot.join(tables) : [[]];
  for (const one of series.slice(1)) one.points = { show: data[0].length < 40 && one.class !== "u-silent", size: 5, fill: one.stroke };
  return { data, series, bands };
}

export class Chart {
  constructor(box, title, height, onzoom) {
    this.box = box; this.title = title; this.height = height; this.onzoom = onzoom; this.plot = null; this.shape = "";
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: this.height }));
    this.observer.observe(box);
  }

  draw(lines, strength) {
    const { data, series, bands } = prepare(lines, strength);
    const shape = JSON.stringify([series.map((s) => [s.label, s.stroke, s.dash]), css("--dim")]);
    if (this.plot && shape === this.shape) return this.plot.setData(data);
    this.shape = shape;
    this.plot?.destroy();
    const font = "11px system-ui, sans-serif", axis = { stroke: css("--dim"), font, labelFont: font, values: (u, splits) => splits.map(tick), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    const legend = series.filter((s) => s.class !== "u-silent").length;
    this.plot = new uPlot({
      width: this.box.clientWidth || 300, height: this.height, series, bands,
      scales: { x: { time: false }, y: { range: span } },
      axes: [{ ...axis, size: 26, incrs: WHOLE, label: "step", labelSize: 14, labelGap: -2 }, { ...axis, size: 52 }],
      legend: { show: true, live: legend < 12, markers: { dash: (u, i) => (series[i].dash ? "dashed" : "solid") } },
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, bind: { dblclick: () => () => { this.onzoom(null); return null; } } },
      hooks: { setSelect: [(u) => {
        if (u.select.width > 4) this.onzoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }] },
    }, data, this.box);
  }

  destroy() { this.observer.disconnect(); this.plot?.destroy(); }
}
