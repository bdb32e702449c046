/** Comparisons of models on the same held-out scenarios, which `art compare` makes: the list, and one of them. */
import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatAge, formatBounds, formatCount, formatFixed, formatInterval, formatPercent, formatSeconds, formatSigned, formatUsd, plural, UNKNOWN } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { empty, missing, showWhenLoaded } from "../lib/states.js";
import { placedModels, scoreChart } from "../parts/score_chart.js";

/** @type {import("../lib/context.js").View} */
export const comparisonsView = {
  title: (route) => (route.args[0] === undefined ? "Models compared" : `Models compared on ${route.args[0]}`),
  async show(root, route, ctx) {
    const [name] = route.args;
    const path = name === undefined ? "comparisons" : `comparisons/${name}`;
    const load = () => get(path, {}, ctx.signal);
    let shown = "";
    let axis = /** @type {import("../parts/score_chart.js").Axis} */ (route.query.get("axis") === "cost" ? "cost" : "latency");
    const draw = (/** @type {any} */ answer) => {
      const text = JSON.stringify(answer);
      if (text === shown) return;
      shown = text;
      if (name === undefined) replace(root, drawList(answer));
      else replace(root, drawOne(answer, axis, (chosen) => {
        axis = chosen;
        setQuery({ axis: chosen === "cost" ? chosen : null });
      }));
    };
    await showWhenLoaded(root, ctx.signal, load, draw);
    ctx.refreshEvery(3, async () => draw(await load()));
  },
};

/** @param {any} answer */
function drawList({ comparisons, unreadable }) {
  const head = h("div", { class: "head" }, h("h1", null, "Models compared"));
  const damaged = unreadable.map((/** @type {string} */ name) => missing(`The comparison ${name} is damaged, or of another version of ART.`));
  if (comparisons.length === 0) {
    const command = h("code", null, "art compare tic_tac_toe --models scripted,tiny");
    return [head, damaged, empty("No models have been compared here.", h("p", null, "For example: ", command))];
  }
  const titles = ["Model", "Score", "Against the reference", "Scenarios", "Per rollout", "USD per 1,000", "Failed calls", "Policy faults"];
  const bodies = comparisons.map((/** @type {any} */ one) => h("tbody", null,
    h("tr", { class: "comparison-head" }, h("th", { scope: "rowgroup", colspan: titles.length },
      h("a", { href: link("comparisons", [one.id]) }, one.id), h("span", { class: "soft" }, ` ${one.headline_metric}: ${one.description}, ${plural(one.num_scenarios, "scenario")}, `, h("span", { class: "nowrap" }, formatAge(one.updated_at)), one.is_complete ? null : ", not complete"))),
    one.models.map((/** @type {any} */ row) => listRow(one, row))));
  return [head, damaged, h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "comparisons" }, headOf(titles, titles.slice(1)), bodies))];
}

/**
 * One model of a comparison.
 * @param {any} one
 * @param {any} row
 */
function listRow(one, row) {
  const isReference = row.label === one.reference;
  const cells = [
    scoreCell(row.headline), differenceCell(row.difference, isReference, one.num_scenarios), `${formatCount(row.headline?.num ?? 0)} of ${formatCount(one.num_scenarios)}`,
    timeCell(row.rollout_latency_s), priceCell(row), failedCell(row.calls), formatPercent(row.policy_fault_rate),
  ];
  return h("tr", null, h("th", { scope: "row" }, row.label, row.label === one.best ? h("span", { class: "chip chip-good" }, "best") : null), cells.map((cell) => h("td", { class: "number" }, cell)));
}

/**
 * @param {any} answer
 * @param {import("../parts/score_chart.js").Axis} axis
 * @param {(axis: import("../parts/score_chart.js").Axis) => void} onAxis
 */
function drawOne({ comparison, remarks }, axis, onAxis) {
  const { models, headline_metric: metric } = comparison;
  const rollouts = comparison.rollouts_per_scenario > 1 ? `, ${comparison.rollouts_per_scenario} rollouts each` : "";
  const about = `${plural(comparison.num_scenarios, "scenario")} of the split ${comparison.split}, seed ${comparison.seed}${rollouts}. ${formatCount(comparison.num_common)} of them have a score with every model that has any. Up to ${plural(comparison.concurrency, "rollout")} at once.`;
  const place = h("div", { class: "score-place" });
  const choice = h("select", { "aria-label": "Horizontal axis", "on:change": () => {
    const chosen = choice.value === "cost" ? "cost" : "latency";
    onAxis(chosen);
    drawChart(place, models, chosen, metric);
  } }, [["latency", "time of a rollout"], ["cost", "cost"]].map(([value, text]) => h("option", { value, selected: value === axis }, text)));
  drawChart(place, models, axis, metric);
  return [
    h("div", { class: "head" }, h("h1", null, comparison.task), h("div", { class: "row" }, h("label", null, "against ", choice))),
    h("p", null, comparison.description, ". ", about),
    comparison.is_complete ? null : h("p", { class: "note" }, "This comparison is not complete. It is running, or was stopped; the same command goes on."),
    place,
    h("div", { class: "scroll", tabindex: 0 }, modelTable(comparison)),
    remarks.length > 0 ? [h("h2", null, "Remarks"), h("ul", null, remarks.map((/** @type {string} */ text) => h("li", null, text)))] : null,
  ];
}

/**
 * @param {HTMLElement} place
 * @param {any[]} models
 * @param {import("../parts/score_chart.js").Axis} axis
 * @param {string} metric
 */
function drawChart(place, models, axis, metric) {
  const count = placedModels(models, axis).length;
  const without = models.filter((one) => one.kind !== "scripted").length - count;
  const what = axis === "cost" ? "price" : "time";
  replace(place,
    count === 0 ? missing(`No model has a score and a ${what} yet.`) : scoreChart(models, axis, metric),
    count > 0 && without > 0 ? h("p", { class: "small soft" }, `${plural(without, "model")} without a score or a ${what}: see the table.`) : null);
}

/** @param {any} comparison */
function modelTable(comparison) {
  const { models, headline_metric: metric, reference } = comparison;
  const titles = ["Model", metric, `Against ${reference}`, "Reward", "Scenarios", "Per rollout", "Per turn", "Turns", "Tokens in / out", "USD per 1,000", "Failed calls", "Policy faults"];
  const rows = models.map((/** @type {any} */ row) => {
    const cells = [
      scoreCell(row.headline),
      differenceCell(row.difference, row.label === reference, comparison.num_scenarios),
      formatFixed(row.reward?.mean),
      `${formatCount(row.headline?.num ?? 0)} of ${formatCount(comparison.num_scenarios)}`,
      timeCell(row.rollout_latency_s), timeCell(row.turn_latency_s), formatFixed(row.turns, 1),
      row.prompt_tokens === null ? UNKNOWN : `${formatCount(row.prompt_tokens)} / ${formatCount(row.completion_tokens)}`,
      priceCell(row),
      failedCell(row.calls), formatPercent(row.policy_fault_rate),
    ];
    return h("tr", null, h("th", { scope: "row" }, row.label, h("div", { class: "small soft" }, row.where)), cells.map((cell) => h("td", { class: "number" }, cell)));
  });
  return h("table", { class: "compared-models" }, headOf(titles, titles.slice(1)), h("tbody", null, rows));
}

/**
 * @param {string[]} titles
 * @param {string[]} numbers  titles of columns that are aligned to the right
 */
function headOf(titles, numbers) {
  return h("thead", null, h("tr", null, titles.map((title) => h("th", { scope: "col", class: numbers.includes(title) ? "number" : null }, title))));
}

/** @param {any} headline */
function scoreCell(headline) {
  return headline === null ? h("span", { class: "bad" }, "no score") : formatInterval(headline);
}

/** @param {any} row */
function priceCell({ usd_per_1000: usd, price_note: note }) {
  return usd === null ? h("span", { class: "soft", title: note }, note ?? UNKNOWN) : h("span", { title: note }, formatUsd(usd));
}

/**
 * @param {{mean: number, low: number | null, high: number | null, num: number} | null} difference
 * @param {boolean} isReference
 * @param {number} total
 */
function differenceCell(difference, isReference, total) {
  if (difference === null) return h("span", { class: "soft" }, isReference ? "reference" : UNKNOWN);
  const { mean, low, high, num } = difference;
  const colour = low !== null && low > 0 ? "good" : high !== null && high < 0 ? "bad" : null;
  const bounds = low === null ? "" : ` ${formatBounds(low, high)}`;
  return [h("span", { class: colour }, formatSigned(mean)), h("span", { class: "soft" }, bounds, num === total ? "" : ` ${plural(num, "pair")}`)];
}

/** @param {{median: number, p95: number} | null} time */
function timeCell(time) {
  return time === null ? UNKNOWN : [formatSeconds(time.median), h("span", { class: "small soft" }, ` p95 ${formatSeconds(time.p95)}`)];
}

/** @param {{num_answered: number, faults: Record<string, number>} | null} calls */
function failedCell(calls) {
  if (calls === null) return UNKNOWN;
  const failed = Object.values(calls.faults).reduce((sum, count) => sum + count, 0);
  const kinds = Object.entries(calls.faults).map(([kind, count]) => `${count} ${kind}`).join(", ");
  return h("span", { class: failed > 0 ? "bad" : null, title: kinds }, `${formatCount(failed)} of ${formatCount(failed + calls.num_answered)}`);
}
