/** The list of all metrics of a run, with a search; what is ticked is drawn. */
import { h, replace } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { MAX_PANES } from "./curve_settings.js";
import { bySection, nameMatcher } from "./metric_search.js";

/** @typedef {{name: string, unit: string | null, meaning: string | null, num_points: number, has_band: boolean}} Metric */

export class MetricList {
  /**
   * @param {{text: string, chosen: string[], onChange: (chosen: string[]) => void, onSearch: (text: string) => void}} options
   */
  constructor({ text, chosen, onChange, onSearch }) {
    this.chosen = new Set(chosen);
    this.onChange = onChange;
    /** @type {Metric[]} */
    this.metrics = [];
    this.search = h("input", { type: "search", placeholder: "Search: words or regex", "aria-label": "Search metrics", value: text, "on:input": () => {
      onSearch(this.search.value);
      this.draw();
    } });
    this.count = h("p", { class: "small soft", "aria-live": "polite" });
    this.full = h("p", { class: "small note", hidden: true }, `${MAX_PANES} metrics at most: untick one to add another.`);
    this.list = h("div", { class: "metric-sections" });
    const clear = h("button", { type: "button", class: "quiet small", "on:click": () => this.set([]) }, "Clear all");
    this.element = h("div", { class: "metric-list" }, this.search, h("div", { class: "head" }, this.count, clear), this.full, this.list);
  }

  /** @param {Metric[]} metrics */
  fill(metrics) {
    const isSame = metrics.length === this.metrics.length && metrics.every((metric, at) => metric.name === this.metrics[at].name);
    this.metrics = metrics;
    if (!isSame) this.draw();
  }

  draw() {
    const matches = nameMatcher(this.search.value);
    const shown = this.metrics.filter((metric) => matches(metric.name));
    this.count.textContent = this.search.value ? `${shown.length} of ${plural(this.metrics.length, "metric")}` : plural(this.metrics.length, "metric");
    replace(this.list, bySection(shown).map(([section, metrics]) => h("fieldset", null, h("legend", null, section), metrics.map((metric) => this.item(metric, section)))));
    this.limit();
  }

  /** When as many are ticked as can be drawn, no further one can be. */
  limit() {
    const isFull = this.chosen.size >= MAX_PANES;
    for (const box of this.list.querySelectorAll("input")) box.disabled = isFull && !box.checked;
    this.full.hidden = !isFull;
  }

  /**
   * @param {Metric} metric
   * @param {string} section
   */
  item(metric, section) {
    const onTick = (/** @type {Event} */ event) => this.tick(metric.name, /** @type {HTMLInputElement} */ (event.target).checked);
    const label = metric.name.startsWith(`${section}/`) ? metric.name.slice(section.length + 1) : metric.name;
    return h("label", { title: [metric.name, metric.meaning].filter(Boolean).join(": ") }, h("input", { type: "checkbox", checked: this.chosen.has(metric.name), "on:change": onTick }), h("span", null, label));
  }

  /**
   * @param {string} name
   * @param {boolean} isOn
   */
  tick(name, isOn) {
    if (isOn) this.chosen.add(name);
    else this.chosen.delete(name);
    this.limit();
    this.onChange([...this.chosen]);
  }

  /** @param {string[]} names */
  set(names) {
    this.chosen = new Set(names);
    this.draw();
    this.onChange(names);
  }
}
