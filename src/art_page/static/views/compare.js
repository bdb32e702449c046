/** Two to twenty runs, or groups of seeds, beside each other: newest values, settings that differ, curves in the same panes. */
import { lookOf } from "../lib/colours.js";
import { h, replace, svg } from "../lib/dom.js";
import { formatCount, formatSeconds, formatUsd, UNKNOWN } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { empty, orShowFailure, showWhenLoaded } from "../lib/states.js";
import { CurvePanes } from "../curves/curve_panes.js";
import { readSettings, settingControls, writeSettings } from "../curves/curve_settings.js";
import { formatOf } from "../curves/lines.js";
import { MetricList } from "../curves/metric_list.js";
import { isItem, itemName, loadItem, MAX_ITEMS, runsOf } from "../curves/seeds.js";
import { baseModelText, groupHeadline, headlineText, rewardText, spread, spreadText, stateChip } from "../parts/run_summary.js";
import { joinSettings, settingsTable } from "../parts/settings_table.js";

const FEWEST = 2;
const FIRST_METRICS = ["val/reward", "train/reward", "loss/entropy", "loss/kl_to_sampler"];

/** @type {import("../lib/context.js").View} */
export const compareView = {
  title: () => "Compare runs",
  async show(root, route, ctx) {
    const runs = [...new Set(route.query.getAll("run"))].filter(isItem);
    if (runs.flatMap(runsOf).length < FEWEST || runs.length > MAX_ITEMS) {
      replace(root, empty(`Choose ${FEWEST} to ${MAX_ITEMS} runs to compare; the address names ${runs.length}.`, h("a", { href: "#/" }, "All runs")));
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
    const hasGroup = this.runs.some((item) => runsOf(item).length > 1);
    await showWhenLoaded(this.root, this.ctx.signal, () => this.load(), () => {
      const aside = h("details", { class: "metric-aside", open: innerWidth > 960 }, h("summary", null, "Metrics"), this.list.element);
      replace(this.root, h("h1", null, this.runs.length === 1 ? `${itemName(this.runs[0])}, as one` : `Compare ${this.runs.length} runs${hasGroup ? " and groups of seeds" : ""}`), hasGroup ? h("p", { class: "soft" }, "Several runs as one: a value is their mean, with the lowest and the highest; so is the band of a curve.") : null, h("div", { class: "side-by-side" }, this.values, this.differences), h("h2", null, "Curves"), this.controls.element, h("div", { class: "curves-body" }, aside, this.panes.element));
    });
    this.ctx.keys([{ key: "/", text: "search the metrics", run: () => this.list.search.focus() }]);
    this.ctx.refreshEvery(3, () => this.load());
  }

  async load() {
    const details = await Promise.all(this.runs.map((item) => loadItem(item, this.ctx.signal)));
    const metrics = new Map(details.flatMap((detail) => detail.metrics).map((metric) => [metric.name, metric]));
    if (this.settings.metrics.length === 0) this.choose(FIRST_METRICS.filter((name) => metrics.has(name) && !(name === "train/reward" && metrics.has("val/reward"))));
    this.list.fill([...metrics.values()]);
    await this.panes.load(details);
    this.drawValues(details);
    const differing = details.length === 1
      ? settingsTable(details[0].members.map((/** @type {any} */ one) => one.settings), runsOf(this.runs[0]).map((run) => h("a", { href: link("run", run.split("/")) }, run)))
      : settingsTable(details.map((detail) => joinSettings(detail.members.map((/** @type {any} */ one) => one.settings))), this.heads());
    replace(this.differences, h("h2", null, "Settings that differ"), differing);
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
    return this.runs.map((item, at) => h("span", null, lineKey(at), runsOf(item).map((run, place) => [place > 0 ? ", " : null, h("a", { href: link("run", run.split("/")) }, place > 0 ? run.split("/")[1] : run)])));
  }

  /** @param {any[]} details */
  drawValues(details) {
    /** @type {[string, (detail: any) => import("../lib/dom.js").Child, (members: any[]) => import("../lib/dom.js").Child][]} */
    const rows = [
      ["State", (detail) => stateChip(detail.state), (members) => [...new Set(members.map((one) => one.state))].map(stateChip)],
      ["Step", (detail) => formatCount(detail.step), (members) => rangeText(members.map((one) => one.step))],
      ["Held-out", (detail) => (detail.headline ? [headlineText(detail.headline), h("span", { class: "small soft" }, ` ${detail.headline.split}/${detail.headline.metric}`)] : UNKNOWN), (members) => groupHeadline(groupOf(members))],
      ["Training reward", (detail) => rewardText(detail.training_reward), (members) => spreadText(spread(members.map((one) => one.training_reward?.mean)))],
      ["Time", (detail) => formatSeconds(detail.seconds), (members) => spreadText(spread(members.map((one) => one.seconds)), formatSeconds)],
      ["Per step", (detail) => formatSeconds(detail.seconds_per_step), (members) => spreadText(spread(members.map((one) => one.seconds_per_step)), formatSeconds)],
      ["Cost", (detail) => formatUsd(detail.costs_usd), (members) => spreadText(spread(members.map((one) => one.costs_usd)), formatUsd)],
      ["Base model", (detail) => baseModelText(detail.base_model), (members) => [...new Set(members.map((one) => one.base_model))].map((one, at) => [at > 0 ? ", " : null, baseModelText(one)])],
    ];
    const chosen = this.settings.metrics.filter((metric) => !details.every((detail) => detail.main_metric === metric));
    replace(this.values, h("h2", null, "Newest values"), h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "compare-table" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Value")), this.heads().map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", null,
        rows.map(([name, one, several]) => h("tr", null, h("th", { scope: "row" }, name), details.map((detail) => h("td", null, detail.members.length > 1 ? several(detail.members) : one(detail))))),
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

/** @param {number} index  of the run, whose line has this colour and dash */
function lineKey(index) {
  const { colour, dash } = lookOf(index);
  return svg("svg", { class: "line-key", viewBox: "0 0 24 4", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 24, y1: 2, y2: 2, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash.join(" ") }));
}

/** @param {number[]} values */
function rangeText(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return low === high ? formatCount(low) : `${formatCount(low)} to ${formatCount(high)}`;
}

/** The held-out figures of several runs. @param {any[]} members */
function groupOf(members) {
  const changes = members.map((one) => one.headline).filter((one) => one && one.a !== one.b);
  return Object.fromEntries(["before", "after", "difference"].map((name) => [name, spread(changes.map((one) => one[name]?.mean))]));
}
