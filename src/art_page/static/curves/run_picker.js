/** Adds other runs, or groups of seeds, to the panes of a run. */
import { get } from "../lib/api.js";
import { categorical } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { isItem, itemName, MAX_ITEMS } from "./seeds.js";

export class RunPicker {
  /**
   * @param {string} own  the run whose page this is, "project/name"
   * @param {string[]} runs  further ones
   * @param {AbortSignal} signal
   * @param {(runs: string[]) => void} onChange
   */
  constructor(own, runs, signal, onChange) {
    this.own = own;
    this.runs = [...new Set(runs)].filter((run) => run !== own && isItem(run)).slice(0, MAX_ITEMS - 1);
    this.signal = signal;
    this.onChange = onChange;
    /** @type {string[]} */
    this.known = [];
    /** @type {Map<string, string>} names of groups by their items */
    this.names = new Map();
    this.element = h("div", { class: "row" });
    this.draw();
    this.loadKnown();
  }

  async loadKnown() {
    const answer = await get("runs", {}, this.signal).catch(() => ({ runs: [], groups: [] }));
    this.names = new Map(answer.groups.map((/** @type {any} */ group) => [`${group.project}/${group.runs.join(",")}`, `${group.project}/${group.name}, ${group.runs.length} seeds`]));
    this.known = [...this.names.keys(), ...answer.runs.map((/** @type {any} */ run) => `${run.project}/${run.name}`)];
    this.draw();
  }

  /** @param {string[]} runs */
  set(runs) {
    this.runs = runs;
    this.draw();
    this.onChange(runs);
  }

  draw() {
    const others = this.known.filter((run) => run !== this.own && !this.runs.includes(run));
    const choice = h("select", { "aria-label": "Add a run to the panes", "on:change": () => this.set([...this.runs, choice.value]) }, h("option", { value: "" }, "Add a run ..."), others.map((run) => h("option", { value: run }, this.names.get(run) ?? run)));
    replace(this.element,
      this.runs.map((run, at) => h("button", { type: "button", title: `Remove ${run}`, "on:click": () => this.set(this.runs.filter((one) => one !== run)) }, h("span", { class: "chart-key", style: { "border-top-color": categorical(at + 1) } }), `${this.names.get(run) ?? itemName(run)} ×`)),
      others.length > 0 && this.runs.length < MAX_ITEMS - 1 ? choice : null);
  }
}
