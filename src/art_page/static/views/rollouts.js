// The table of rollouts of a step or of all. Filter, order and search are in the address.

import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatPercent, plural } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { empty, failed } from "../lib/states.js";
import { makeTable } from "../lib/table.js";
import { FILTERS, RolloutFilters } from "../rollout/filters.js";
import { columnsFor } from "../rollout/row_columns.js";
import { visibleText } from "../lib/visible_text.js";
import { nextStep, rangesOf } from "../rollout/step_keys.js";

const REFRESH_S = 10;
const DEFAULT_METRICS = 2;

/** @type {import("../lib/context.js").View} */
export const rolloutsView = {
  title: (route) => `Rollouts of ${route.args.join("/")}`,
  async show(root, route, ctx) {
    const run = await get(`runs/${route.args[0]}/${route.args[1]}`, {}, ctx.signal);
    new RolloutsPage(root, route, ctx, run).start();
  },
};

/** A metric's column sorts by "metric NAME". @param {string|null} sort */
function sortOf(sort) {
  return sort?.startsWith("metric ") ? { sort: "metric", sort_metric: sort.slice("metric ".length) } : { sort };
}

class RolloutsPage {
  /** @param {HTMLElement} root @param {import("../lib/router.js").Route} route @param {import("../lib/context.js").Context} ctx @param {any} run */
  constructor(root, route, ctx, run) {
    this.root = root;
    this.args = route.args;
    this.ctx = ctx;
    this.run = run;
    this.query = new URLSearchParams(route.query);
    this.count = h("p", { class: "table-count", role: "status" });
    this.place = h("div", null);
    /** @type {string[]|null} names of the task's metrics, once they are known */ this.metrics = null;
    this.columnChoice = h("details", { class: "column-choice", hidden: true });
    this.filters = new RolloutFilters(run, this.query, (changes) => this.#change(changes));
    /** @type {import("../lib/table.js").Table|null} */ this.table = null;
  }

  start() {
    replace(this.root, h("h1", { class: "unseen" }, "Rollouts"), this.filters.element, h("div", { class: "head" }, this.count, this.columnChoice), this.place);
    const narrow = matchMedia("(max-width: 720px)");
    narrow.addEventListener("change", () => this.#makeTable(narrow.matches), { signal: this.ctx.signal });
    this.#makeTable(narrow.matches);
    this.ctx.keys([
      { key: "j", text: "next row (Enter opens it)", run: () => this.table?.move(1) },
      { key: "k", text: "previous row", run: () => this.table?.move(-1) },
      { key: "/", text: "search the texts", run: () => this.filters.focusSearch() },
      { key: "[", text: "step before", run: () => this.#moveStep(-1) },
      { key: "]", text: "step after", run: () => this.#moveStep(1) },
    ]);
    this.ctx.refreshEvery(REFRESH_S, async () => {
      this.run = await get(`runs/${this.args[0]}/${this.args[1]}`, {}, this.ctx.signal);
      await this.table?.refresh();
    });
  }

  /** @param {boolean} isNarrow */
  #makeTable(isNarrow) {
    const at = this.query.get("at");
    const table = makeTable({
      label: "rollouts", signal: this.ctx.signal,
      columns: columnsFor(this.args, { isNarrow, hasText: this.query.has("text"), hasSplit: this.query.has("split") || this.run.splits.length < 2, hasStep: this.query.has("step"), metrics: this.#shownMetrics() }),
      order: { sort: this.query.get("sort") ?? "step", descending: this.query.get("sort") === null || this.query.get("descending") === "true" },
      onOrder: ({ sort, descending }) => this.#keep({ sort, descending: descending ? "true" : "false", at: null }),
      load: (offset, limit, order) => this.#load(offset, limit, order),
      rowHref: (row) => link("rollout", [...this.args, row.split, row.step, row.group, row.index]),
      whenEmpty: () => this.#whenEmpty(),
    });
    table.element.addEventListener("click", (event) => this.#keepPlace(event), { capture: true });
    this.table = table;
    replace(this.place, table.element);
    void table.reload().then(() => {
      if (at === null || !(Number(at) >= 0)) return;
      table.move(0);
      table.move(Number(at));
    });
  }

  /** Remembers the row that is opened, so that going back finds it. @param {Event} event */
  #keepPlace(event) {
    const row = event.target instanceof Element ? event.target.closest("tr[data-index]") : null;
    if (row !== null) this.#keep({ at: row.getAttribute("data-index") });
  }

  /** @param {number} offset @param {number} limit @param {{ sort: string|null, descending: boolean }} order */
  async #load(offset, limit, order) {
    const filters = Object.fromEntries(FILTERS.map((name) => [name, this.query.get(name)]));
    const answer = await get(`runs/${this.args[0]}/${this.args[1]}/rollouts`, { ...filters, ...sortOf(order.sort), descending: order.descending, offset, limit }, this.ctx.signal);
    if (offset === 0) this.filters.setChoices(answer.stops ?? [], answer.dropped ?? [], answer.metrics ?? []);
    if (offset === 0) this.#setMetrics(answer.metrics ?? []);
    this.#showCount(answer);
    return answer;
  }

  /** The task's metrics that have a column: those that the address names, else the one that the run is judged by and that of the filter. */
  #shownMetrics() {
    const asked = this.query.get("columns");
    if (asked !== null) return asked.split(",").filter(Boolean);
    const known = this.metrics ?? [];
    const first = [this.query.get("metric"), this.run.headline?.metric, ...known].filter((name) => name && known.includes(name));
    return [...new Set(/** @type {string[]} */ (first))].slice(0, DEFAULT_METRICS);
  }

  /** @param {string[]} metrics */
  #setMetrics(metrics) {
    if (this.metrics !== null && metrics.join("\n") === this.metrics.join("\n")) return;
    this.metrics = metrics;
    this.columnChoice.hidden = metrics.length === 0;
    const shown = this.#shownMetrics();
    replace(this.columnChoice, h("summary", null, "Columns"), h("fieldset", { class: "row" }, h("legend", { class: "unseen" }, "Metrics with a column"), metrics.map((name) => h("label", null,
      h("input", { type: "checkbox", checked: shown.includes(name), "on:change": (/** @type {Event} */ event) => this.#toggleMetric(name, /** @type {HTMLInputElement} */ (event.target).checked) }), visibleText(name)))));
    if (shown.length > 0) this.#makeTable(matchMedia("(max-width: 720px)").matches);
  }

  /** @param {string} name @param {boolean} isShown */
  #toggleMetric(name, isShown) {
    const others = this.#shownMetrics().filter((one) => one !== name);
    this.#keep({ columns: (isShown ? [...others, name] : others).join(",") || "," });
    this.#makeTable(matchMedia("(max-width: 720px)").matches);
  }

  /** @param {any} answer a `RolloutPage` */
  #showCount(answer) {
    const total = answer.is_total_exact ? plural(answer.total, "rollout") : `at least ${plural(answer.total, "rollout")}`;
    const isFiltered = FILTERS.some((name) => this.query.get(name));
    const indexing = answer.indexing ? `; the index is being made, ${formatPercent(answer.indexing.done_bytes / Math.max(1, answer.indexing.total_bytes))} of the files are read` : "";
    replace(this.count, total, isFiltered ? ` of ${formatCount(this.run.num_rollouts)}` : null, indexing);
  }

  /** @param {Record<string, string|null>} changes */
  #keep(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") this.query.delete(name);
      else this.query.set(name, value);
    }
    setQuery(changes);
  }

  /** Filters changed. @param {Record<string, string|null>} changes */
  #change(changes) {
    const columnsChange = ["text", "split", "step", "metric"].some((name) => name in changes && (changes[name] ?? "") !== (this.query.get(name) ?? "") && (name === "metric" || !changes[name] || !this.query.get(name)));
    this.#keep({ ...changes, at: null });
    this.filters.show(this.query);
    if (columnsChange) this.#makeTable(matchMedia("(max-width: 720px)").matches);
    else this.table?.reload().catch((error) => replace(this.count, failed(error)));
  }

  /** @param {1|-1} direction */
  #moveStep(direction) {
    const split = this.query.get("split");
    const ranges = split === null ? this.run.splits.flatMap((/** @type {any} */ entry) => entry.steps) : rangesOf(this.run, split);
    const now = this.query.get("step");
    const target = nextStep(ranges, now === null ? (direction > 0 ? -Infinity : Infinity) : Number(now), direction);
    if (target === null) this.ctx.announce(direction > 0 ? "This is the last step." : "This is the first step.");
    else this.#change({ step: String(target), group: null });
  }

  #whenEmpty() {
    if (!FILTERS.some((name) => this.query.get(name))) {
      return empty("No rollout has been logged yet.", "Rollouts appear here when the training script logs its first step (model.log, or model.train).");
    }
    return empty("No rollout matches this filter.", h("button", { type: "button", "on:click": () => this.#change(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "Show all rollouts"));
  }
}
