/** Adds other runs to the panes of a run, up to six in all. */
import { get } from "../lib/api.js";
import { categorical } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";

const MAX_RUNS = 6;

export class RunPicker {
  /**
   * @param {string} own  the run whose page this is, "project/name"
   * @param {string[]} runs  further ones
   * @param {AbortSignal} signal
   * @param {(runs: string[]) => void} onChange
   */
  constructor(own, runs, signal, onChange) {
    this.own = own;
    this.runs = [...new Set(runs)].filter((run) => run !== own && /^[^/]+\/[^/]+$/.test(run)).slice(0, MAX_RUNS - 1);
    this.signal = signal;
    this.onChange = onChange;
    /** @type {string[]} */
    this.known = [];
    this.element = h("div", { class: "row" });
    this.draw();
    this.loadKnown();
  }

  async loadKnown() {
    const answer = await get("runs", {}, this.signal).catch(() => ({ runs: [] }));
    this.known = answer.runs.map((/** @type {any} */ run) => `${run.project}/${run.name}`);
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
    const choice = h("select", { "aria-label": "Add a run to the panes", "on:change": () => this.set([...this.runs, choice.value]) }, h("option", { value: "" }, "Add a run ..."), others.map((run) => h("option", { value: run }, run)));
    replace(this.element,
      this.runs.map((run, at) => h("button", { type: "button", title: `Remove ${run}`, "on:click": () => this.set(this.runs.filter((one) => one !== run)) }, h("span", { class: "chart-key", style: { "border-top-color": categorical(at + 1) } }), `${run} ×`)),
      others.length > 0 && this.runs.length < MAX_RUNS - 1 ? choice : null);
  }
}
