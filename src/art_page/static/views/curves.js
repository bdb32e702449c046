/** Curves of any metric of a run, with other runs in the same panes if the reader adds them. */
import { h, replace } from "../lib/dom.js";
import { link, setQuery } from "../lib/router.js";
import { empty, orShowFailure, showWhenLoaded } from "../lib/states.js";
import { AXES } from "../curves/axes.js";
import { CurvePanes } from "../curves/curve_panes.js";
import { readSettings, settingControls, writeSettings } from "../curves/curve_settings.js";
import { withHistograms } from "../curves/histogram.js";
import { layoutMenu } from "../curves/layouts.js";
import { MetricList } from "../curves/metric_list.js";
import { RunPicker } from "../curves/run_picker.js";
import { loadItem } from "../curves/seeds.js";

const DEFAULTS = ["train/reward", "val/reward", "loss/train", "loss/entropy", "loss/kl_to_sampler", "loss/grad_norm", "loss/sft"];

/** @type {import("../lib/context.js").View} */
export const curvesView = {
  title: (route) => `Curves of ${route.args.join("/")}`,
  async show(root, route, ctx) {
    const page = new CurvesPage(root, route, ctx);
    await page.start();
    return () => page.panes.destroy();
  },
};

class CurvesPage {
  /**
   * @param {HTMLElement} root
   * @param {import("../lib/router.js").Route} route
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, route, ctx) {
    this.root = root;
    this.ctx = ctx;
    this.run = route.args.slice(0, 2);
    this.settings = readSettings(route.query);
    this.hasChoice = route.query.has("metric");
    this.picker = new RunPicker(this.run.join("/"), route.query.getAll("run"), ctx.signal, (runs) => this.onRuns(runs));
    this.note = h("p", { class: "small soft", "aria-live": "polite" });
    this.lost = h("p", { class: "small note", role: "status" });
    this.panes = this.makePanes();
    this.place = h("div", null, this.panes.element);
    this.controls = settingControls(this.settings, (changes) => this.change(changes));
    this.layouts = layoutMenu(() => this.settings, (layout) => this.take(layout));
    this.list = new MetricList({
      text: route.query.get("text") ?? "", chosen: this.settings.metrics,
      onChange: (metrics) => this.change({ metrics }), onSearch: (text) => setQuery({ text }),
    });
  }

  makePanes() {
    return new CurvePanes([this.run.join("/"), ...this.picker.runs], this.settings, {
      signal: this.ctx.signal,
      onZoom: (zoom) => this.change({ zoom }),
      onArrange: (metrics) => this.list.set(metrics),
      onStep: (step) => replace(this.note, `Step ${step}: `, h("a", { href: link("rollouts", this.run, { step }) }, "rollouts"), ", ", h("a", { href: link("run", this.run, { step }) }, "what became of its tokens")),
    });
  }

  async start() {
    await showWhenLoaded(this.root, this.ctx.signal, () => this.load(), () => {
      const aside = h("details", { class: "metric-aside", open: innerWidth > 960 }, h("summary", null, "Metrics"), this.list.element);
      replace(this.root, h("h1", { class: "unseen" }, `Curves of ${this.run.join("/")}`), h("div", { class: "head" }, this.controls.element, h("div", { class: "row" }, this.layouts, this.picker.element)), h("div", { class: "curves-body" }, aside, h("section", null, this.note, this.lost, this.place)));
    });
    this.ctx.keys([{ key: "/", text: "search the metrics", run: () => this.list.search.focus() }]);
    this.ctx.refreshEvery(2, () => this.load());
  }

  async load() {
    const details = await Promise.all(this.panes.runs.map((item) => loadItem(item, this.ctx.signal)));
    const metrics = withHistograms(uniqueMetrics(details));
    if (!this.hasChoice) this.chooseDefaults(metrics);
    this.list.fill(metrics);
    if (this.settings.metrics.length === 0) this.showNothing(metrics.length);
    else await this.panes.load(details);
    const { lost } = this.panes;
    this.lost.textContent = lost.length === 0 || this.settings.metrics.length === 0 ? "" : `No ${AXES[this.settings.across].word} is recorded for ${lost.join(", ")}.`;
    if (this.settings.metrics.length > 0 && !this.panes.element.isConnected) replace(this.place, this.panes.element);
  }

  /** @param {{name: string}[]} metrics */
  chooseDefaults(metrics) {
    const known = new Set(metrics.map((metric) => metric.name));
    const chosen = DEFAULTS.filter((name) => known.has(name) && !(name === "val/reward" && known.has("train/reward")));
    if (known.size === 0) return;
    this.hasChoice = true;
    this.settings.metrics = chosen.length > 0 ? chosen : metrics.slice(0, 4).map((metric) => metric.name);
    this.panes.change(this.settings);
    this.list.chosen = new Set(this.settings.metrics);
  }

  /** @param {number} numMetrics */
  showNothing(numMetrics) {
    replace(this.place, numMetrics === 0 ? empty("No metric yet.", "Curves begin with the first trained step or logged rollout.") : empty("No metric is ticked.", "Tick some in the list of metrics, or search with /."));
  }

  /** Show a saved layout. @param {Partial<import("../curves/curve_settings.js").CurveSettings>} layout */
  take(layout) {
    this.change(layout);
    const controls = settingControls(this.settings, (changes) => this.change(changes));
    this.controls.element.replaceWith(controls.element);
    this.controls = controls;
    this.list.chosen = new Set(this.settings.metrics);
    this.list.draw();
  }

  /** @param {Partial<import("../curves/curve_settings.js").CurveSettings>} changes */
  change(changes) {
    this.settings = { ...this.settings, ...changes };
    this.hasChoice = true;
    writeSettings(this.settings);
    this.panes.change(this.settings);
    if (changes.zoom !== undefined) this.controls.showZoom(changes.zoom);
    const isDrawnOnly = Object.keys(changes).every((name) => ["smoothing", "bands", "log"].includes(name));
    if (isDrawnOnly && this.settings.metrics.length > 0) this.panes.draw();
    else this.reload();
  }

  /** @param {string[]} runs */
  onRuns(runs) {
    setQuery({ run: runs });
    this.panes.destroy();
    this.panes = this.makePanes();
    replace(this.place, this.panes.element);
    this.reload();
  }

  reload() {
    return orShowFailure(this.place, this.ctx.signal, () => this.load());
  }
}

/** @param {any[]} details */
function uniqueMetrics(details) {
  /** @type {Map<string, any>} */
  const metrics = new Map();
  for (const metric of details.flatMap((detail) => detail.metrics)) if (!metrics.has(metric.name)) metrics.set(metric.name, metric);
  return [...metrics.values()];
}
