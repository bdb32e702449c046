/** Panes of curves for one run or several: one pane for each metric. */
import { get } from "../lib/api.js";
import { chart } from "../lib/chart.js";
import { dashOf, lookOf } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { groupFindings, pinsOf } from "../parts/findings.js";
import { AXES, placesOn } from "./axes.js";
import { Histogram, histogramOf } from "./histogram.js";
import { itemName, joinSeries, runsOf } from "./seeds.js";
import { centreOf, coloursOf, formatOf, onAxis, sameOnSplits, toLine } from "./lines.js";

/**
 * @typedef {import("./curve_settings.js").CurveSettings} CurveSettings
 * @typedef {import("./lines.js").Series} Series
 * @typedef {{metric: string, drawn: {element: HTMLElement, update: (changes: any) => void, light: (step: number | null) => void, destroy: () => void}}} CurvePane
 */

const MAX_METRICS = 64;

export class CurvePanes {
  /**
   * @param {string[]} runs  each "project/name", or several names with commas between them, which are drawn as one
   * @param {CurveSettings} settings
   * @param {{signal: AbortSignal, onZoom: (zoom: import("../lib/chart.js").Zoom | null) => void, onStep: (step: number) => void, onArrange?: (metrics: string[]) => void}} options  with `onArrange`, panes can be moved and taken away
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
    /** @type {import("../lib/chart.js").Zoom | null} what an axis of something else than steps shows */
    this.span = null;
    this.element = h("div", { class: "panes" });
  }

  /** @param {Partial<CurveSettings>} changes */
  change(changes) {
    if (changes.across !== undefined) this.span = null;
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
    const bins = histogramOf(metric, this.namesOf(detail));
    if (bins.length > 0) return bins;
    const splits = detail.splits.map((/** @type {any} */ one) => one.split);
    return this.settings.heldOut ? sameOnSplits(metric, [...new Set(["train", "val", ...splits])], this.namesOf(detail)) : [metric];
  }

  /**
   * Load the series of what is chosen, then draw. Where the server joined steps, a zoom loads its steps in full.
   * @param {any[]} details
   */
  async load(details) {
    this.details = details;
    const { zoom, across } = this.settings;
    const axis = AXES[across].metric;
    this.series = await Promise.all(details.map(async (detail, at) => {
      const wanted = [...new Set([...this.settings.metrics.flatMap((metric) => this.metricsOf(metric, detail)), ...(axis === null ? [] : [axis])])];
      const whole = await this.fetchItem(this.runs[at], wanted, {});
      const isJoined = zoom !== null && whole.some((one) => /** @type {any} */ (one).num_steps !== null);
      return new Map((isJoined ? await this.fetchItem(this.runs[at], wanted, zoom) : whole).map((one) => [one.metric, one]));
    }));
    this.draw();
  }

  /**
   * Curves of a run, or of several runs as one.
   * @param {string} item
   * @param {string[]} metrics
   * @param {Record<string, number>} bounds
   * @returns {Promise<Series[]>}
   */
  async fetchItem(item, metrics, bounds) {
    const [first, ...more] = await Promise.all(runsOf(item).map((run) => this.fetch(run, metrics, bounds)));
    return first.map((one, at) => joinSeries([one, ...more.map((other) => other[at])]));
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
    const { across, log } = this.settings;
    const places = this.details.map((_, run) => this.placesOf(run));
    const [axis, zoom] = across === "step" ? [undefined, this.settings.zoom] : [AXES[across], this.span];
    const own = places[0] ?? null;
    const placed = own === null ? pins : own === undefined ? [] : pins.map((pin) => ({ ...pin, at: own(pin.step) }));
    for (const { metric, drawn } of this.panes) drawn.update({ lines: this.linesOf(metric, places), series: this.series, pins: placed, log, zoom, axis });
  }

  /**
   * Where the steps of a run lie on the axis: null for an axis of steps, undefined where that is not known.
   * @param {number} run
   * @returns {((step: number) => number) | null | undefined}
   */
  placesOf(run) {
    const { metric } = AXES[this.settings.across];
    if (metric === null) return null;
    const series = this.series[run].get(metric);
    return series && series.mean.some((value) => value !== null) ? placesOn(series) : undefined;
  }

  /** Runs whose steps have no known place on the axis. */
  get lost() {
    return this.runs.filter((_, run) => this.placesOf(run) === undefined);
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
    const tools = this.paneTools(metric);
    const bins = histogramOf(metric, this.namesOf(this.details[0]));
    if (bins.length > 0) return { metric, drawn: new Histogram(metric, bins, tools) };
    const drawn = chart({
      tools,
      title: metric, hint: known?.meaning ?? null, lines: [], around: this.settings.log ? null : centreOf(metric), format: formatOf(metric, known?.unit), height: 208,
      cursor: "curves", onZoom: (zoom) => this.zoomTo(zoom), onStep: (place) => this.options.onStep(this.stepAt(place)), onPin: (pin) => this.light(pin.step),
    });
    return { metric, drawn };
  }

  /** @param {import("../lib/chart.js").Zoom | null} zoom */
  zoomTo(zoom) {
    if (this.settings.across === "step") {
      this.options.onZoom(zoom);
      return;
    }
    this.span = zoom;
    this.draw();
  }

  /** The step of the first run that lies nearest to a place on the axis.
   * @param {number} place
   */
  stepAt(place) {
    const steps = [...this.series[0].values()].flatMap((series) => series.steps);
    const placeOf = this.placesOf(0);
    if (!placeOf) return place;
    return steps.reduce((best, step) => (Math.abs(placeOf(step) - place) < Math.abs(placeOf(best) - place) ? step : best), steps[0] ?? 0);
  }

  /** Controls that move a pane to the left or right, and take it away.
   * @param {string} metric
   */
  paneTools(metric) {
    const { onArrange } = this.options;
    if (!onArrange) return null;
    const move = (/** @type {number} */ by) => {
      const { metrics } = this.settings;
      const others = metrics.filter((one) => one !== metric);
      const place = Math.max(0, metrics.indexOf(metric) + by);
      onArrange([...others.slice(0, place), metric, ...others.slice(place)]);
    };
    const tool = (/** @type {string} */ sign, /** @type {string} */ what, /** @type {() => void} */ act) => h("button", { type: "button", class: "quiet", title: what, "aria-label": `${what}: ${metric}`, "on:click": act }, sign);
    return [tool("←", "Move to the left", () => move(-1)), tool("→", "Move to the right", () => move(1)), tool("×", "Take away", () => onArrange(this.settings.metrics.filter((one) => one !== metric)))];
  }

  /** @param {number} step */
  light(step) {
    for (const { drawn } of this.panes) drawn.light(step);
    this.options.onStep(step);
  }

  /** With one run, colours and dashes tell splits apart; with several, runs, and marks tell held-out from training.
   * @param {string} metric
   * @param {ReturnType<CurvePanes["placesOf"]>[]} places  of each run
   * @returns {import("../chart/chart_data.js").Line[]}
   */
  linesOf(metric, places) {
    const { smoothing, bands: band } = this.settings;
    return this.details.flatMap((detail, run) => {
      const metrics = this.metricsOf(metric, detail);
      const colours = coloursOf(metrics);
      return metrics.flatMap((name, at) => {
        const series = this.series[run].get(name);
        const place = places[run];
        if (!series || series.steps.length === 0 || place === undefined) return [];
        if (this.runs.length === 1) return [onAxis(toLine(series, { label: name, colour: colours[at], dash: dashOf(at), smoothing, band }), place)];
        const item = itemName(this.runs[run]);
        const label = metrics.length > 1 ? `${item} ${name.split("/")[0]}` : item;
        return [onAxis(toLine(series, { label, ...lookOf(run), smoothing, band }), place)];
      });
    });
  }

  destroy() {
    for (const { drawn } of this.panes) drawn.destroy();
  }
}
