/** Panes of curves for one run or several: one pane for each metric. */
import { get } from "../lib/api.js";
import { chart } from "../lib/chart.js";
import { categorical, dashOf } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { groupFindings, pinsOf } from "../parts/findings.js";
import { centreOf, coloursOf, formatOf, sameOnSplits, toLine } from "./lines.js";

/**
 * @typedef {import("./curve_settings.js").CurveSettings} CurveSettings
 * @typedef {import("./lines.js").Series} Series
 * @typedef {{metric: string, drawn: import("../lib/chart.js").Chart}} CurvePane
 */

const MAX_METRICS = 64;

export class CurvePanes {
  /**
   * @param {string[]} runs  each "project/name"
   * @param {CurveSettings} settings
   * @param {{signal: AbortSignal, onZoom: (zoom: import("../lib/chart.js").Zoom | null) => void, onStep: (step: number) => void}} options
   */
  constructor(runs, settings, options) {
    this.runs = runs;
    this.settings = settings;
    this.options = options;
    /** @type {any[]} details of the runs, in their order */
    this.details = [];
    /** @type {Map<string, Series>[]} by metric, for each run */
    this.series = runs.map(() => new Map());
    /** @type {CurvePane[]} */
    this.panes = [];
    this.element = h("div", { class: "panes" });
  }

  /** @param {Partial<CurveSettings>} changes */
  change(changes) {
    this.settings = { ...this.settings, ...changes };
  }

  /** @param {any} detail */
  namesOf(detail) {
    return new Set(detail.metrics.map((/** @type {any} */ metric) => metric.name));
  }

  /**
   * Metrics of one pane: the chosen one, and with held-out the same one on the other splits.
   * @param {string} metric
   * @param {any} detail
   */
  metricsOf(metric, detail) {
    const splits = detail.splits.map((/** @type {any} */ one) => one.split);
    return this.settings.heldOut ? sameOnSplits(metric, [...new Set(["train", "val", ...splits])], this.namesOf(detail)) : [metric];
  }

  /**
   * Load the series of what is chosen, then draw. Where the server joined steps, a zoom loads its steps in full.
   * @param {any[]} details
   */
  async load(details) {
    this.details = details;
    const { zoom } = this.settings;
    this.series = await Promise.all(details.map(async (detail, at) => {
      const wanted = [...new Set(this.settings.metrics.flatMap((metric) => this.metricsOf(metric, detail)))];
      const whole = await this.fetch(this.runs[at], wanted, {});
      const isJoined = zoom !== null && whole.some((one) => /** @type {any} */ (one).num_steps !== null);
      return new Map((isJoined ? await this.fetch(this.runs[at], wanted, zoom) : whole).map((one) => [one.metric, one]));
    }));
    this.draw();
  }

  /**
   * @param {string} run
   * @param {string[]} metrics
   * @param {Record<string, number>} bounds
   * @returns {Promise<Series[]>}
   */
  async fetch(run, metrics, bounds) {
    const parts = [];
    for (let at = 0; at < metrics.length; at += MAX_METRICS) parts.push(metrics.slice(at, at + MAX_METRICS));
    const answers = await Promise.all(parts.map((metric) => get(`runs/${run}/series`, { metric, ...bounds }, this.options.signal)));
    return answers.flatMap((answer) => answer.series);
  }

  draw() {
    const { metrics } = this.settings;
    if (metrics.length !== this.panes.length || metrics.some((metric, at) => metric !== this.panes[at].metric)) this.arrange(metrics);
    const pins = this.runs.length === 1 ? pinsOf(groupFindings(this.details[0].all_findings), null) : [];
    for (const { metric, drawn } of this.panes) drawn.update({ lines: this.linesOf(metric), pins, log: this.settings.log, zoom: this.settings.zoom });
  }

  /** @param {string[]} metrics */
  arrange(metrics) {
    const kept = new Map(this.panes.map((pane) => [pane.metric, pane]));
    this.panes = metrics.map((metric) => kept.get(metric) ?? this.makePane(metric));
    for (const [metric, pane] of kept) if (!metrics.includes(metric)) pane.drawn.destroy();
    replace(this.element, this.panes.map((pane) => pane.drawn.element));
  }

  /**
   * @param {string} metric
   * @returns {CurvePane}
   */
  makePane(metric) {
    const known = this.details.flatMap((detail) => detail.metrics).find((one) => one.name === metric);
    const drawn = chart({
      title: metric, hint: known?.meaning ?? null, lines: [], around: this.settings.log ? null : centreOf(metric), format: formatOf(metric, known?.unit), height: 208,
      cursor: "curves", onZoom: this.options.onZoom, onStep: this.options.onStep, onPin: (pin) => this.light(pin.step),
    });
    return { metric, drawn };
  }

  /** @param {number} step */
  light(step) {
    for (const { drawn } of this.panes) drawn.light(step);
    this.options.onStep(step);
  }

  /** With one run, colours tell splits apart; with several, colours tell runs and dashes tell splits.
   * @param {string} metric
   * @returns {import("../chart/chart_data.js").Line[]}
   */
  linesOf(metric) {
    const { smoothing, bands: band } = this.settings;
    return this.details.flatMap((detail, run) => {
      const metrics = this.metricsOf(metric, detail);
      const colours = coloursOf(metrics);
      return metrics.flatMap((name, at) => {
        const series = this.series[run].get(name);
        if (!series || series.steps.length === 0) return [];
        if (this.runs.length === 1) return [toLine(series, { label: name, colour: colours[at], smoothing, band })];
        const label = metrics.length > 1 ? `${this.runs[run]} ${name.split("/")[0]}` : this.runs[run];
        return [toLine(series, { label, colour: categorical(run), dash: at === 0 ? [] : dashOf(at), smoothing, band })];
      });
    });
  }

  destroy() {
    for (const { drawn } of this.panes) drawn.destroy();
  }
}
