/** Costs: what a run has cost in all, by source, and step by step. */
import { chart } from "../lib/chart.js";
import { get } from "../lib/api.js";
import { categorical } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatSeconds, formatUsd, plural } from "../lib/format.js";
import { go } from "../lib/router.js";
import { empty, showWhenLoaded } from "../lib/states.js";

const MAX_SOURCES = 6;
/**
 * @typedef {{source: string, usd: number | null, num_unpriced: number, prompt_tokens: number, completion_tokens: number, seconds: number}} SourceCosts
 * @typedef {{total_usd: number | null, by_source: SourceCosts[], by_step: {steps: number[], by_source: Record<string, number[]>}}} CostsAnswer
 */

/** @type {import("../lib/context.js").View} */
export const costsView = {
  title: (route) => `Costs of ${route.args.join("/")}`,
  async show(root, route, ctx) {
    const [project, name] = route.args;
    const load = () => get(`runs/${project}/${name}/costs`, {}, ctx.signal);
    /** @type {import("../lib/chart.js").Chart | null} */
    let drawn = null;
    let shown = "";
    const draw = (/** @type {CostsAnswer} */ answer) => {
      const text = JSON.stringify(answer);
      if (text === shown) return;
      shown = text;
      drawn?.destroy();
      drawn = answer.by_step.steps.length > 0 ? stepChart(answer, [project, name]) : null;
      replace(root, drawCosts(answer, drawn));
    };
    await showWhenLoaded(root, ctx.signal, load, draw);
    ctx.refreshEvery(5, async () => draw(await load()));
    return () => drawn?.destroy();
  },
};

/**
 * @param {CostsAnswer} answer
 * @param {import("../lib/chart.js").Chart | null} steps
 */
function drawCosts(answer, steps) {
  const head = h("div", { class: "head" }, h("h1", null, "Costs"));
  if (answer.by_source.length === 0) {
    const hint = h("p", null, "Judges and other models that ART calls write theirs here; your own code does by ", h("code", null, "art.track_api_cost"), ".");
    return [head, empty("Nothing has been booked.", hint)];
  }
  const unpriced = answer.by_source.reduce((sum, one) => sum + one.num_unpriced, 0);
  return [
    head,
    h("dl", { class: "figures" }, h("div", null, h("dt", null, "total"), h("dd", null, formatPrice(answer.total_usd))), h("div", null, h("dt", null, "steps with costs"), h("dd", null, formatCount(answer.by_step.steps.length)))),
    unpriced > 0 ? h("p", { class: "note" }, `The price of ${plural(unpriced, "request")} is not known${answer.total_usd === null ? "" : ", so the total is too low"}.`) : null,
    h("div", { class: "scroll", tabindex: 0 }, sourceTable(answer)),
    steps?.element ?? null,
  ];
}

/**
 * A price of one step, which may be a small part of a cent: three digits that count.
 * @param {number | null} usd
 */
function formatSmallUsd(usd) {
  return usd === null || Math.abs(usd) >= 1 || usd === 0 ? formatUsd(usd) : `$${Number(usd.toPrecision(3))}`;
}

/** @param {number | null} usd */
function formatPrice(usd) {
  return usd === null ? "no price" : formatUsd(usd);
}

/** @param {CostsAnswer} answer */
function sourceTable(answer) {
  const titles = ["Source", "USD", "Share", "Prompt tokens", "Completion tokens", "Time", "Without a price"];
  const rows = answer.by_source.map((one) => {
    const share = answer.total_usd && one.usd !== null ? `${Math.round((one.usd / answer.total_usd) * 100)} %` : "";
    const cells = [formatPrice(one.usd), share, formatCount(one.prompt_tokens), formatCount(one.completion_tokens), formatSeconds(one.seconds), one.num_unpriced > 0 ? formatCount(one.num_unpriced) : ""];
    return h("tr", null, h("th", { scope: "row" }, one.source), cells.map((cell) => h("td", { class: "number" }, cell)));
  });
  return h("table", null, h("thead", null, h("tr", null, titles.map((title, at) => h("th", { scope: "col", class: at > 0 ? "number" : null }, title)))), h("tbody", null, rows));
}

/**
 * USD of each step, stacked by source: the five most expensive, and all others together.
 * @param {CostsAnswer} answer
 * @param {string[]} run  project and name
 */
function stepChart({ by_source: sources, by_step: { steps, by_source: bySource } }, run) {
  const names = sources.map((one) => one.source).filter((source) => bySource[source] !== undefined);
  const own = names.length > MAX_SOURCES ? names.slice(0, MAX_SOURCES - 1) : names;
  const others = names.slice(own.length);
  const lines = own.map((source, at) => ({ label: source, colour: categorical(at), steps, mean: bySource[source] }));
  if (others.length > 0) {
    const mean = steps.map((_, at) => others.reduce((sum, source) => sum + bySource[source][at], 0));
    lines.push({ label: plural(others.length, "other source"), colour: categorical(MAX_SOURCES - 1), steps, mean });
  }
  return chart({ title: "USD by step", lines, stacked: true, format: formatSmallUsd, onStep: (step) => go("rollouts", run, { step }) });
}
