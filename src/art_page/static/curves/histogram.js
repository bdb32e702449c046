/**
 * Metrics that count values in bins, drawn as histograms: `NAME/0`, `NAME/1` ... of a name that ends in `_hist` are one metric `NAME`, whose
 * bins have equal widths. A column of the upper picture is a step, its darkness the share of values; the bars below are one step.
 */
import { h, replace, svg } from "../lib/dom.js";
import { formatCount, formatNumber, formatPercent } from "../lib/format.js";
import { saveMenu } from "../chart/save_chart.js";

/** @typedef {import("./lines.js").Series} Series */

const BIN = /^(.+_hist)\/\d+$/;
const [WIDTH, MAP_HEIGHT, BARS_HEIGHT] = [480, 96, 80];

/**
 * Names of the bins of a histogram, lowest first; empty for another metric.
 * @param {string} metric
 * @param {Set<string>} known
 */
export function histogramOf(metric, known) {
  if (!metric.endsWith("_hist")) return [];
  const bins = [];
  while (known.has(`${metric}/${bins.length}`)) bins.push(`${metric}/${bins.length}`);
  return bins;
}

/**
 * The metrics of a run with one for each histogram in place of its bins.
 * @template {{name: string}} Metric
 * @param {Metric[]} metrics
 * @returns {Metric[]}
 */
export function withHistograms(metrics) {
  /** @type {Set<string>} */
  const seen = new Set();
  return metrics.flatMap((metric) => {
    const name = BIN.exec(metric.name)?.[1];
    if (name === undefined) return [metric];
    if (seen.has(name)) return [];
    seen.add(name);
    return [{ ...metric, name }];
  });
}

export class Histogram {
  /**
   * @param {string} metric
   * @param {string[]} bins  names of the metrics that count
   * @param {import("../lib/dom.js").Child} tools
   */
  constructor(metric, bins, tools) {
    this.metric = metric;
    this.bins = bins;
    /** @type {number[]} */
    this.steps = [];
    /** @type {number[][]} counts of each step, by bin */
    this.counts = [];
    /** @type {number | null} place of the step whose bars are shown; null for the newest */
    this.place = null;
    this.words = h("p", { class: "chart-legend" });
    this.map = svg("svg", { class: "histogram-map", viewBox: `0 0 ${WIDTH} ${MAP_HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.bars = svg("svg", { class: "histogram-bars", viewBox: `0 0 ${WIDTH} ${BARS_HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.slider = h("input", { type: "range", min: 0, max: 0, value: "0", "aria-label": `Step of ${metric}`, "on:input": () => this.show(Number(this.slider.value)) });
    this.map.addEventListener("pointermove", (event) => {
      const { left, width } = this.map.getBoundingClientRect();
      this.show(Math.min(this.steps.length - 1, Math.max(0, Math.floor(((event.clientX - left) / width) * this.steps.length))));
    });
    const save = saveMenu({ name: () => metric, picture: () => this.picture(), table: () => this.table() });
    this.element = h("figure", { class: "chart histogram" }, h("div", { class: "chart-title" }, h("h3", { title: "One column for each step, lowest values at the bottom; darker is more" }, metric), this.words), this.map, this.slider, this.bars, h("div", { class: "chart-tools" }, tools, save));
  }

  /** @param {{series: Map<string, Series>[]}} changes */
  update({ series }) {
    const lists = this.bins.map((bin) => series[0]?.get(bin));
    const first = lists[0];
    this.steps = first?.steps ?? [];
    this.counts = this.steps.map((_, at) => lists.map((list) => list?.mean[at] ?? 0));
    this.slider.max = String(Math.max(0, this.steps.length - 1));
    const width = WIDTH / Math.max(1, this.steps.length);
    const height = MAP_HEIGHT / this.bins.length;
    replace(this.map, this.counts.flatMap((counts, at) => {
      const total = counts.reduce((sum, count) => sum + count, 0);
      return counts.map((count, bin) => (count > 0 ? svg("rect", { x: at * width, y: MAP_HEIGHT - (bin + 1) * height, width: width + 0.2, height, class: "histogram-cell", "fill-opacity": 0.1 + (0.9 * count) / total }) : null));
    }));
    this.map.setAttribute("aria-label", `${this.metric} over ${this.steps.length} steps`);
    this.show(this.place);
  }

  /** @param {number | null} place */
  show(place) {
    this.place = place !== null && place < this.steps.length - 1 ? place : null;
    const at = this.place ?? this.steps.length - 1;
    this.slider.value = String(at);
    const counts = this.counts[at] ?? [];
    const [total, most] = [counts.reduce((sum, count) => sum + count, 0), Math.max(1, ...counts)];
    const width = WIDTH / Math.max(1, counts.length);
    replace(this.bars, counts.map((count, bin) => svg("rect", { x: bin * width + 1, y: BARS_HEIGHT * (1 - count / most), width: width - 2, height: (BARS_HEIGHT * count) / most, class: "histogram-cell" }, svg("title", null, `bin ${bin + 1} of ${counts.length}: ${formatNumber(count)}`))));
    const text = counts.length === 0 ? "No values yet." : `step ${this.steps[at]}: ${formatCount(total)} values, ${formatPercent(counts[counts.length - 1] / (total || 1))} in the highest of ${counts.length} bins, ${formatPercent(counts[0] / (total || 1))} in the lowest`;
    this.words.textContent = text;
    this.bars.setAttribute("aria-label", `${this.metric}, ${text}`);
  }

  table() {
    return ["step,bin,count", ...this.counts.flatMap((counts, at) => counts.map((count, bin) => `${this.steps[at]},${bin},${count}`)), ""].join("\n");
  }

  /** Both pictures below each other, on white paper. */
  picture() {
    const parts = /** @type {[SVGSVGElement, number, number][]} */ ([[this.map, 40, MAP_HEIGHT], [this.bars, 48 + MAP_HEIGHT, BARS_HEIGHT]]).map(([drawn, top, height]) => svg("svg", { x: 8, y: top, width: WIDTH, height }, [...drawn.cloneNode(true).childNodes]));
    return svg("svg", { xmlns: "http://www.w3.org/2000/svg", width: WIDTH + 16, height: 56 + MAP_HEIGHT + BARS_HEIGHT, fill: "#0b5cad", "font-family": "system-ui, sans-serif" },
      svg("rect", { width: "100%", height: "100%", fill: "#ffffff" }), svg("text", { x: 8, y: 16, "font-size": 13, fill: "#1a1d21" }, this.metric), svg("text", { x: 8, y: 32, "font-size": 11, fill: "#59616d" }, this.words.textContent), parts);
  }

  /** @param {number | null} step */
  light(step) {
    const at = step === null ? -1 : this.steps.indexOf(step);
    if (at >= 0) this.show(at);
  }

  destroy() {}
}
