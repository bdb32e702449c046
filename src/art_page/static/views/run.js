/** One run at a glance: its main curves with the findings on them, one step, and what runs now. */
import { get } from "../lib/api.js";
import { chart } from "../lib/chart.js";
import { h, replace } from "../lib/dom.js";
import { formatAge, formatBounds, formatCount, formatFixed, formatInterval, formatSeconds, formatSigned, formatUsd, plural, UNKNOWN } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { empty, orShowFailure, showWhenLoaded } from "../lib/states.js";
import { mainPanes, paneFormat } from "../curves/main_panes.js";
import { labelLine } from "../parts/run_labels.js";
import { baseModelText, outcomeText, rewardText, stateChip } from "../parts/run_summary.js";
import { findingList, groupFindings, pinsOf } from "../parts/findings.js";
import { StepPanel } from "../parts/step_panel.js";

/** @type {import("../lib/context.js").View} */
export const runView = {
  title: (route) => route.args.join("/"),
  async show(root, route, ctx) {
    const page = new RunPage(root, route, ctx);
    await page.start();
    return () => page.charts.forEach((one) => one.drawn.destroy());
  },
};

class RunPage {
  /**
   * @param {HTMLElement} root
   * @param {import("../lib/router.js").Route} route
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, route, ctx) {
    this.root = root;
    this.ctx = ctx;
    this.run = route.args.slice(0, 2);
    this.path = `runs/${this.run.join("/")}`;
    const step = route.query.get("step");
    /** @type {number | null} the step that the reader chose; without one, the newest is shown */
    this.chosen = step === null ? null : Number(step);
    /** @type {{pane: import("../curves/main_panes.js").Pane, drawn: import("../lib/chart.js").Chart}[]} */
    this.charts = [];
    /** @type {import("../parts/findings.js").FindingGroup[]} */
    this.groups = [];
    /** @type {string | null} key of the kind of finding that the reader picked */
    this.picked = null;
    this.text = "";
    this.top = h("div", { class: "run-top" });
    this.labels = h("div");
    this.labelText = "";
    this.curves = h("div", { class: "panes" });
    this.findings = h("section", { class: "run-findings", "aria-label": "Findings" });
    this.panel = new StepPanel(this.run, ctx.signal, (chosen) => this.choose(chosen));
  }

  async start() {
    const load = () => get(this.path, {}, this.ctx.signal);
    await showWhenLoaded(this.root, this.ctx.signal, load, (detail) => {
      replace(this.root, this.top, this.labels, h("div", { class: "run-body" }, this.curves, this.findings), this.panel.element);
      this.fill(detail);
    });
    this.ctx.keys([
      { key: "[", text: "previous step", run: () => this.panel.move(-1) },
      { key: "]", text: "next step", run: () => this.panel.move(1) },
    ]);
    this.ctx.refreshEvery(2, () => this.reload());
  }

  async reload() {
    this.fill(await get(this.path, {}, this.ctx.signal));
  }

  /** @param {any} detail */
  fill(detail) {
    const now = Date.now() / 1000;
    this.drawTop(detail, now);
    this.drawLabels(detail.labels);
    const text = JSON.stringify([detail.step, detail.metrics.length, detail.metrics[0]?.num_points, detail.all_findings.length, detail.num_rollouts]);
    if (text === this.text) return;
    if (this.text !== "") this.ctx.announce(`Step ${detail.step}, reward ${formatInterval(detail.reward)}, ${detail.state}`);
    this.text = text;
    this.drawFindings(detail);
    orShowFailure(this.curves, this.ctx.signal, () => this.drawCurves(detail));
    this.panel.show(this.chosen ?? detail.step);
  }

  /**
   * @param {any} run
   * @param {number} now
   */
  drawTop(run, now) {
    const failure = run.state === "failed" && !run.outcome?.why.length ? run.jobs.find((/** @type {any} */ job) => job.error) : null;
    /** @type {[string, import("../lib/dom.js").Child][]} */
    const figures = [
      ...this.headFigures(run),
      ["training reward", rewardText(run.training_reward ?? run.reward)],
      ["steps", run.num_steps ? `${formatCount(run.step)} of ${formatCount(run.num_steps)}` : formatCount(run.step)],
      ["time", h("span", { title: `wall time of all steps, without evaluations and pauses; ${formatSeconds(run.seconds_per_step)} per step` }, formatSeconds(run.seconds))],
      ["cost", h("a", { href: link("costs", this.run) }, formatUsd(run.costs_usd))],
      ["rollouts", h("a", { href: link("rollouts", this.run) }, formatCount(run.num_rollouts))],
      ["base model", baseModelText(run.base_model)],
      ["updated", formatAge(run.updated_at, now)],
    ];
    if (run.eta_s !== null && run.eta_s !== undefined) figures.splice(figures.length - 3, 0, ["done in", formatSeconds(run.eta_s)]);
    if (this.top.contains(document.activeElement)) return;
    const said = run.outcome?.why ?? [];
    replace(this.top,
      h("div", { class: "row" }, h("h1", { class: "unseen" }, `${run.project}/${run.name}`), stateChip(run.state), outcomeText(run.outcome), run.now && !said.includes(run.now) ? h("span", null, run.now) : null),
      said.map((/** @type {string} */ text) => h("p", { class: run.state === "failed" ? "state-failed" : "soft" }, text)),
      failure ? h("p", { class: "state-failed" }, `The newest job failed: ${failure.error}`) : null,
      h("dl", { class: "figures" }, figures.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))));
  }

  /** @param {import("../parts/run_labels.js").Labels} labels */
  drawLabels(labels) {
    const text = JSON.stringify(labels);
    if (text === this.labelText) return;
    this.labelText = text;
    const focused = [...this.labels.querySelectorAll("button")].findIndex((one) => one === document.activeElement);
    replace(this.labels, labelLine(this.run.join("/"), labels, () => this.reload()));
    this.labels.querySelectorAll("button")[focused]?.focus({ preventScroll: true });
  }

  /**
   * The task's own metric on held-out rollouts: before, after, and the paired difference.
   * @param {any} run
   * @returns {[string, import("../lib/dom.js").Child][]}
   */
  headFigures({ headline }) {
    if (!headline) return [["held-out", h("span", { class: "soft" }, "not measured")]];
    const { a, b, before, after, difference, metric, split } = headline;
    const name = `${metric} on ${split === "train" ? split : "held-out"}`;
    /** @param {any} value */
    const estimate = (value) => (value ? h("span", { title: `split ${split}, ${plural(value.num, "rollout")}, 95 % interval` }, formatFixed(value.mean), h("span", { class: "soft" }, value.low === null ? "" : ` ${formatBounds(value.low, value.high)}`)) : UNKNOWN);
    if (a === b) return b === 0 ? [[`${name}, before`, estimate(after)], ["after", h("span", { class: "soft" }, "not measured")]] : [[`${name}, step ${b}`, estimate(after)]];
    const isKnown = difference && difference.low !== null;
    const look = !isKnown || (difference.low <= 0 && difference.high >= 0) ? null : difference.mean > 0 ? "good" : "bad";
    return [
      [`${name}, before`, estimate(before)], [`after, step ${b}`, estimate(after)],
      ["difference", difference ? h("a", { href: link("checkpoints", this.run, { a, b }), title: `paired difference on ${plural(headline.num_scenarios, "scenario")}, 95 % interval` }, h("span", { class: look }, formatSigned(difference.mean)), h("span", { class: "soft" }, isKnown ? ` [${formatSigned(difference.low)}, ${formatSigned(difference.high)}]` : "")) : UNKNOWN],
    ];
  }

  /** @param {any} detail */
  drawFindings(detail) {
    this.groups = groupFindings(detail.all_findings);
    replace(this.findings, h("h2", null, "Findings"),
      this.groups.length > 0 ? findingList(this.run, this.groups, (group) => this.pick(group)) : h("p", { class: "soft" }, "None so far. What is worth knowing about a step appears here and on the curves."));
  }

  /** @param {any} detail */
  async drawCurves(detail) {
    const known = new Set(detail.metrics.map((/** @type {any} */ metric) => metric.name));
    const splits = detail.splits.map((/** @type {any} */ one) => one.split);
    const panes = mainPanes(splits).filter((one) => one.metrics.some((metric) => known.has(metric)));
    if (panes.length === 0) {
      replace(this.curves, empty("No step yet.", "The curves begin with the first trained step or logged rollout."));
      return;
    }
    const metric = panes.flatMap((one) => one.metrics).filter((name) => known.has(name));
    const answer = await get(`${this.path}/series`, { metric }, this.ctx.signal);
    const series = new Map(answer.series.map((/** @type {any} */ one) => [one.metric, one]));
    if (panes.length !== this.charts.length || panes.some((one, at) => one.title !== this.charts[at].pane.title)) this.makeCharts(panes);
    for (const { pane, drawn } of this.charts) {
      const found = new Map(pane.metrics.filter((name) => series.has(name)).map((name) => [name, series.get(name)]));
      drawn.update({ lines: pane.lines(found), pins: this.pins() });
    }
    this.lightUp();
  }

  /** @param {import("../curves/main_panes.js").Pane[]} panes */
  makeCharts(panes) {
    this.charts.forEach((one) => one.drawn.destroy());
    this.charts = panes.map((pane) => ({
      pane,
      drawn: chart({
        title: pane.title, hint: pane.hint, titleHref: link("curves", this.run, { metric: pane.metrics }), lines: [], stacked: pane.stacked, around: pane.around ?? null,
        format: paneFormat(pane), cursor: "run", onPin: (pin) => this.choose(pin.step), onStep: (step) => this.choose(step),
        onZoom: (zoom) => this.charts.forEach((one) => one.drawn.update({ zoom })),
      }),
    }));
    replace(this.curves, this.charts.map((one) => one.drawn.element));
  }

  pins() {
    return pinsOf(this.groups, this.picked);
  }

  /**
   * Show one kind of finding: all of its steps on the curves, its newest step below.
   * @param {import("../parts/findings.js").FindingGroup} group
   */
  pick(group) {
    this.picked = this.picked === group.key ? null : group.key;
    this.charts.forEach((one) => one.drawn.update({ pins: this.pins() }));
    this.choose(group.steps[0]);
  }

  /** @param {number} step */
  choose(step) {
    this.chosen = step;
    setQuery({ step });
    this.panel.show(step);
    this.lightUp();
  }

  /** Mark the chosen step on the curves, and in the list the findings about it. */
  lightUp() {
    this.charts.forEach((one) => one.drawn.light(this.chosen));
    for (const item of this.findings.querySelectorAll("li")) {
      const group = this.groups.find((one) => one.key === item.dataset.key);
      item.classList.toggle("is-lit", group !== undefined && this.chosen !== null && group.steps.includes(this.chosen));
      item.querySelector("button")?.setAttribute("aria-pressed", String(group?.key === this.picked));
    }
  }
}
