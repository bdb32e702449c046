/** Checkpoints of a run: what they scored, two against each other, and what can be done with them. */
import { get } from "../lib/api.js";
import { showDialog } from "../lib/dialog.js";
import { h, replace } from "../lib/dom.js";
import { formatAge, formatBytes, formatFixed, formatNumber, formatTime, UNKNOWN } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { empty, showWhenLoaded } from "../lib/states.js";
import { deleteCheckpoint, downloadFiles, forkCheckpoint, promoteCheckpoint } from "../parts/checkpoint_actions.js";
import { readStep } from "../curves/curve_settings.js";
import { CheckpointComparison } from "../parts/checkpoint_compare.js";
import { promotionHistory } from "../parts/promotion_history.js";

/** @typedef {{split: string, metric: string, a: number, b: number}} Compared  of the wire type StepChange in art_page/run_answers.py */

const MAX_COLUMNS = 4;
const PREFERRED = ["val/reward", "test/reward", "train/reward", "loss/entropy", "loss/kl_to_base", "loss/sft"];

/** @type {import("../lib/context.js").View} */
export const checkpointsView = {
  title: (route) => `Checkpoints of ${route.args.join("/")}`,
  async show(root, route, ctx) {
    const page = new CheckpointPage(root, route, ctx);
    await page.start();
  },
};

class CheckpointPage {
  /**
   * @param {HTMLElement} root
   * @param {import("../lib/router.js").Route} route
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, route, ctx) {
    this.root = root;
    this.ctx = ctx;
    this.run = route.args.slice(0, 2);
    /** @type {{a: number | null, b: number | null}} */
    this.chosen = { a: readStep(route.query.get("a")), b: readStep(route.query.get("b")) };
    this.comparison = new CheckpointComparison(this.run, route.query.get("split"), ctx.signal);
    this.list = h("div", { class: "scroll checkpoint-list", tabindex: 0, role: "region", "aria-label": "Checkpoints" });
    this.history = h("section", { class: "promotions", "aria-label": "History of promotions" });
    this.text = "";
    /** @type {Set<number | null>} steps whose rows come first: those that were chosen when the view was opened */
    this.first = new Set();
    /** @type {import("../parts/checkpoint_actions.js").CheckpointRow[]} */
    this.checkpoints = [];
  }

  async start() {
    await showWhenLoaded(this.root, this.ctx.signal, () => this.load(), (answer) => {
      replace(this.root, h("h1", { class: "unseen" }, `Checkpoints of ${this.run.join("/")}`), this.list, this.history, this.comparison.element);
      this.draw(answer);
    });
    if (this.chosen.a !== null && this.chosen.b !== null) await this.comparison.show(this.chosen.a, this.chosen.b);
    this.ctx.refreshEvery(4, () => this.refresh());
  }

  load() {
    return get(`runs/${this.run.join("/")}/checkpoints`, {}, this.ctx.signal);
  }

  async refresh() {
    const answer = await this.load();
    const isUsed = [this.list, this.history].some((element) => element.contains(document.activeElement));
    if (JSON.stringify(answer) !== this.text && !isUsed) this.draw(answer);
  }

  /** @param {{checkpoints: import("../parts/checkpoint_actions.js").CheckpointRow[], best_metric: string, compared: Compared | null, promotions?: import("../parts/promotion_history.js").PromotionRecord[], num_promotions?: number}} answer */
  draw(answer) {
    this.text = JSON.stringify(answer);
    replace(this.history, promotionHistory(this.run, answer.promotions ?? [], answer.num_promotions ?? 0));
    this.checkpoints = answer.checkpoints;
    const { checkpoints, best_metric: bestMetric } = answer;
    if (checkpoints.length === 0) {
      replace(this.list, empty("No checkpoint yet.", "Each trained step leaves one here."));
      return;
    }
    const compared = answer.compared ?? { split: "val", metric: "reward", a: 0, b: 0 };
    if (this.first.size === 0) this.begin(compared);
    const measured = `${compared.split}/${compared.metric}`;
    const metrics = metricColumns(checkpoints, [bestMetric, measured]);
    const rank = (/** @type {import("../parts/checkpoint_actions.js").CheckpointRow} */ one) => (this.first.has(one.step) ? 0 : measured in one.metrics || bestMetric in one.metrics ? 1 : 2);
    const rows = checkpoints.toSorted((one, other) => rank(one) - rank(other));
    const heads = [h("th", { scope: "col", title: "The two checkpoints to compare" }, "Compare"), h("th", { scope: "col", class: "number" }, "Step"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Marks")),
      metrics.map((metric) => h("th", { scope: "col", class: "number" }, metric)), h("th", { scope: "col" }, "Made"), h("th", { scope: "col", class: "number" }, "Size"), this.ctx.canWrite ? h("th", { scope: "col" }, "Actions") : null];
    replace(this.list, h("table", { class: "checkpoints" }, h("thead", null, h("tr", null, heads)), h("tbody", null, rows.map((one) => this.row(one, metrics)))));
  }

  /**
   * Without a choice, compare the first and the last step that share held-out scenarios, if there are two.
   * @param {Compared} compared
   */
  begin(compared) {
    if (!this.comparison.isSplitChosen) this.comparison.split = compared.split;
    if (this.chosen.a === null && this.chosen.b === null && compared.a !== compared.b) {
      this.chosen = { a: compared.a, b: compared.b };
      this.comparison.show(compared.a, compared.b);
    }
    this.first = new Set([this.chosen.a, this.chosen.b]);
  }

  /**
   * @param {import("../parts/checkpoint_actions.js").CheckpointRow} checkpoint
   * @param {string[]} metrics
   */
  row(checkpoint, metrics) {
    const { step, created_at: created, size_bytes: size } = checkpoint;
    return h("tr", null,
      h("td", { class: "nowrap" }, this.radio("a", step), this.radio("b", step)),
      h("td", { class: "number" }, h("a", { href: link("run", this.run, { step }) }, String(step))),
      h("td", null, h("span", { class: "chips" },
        checkpoint.is_promoted ? h("span", { class: "chip chip-accent", title: `Answers requests to ${this.run.join("/")}@promoted; never deleted` }, "promoted") : null,
        checkpoint.is_best ? h("span", { class: "chip chip-good", title: "The highest mean of the metric; never deleted automatically" }, "best") : null,
        checkpoint.is_newest ? h("span", { class: "chip", title: `Answers requests to ${this.run.join("/")}` }, "newest") : null,
        checkpoint.parents.length > 0 ? h("span", { class: "small soft" }, `from ${checkpoint.parents.join(", ")}`) : null)),
      metrics.map((metric) => h("td", { class: "number" }, metric in checkpoint.metrics ? inColumn(checkpoint.metrics[metric]) : h("span", { class: "soft" }, UNKNOWN))),
      h("td", { class: "nowrap", title: formatTime(created) }, formatAge(created)),
      h("td", { class: "number" }, formatBytes(size)),
      this.ctx.canWrite ? h("td", { class: "actions" }, this.actions(checkpoint)) : null);
  }

  /**
   * @param {"a" | "b"} side
   * @param {number} step
   */
  radio(side, step) {
    const input = h("input", { type: "radio", name: `checkpoint-${side}`, checked: this.chosen[side] === step, "aria-label": `Step ${step} as ${side}`, "on:change": () => this.choose(side, step) });
    return h("label", { class: "ab" }, input, side);
  }

  /**
   * @param {"a" | "b"} side
   * @param {number} step
   */
  choose(side, step) {
    this.chosen[side] = step;
    setQuery({ a: this.chosen.a, b: this.chosen.b });
    if (this.chosen.a !== null && this.chosen.b !== null) this.comparison.show(this.chosen.a, this.chosen.b);
  }

  /** @param {import("../parts/checkpoint_actions.js").CheckpointRow} checkpoint */
  actions(checkpoint) {
    const context = { run: this.run, signal: this.ctx.signal, onChange: () => this.refresh().catch(() => undefined) };
    const kept = checkpoint.is_newest || checkpoint.is_best || checkpoint.is_promoted ? "The newest, the best and the promoted checkpoint are never deleted" : null;
    const promoted = this.checkpoints.find((one) => one.is_promoted)?.step ?? null;
    return [
      h("button", { type: "button", class: "quiet", disabled: checkpoint.is_promoted, title: checkpoint.is_promoted ? "This checkpoint is promoted" : null, "on:click": () => promoteCheckpoint(context, checkpoint, promoted) }, "Promote"),
      h("button", { type: "button", class: "quiet", "on:click": () => downloadFiles(context, checkpoint).catch(showProblem) }, "Download"),
      h("button", { type: "button", class: "quiet", "on:click": () => forkCheckpoint(context, checkpoint) }, "Fork"),
      h("button", { type: "button", class: "quiet", disabled: kept !== null, title: kept, "on:click": () => deleteCheckpoint(context, checkpoint) }, "Delete"),
    ];
  }
}

/**
 * A number in a column: three decimals, so that they lie below each other.
 * @param {number} value
 */
function inColumn(value) {
  return Math.abs(value) < 100 && Math.abs(value) >= 0.01 ? formatFixed(value, 3) : formatNumber(value);
}

/** @param {unknown} error */
function showProblem(error) {
  showDialog("That did not work", h("p", null, error instanceof Error ? error.message : String(error)));
}

/**
 * The metrics worth a column: the given ones, then rewards and the usual ones that any checkpoint has.
 * @param {import("../parts/checkpoint_actions.js").CheckpointRow[]} checkpoints
 * @param {string[]} first
 */
function metricColumns(checkpoints, first) {
  const known = new Set(checkpoints.flatMap((one) => Object.keys(one.metrics)));
  return [...new Set([...first, ...PREFERRED])].filter((metric) => known.has(metric)).slice(0, MAX_COLUMNS);
}
