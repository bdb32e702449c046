// The form that filters the table of rollouts. It holds no state of its own: it shows a query, and says what should change in it.

import { h, replace } from "../lib/dom.js";
import { visibleText } from "../lib/visible_text.js";

/** The filters of the answer `rollouts`, by their names in the address. */
export const FILTERS = ["split", "step", "group", "scenario", "outcome", "stop", "dropped", "min_reward", "max_reward", "metric", "min_metric", "max_metric", "text"];
const OUTCOMES = /** @type {[string, string][]} */ ([["", "any outcome"], ["ok", "ok"], ["policy_fault", "policy fault"], ["infra_fault", "infra fault"]]);
const SEARCH_AFTER_MS = 300;

export class RolloutFilters {
  /** @param {any} run a `RunDetail` @param {URLSearchParams} query
   * @param {(changes: Record<string, string|null>) => void} onChange */
  constructor(run, query, onChange) {
    this.onChange = onChange;
    this.splits = run.splits.map((/** @type {any} */ entry) => entry.split);
    this.stops = /** @type {string[]} */ ([]);
    this.dropped = /** @type {string[]} */ ([]);
    this.metrics = /** @type {string[]} */ ([]);
    this.controls = /** @type {Record<string, HTMLInputElement|HTMLSelectElement>} */ ({
      text: h("input", { type: "search", placeholder: "search the texts", "aria-label": "search the texts", title: "All words must occur. \"Two words\" in quotes are a phrase, word* is a beginning." }),
      split: this.#select("split"), step: this.#number("step", "step", 72), outcome: this.#select("outcome"),
      stop: this.#select("stop"), dropped: this.#select("dropped"),
      min_reward: this.#number("min_reward", "reward ≥", 104), max_reward: this.#number("max_reward", "≤", 64),
      metric: this.#select("metric"), min_metric: this.#number("min_metric", "≥", 64), max_metric: this.#number("max_metric", "≤", 64),
    });
    this.others = h("span", { class: "row" });
    this.element = h("form", { class: "filters", role: "search", "on:submit": (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#search();
    } }, ...Object.values(this.controls), this.others);
    this.controls.text.addEventListener("input", () => {
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.#search(), SEARCH_AFTER_MS);
    });
    /** @type {ReturnType<typeof setTimeout>|undefined} */ this.waiting = undefined;
    this.show(query);
  }

  focusSearch() {
    this.controls.text.focus();
    if (this.controls.text instanceof HTMLInputElement) this.controls.text.select();
  }

  #search() {
    clearTimeout(this.waiting);
    if (this.controls.text.value.trim() !== (this.query?.get("text") ?? "")) this.onChange({ text: this.controls.text.value.trim() || null });
  }

  /** @param {string} name */
  #select(name) {
    const select = h("select", { "aria-label": name.replace("_", " "), "on:change": () => this.onChange({ [name]: select.value || null, ...(name === "split" ? { group: null } : {}), ...(name === "metric" ? { min_metric: null, max_metric: null } : {}) }) });
    return select;
  }

  /** @param {string} name @param {string} placeholder @param {number} width px */
  #number(name, placeholder, width) {
    const input = h("input", { type: "number", step: name === "step" ? 1 : "any", placeholder, "aria-label": name.replace("_", " "), style: { width: `${width}px` },
      "on:change": () => this.onChange({ [name]: input.value || null, ...(name === "step" ? { group: null } : {}) }) });
    return input;
  }

  /** The values that the run's rollouts have. @param {string[]} stops @param {string[]} dropped @param {string[]} metrics */
  setChoices(stops, dropped, metrics) {
    if ([stops, dropped, metrics].join("\n") === [this.stops, this.dropped, this.metrics].join("\n")) return;
    [this.stops, this.dropped, this.metrics] = [stops, dropped, metrics];
    if (this.query) this.show(this.query);
  }

  /** Shows a query. @param {URLSearchParams} query */
  show(query) {
    this.query = query;
    const same = (/** @type {string[]} */ values) => values.map((value) => /** @type {[string, string]} */ ([value, value]));
    this.#options("split", [["", "all splits"], ...same(this.splits)]);
    this.#options("outcome", OUTCOMES);
    this.#options("metric", [["", "a metric"], ...same(this.metrics)]);
    for (const name of ["metric", "min_metric", "max_metric"]) this.controls[name].hidden = name === "metric" ? this.metrics.length === 0 : !query.has("metric");
    this.#options("stop", [["", "any stop"], ...same(this.stops)]);
    this.#options("dropped", [["", "dropped or not"], ["none", "not dropped"], ["any", "dropped"], ...same(this.dropped).map(([value]) => /** @type {[string, string]} */ ([value, `dropped: ${value.replaceAll("_", " ")}`]))]);
    for (const [name, control] of Object.entries(this.controls)) {
      if (control instanceof HTMLInputElement && control !== document.activeElement) control.value = query.get(name) ?? "";
      control.classList.toggle("is-set", query.has(name));
    }
    replace(this.others, ["group", "scenario"].filter((name) => query.has(name)).map((name) => h("button", {
      type: "button", title: "show all", "on:click": () => this.onChange({ [name]: null }),
    }, `${name} ${visibleText(query.get(name) ?? "")} ×`)),
    FILTERS.some((name) => query.has(name)) ? h("button", { type: "button", class: "quiet", "on:click": () => this.onChange(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "clear") : null);
  }

  /** @param {string} name @param {[string, string][]} options */
  #options(name, options) {
    const chosen = this.query?.get(name) ?? "";
    const known = options.some(([value]) => value === chosen) ? options : [...options, /** @type {[string, string]} */ ([chosen, chosen])];
    replace(this.controls[name], known.map(([value, text]) => h("option", { value }, visibleText(text))));
    this.controls[name].value = chosen;
  }
}
