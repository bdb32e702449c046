/** Two to six runs beside each other: newest values, settings that differ, curves in the same panes. */
import { get } from "../lib/api.js";
import { categorical } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatSeconds, formatUsd, UNKNOWN } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { empty, orShowFailure, showWhenLoaded } from "../lib/states.js";
import { CurvePanes } from "../curves/curve_panes.js";
import { readSettings, settingControls, writeSettings } from "../curves/curve_settings.js";
import { formatOf } from "../curves/lines.js";
import { MetricList } from "../curves/metric_list.js";
import { baseModelText, headlineText, rewardText, stateChip } from "../parts/run_summary.js";
import { settingsTable } from "../parts/settings_table.js";

const FEWEST = 2;
const MOST = 6;
const FIRST_METRICS = ["val/reward", "train/reward", "loss/entropy", "loss/kl_to_sampler"];

/** @type {import("../lib/context.js").View} */
export const compareView = {
  title: () => "Compare runs",
  async show(root, route, ctx) {
    const runs = [...new Set(route.query.getAll("run"))].filter((run) => run.split("/").length === 2);
    if (runs.length < FEWEST || runs.length > MOST) {
      replace(root, empty(`Choose ${FEWEST} to ${MOST} runs to compare; the address names ${runs.length}.`, h("a", { href: "#/" }, "All runs")));
      return;
    }
    const page = new ComparePage(root, runs, route.query, ctx);
    await page.start();
    return () => page.panes.destroy();
  },
};

class ComparePage {
  /**
   * @param {HTMLElement} root
   * @param {string[]} runs
   * @param {URLSearchParams} query
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, runs, query, ctx) {
    this.root = root;
    this.runs = runs;
    this.ctx = ctx;
    this.settings = readSettings(query);
    this.panes = new CurvePanes(runs, this.settings, { signal: ctx.signal, onZoom: (zoom) => this.change({ zoom }), onStep: () => {} });
    this.controls = settingControls(this.settings, (changes) => this.change(changes));
    this.list = new MetricList({ text: query.get("text") ?? "", chosen: this.settings.metrics, onChange: (metrics) => this.change({ metrics }), onSearch: (text) => setQuery({ text }) });
    this.values = h("section");
    this.differences = h("section");
  }

  async start() {
    await showWhenLoaded(this.root, this.ctx.signal, () => this.load(), () => {
      const aside = h("details", { class: "metric-aside", open: innerWidth > 960 }, h("summary", null, "Metrics"), this.list.element);
      replace(this.root, h("h1", null, `Compare ${this.runs.length} runs`), h("div", { class: "side-by-side" }, this.values, this.differences), h("h2", null, "Curves"), this.controls.element, h("div", { class: "curves-body" }, aside, this.panes.element));
    });
    this.ctx.keys([{ key: "/", text: "search the metrics", run: () => this.list.search.focus() }]);
    this.ctx.refreshEvery(3, () => this.load());
  }

  async load() {
    const details = await Promise.all(this.runs.map((run) => get(`runs/${run}`, {}, this.ctx.signal)));
    const metrics = new Map(details.flatMap((detail) => detail.metrics).map((metric) => [metric.name, metric]));
    if (this.settings.metrics.length === 0) this.choose(FIRST_METRICS.filter((name) => metrics.has(name) && !(name === "train/reward" && metrics.has("val/reward"))));
    this.list.fill([...metrics.values()]);
    await this.panes.load(details);
    this.drawValues(details);
    replace(this.differences, h("h2", null, "Settings that differ"), settingsTable(details.map((detail) => detail.settings), this.heads()));
  }

  /** @param {string[]} metrics */
  choose(metrics) {
    this.settings = { ...this.settings, metrics };
    this.panes.change({ metrics });
    this.list.chosen = new Set(metrics);
  }

  /** @param {Partial<import("../curves/curve_settings.js").CurveSettings>} changes */
  change(changes) {
    this.settings = { ...this.settings, ...changes };
    writeSettings(this.settings);
    this.panes.change(changes);
    if (changes.zoom !== undefined) this.controls.showZoom(changes.zoom);
    if (changes.metrics !== undefined || changes.heldOut !== undefined || changes.zoom !== undefined) orShowFailure(this.values, this.ctx.signal, () => this.load());
    else this.panes.draw();
  }

  heads() {
    return this.runs.map((run, at) => h("a", { href: link("run", run.split("/")) }, h("span", { class: "chart-key", style: { "border-top-color": categorical(at) } }), run));
  }

  /** @param {any[]} details */
  drawValues(details) {
    /** @type {[string, (detail: any) => import("../lib/dom.js").Child][]} */
    const rows = [
      ["State", (detail) => stateChip(detail.state)],
      ["Step", (detail) => formatCount(detail.step)],
      ["Held-out", (detail) => (detail.headline ? [headlineText(detail.headline), h("span", { class: "small soft" }, ` ${detail.headline.split}/${detail.headline.metric}`)] : UNKNOWN)],
      ["Reward", (detail) => [rewardText(detail.reward), detail.reward ? h("span", { class: "small soft" }, ` ${detail.reward.split}`) : null]],
      ["Per step", (detail) => formatSeconds(detail.seconds_per_step)],
      ["Cost", (detail) => formatUsd(detail.costs_usd)],
      ["Base model", (detail) => baseModelText(detail.base_model)],
    ];
    const chosen = this.settings.metrics.filter((metric) => !details.every((detail) => detail.main_metric === metric));
    replace(this.values, h("h2", null, "Newest values"), h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "compare-table" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Value")), this.heads().map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", null,
        rows.map(([name, cell]) => h("tr", null, h("th", { scope: "row" }, name), details.map((detail) => h("td", null, cell(detail))))),
        chosen.map((metric) => h("tr", null, h("th", { scope: "row" }, metric), details.map((_, at) => h("td", null, this.newest(metric, at)))))))));
  }

  /**
   * The newest value of a metric with its interval.
   * @param {string} metric
   * @param {number} run
   */
  newest(metric, run) {
    const series = this.panes.series[run]?.get(metric);
    const at = (series?.steps.length ?? 0) - 1;
    if (!series || at < 0) return h("span", { class: "soft" }, UNKNOWN);
    const format = formatOf(metric);
    const [low, high] = [series.low?.[at] ?? null, series.high?.[at] ?? null];
    return [h("b", null, format(series.mean[at])), low === null || high === null ? null : h("span", { class: "soft" }, ` [${format(low)}, ${format(high)}]`), h("span", { class: "small soft" }, ` step ${series.steps[at]}`)];
  }
}
