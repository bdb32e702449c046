/** One step in brief: where its tokens and its time went, and the ways to its rollouts. */
import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatSeconds } from "../lib/format.js";
import { link } from "../lib/router.js";
import { showWhenLoaded } from "../lib/states.js";
import { ledgerBar } from "./ledger_bar.js";

export class StepPanel {
  /**
   * @param {string[]} run  project and name
   * @param {AbortSignal} signal
   * @param {(step: number) => void} onStep
   */
  constructor(run, signal, onStep) {
    this.run = run;
    this.signal = signal;
    this.onStep = onStep;
    /** @type {any} */
    this.detail = null;
    this.element = h("section", { class: "step-panel", "aria-label": "One step" });
  }

  /** @param {number} step */
  async show(step) {
    await showWhenLoaded(this.element, this.signal, () => get(`runs/${this.run.join("/")}/steps/${step}`, {}, this.signal), (detail) => {
      this.detail = detail;
      this.draw();
    });
  }

  /** @param {-1 | 1} direction */
  move(direction) {
    const step = direction < 0 ? this.detail?.previous : this.detail?.next;
    if (step !== null && step !== undefined) this.onStep(step);
  }

  draw() {
    const { step, previous, next, ledger, seconds, num_groups: groups, num_rollouts: rollouts } = this.detail;
    const phases = phaseSeconds(seconds);
    replace(this.element,
      h("div", { class: "head" },
        h("div", { class: "row" },
          h("h2", null, `Step ${step}`),
          h("span", { class: "nowrap" }, this.button("Previous", previous), " ", this.button("Next", next)),
          h("a", { href: link("rollouts", this.run, { step }) }, `${formatCount(rollouts)} rollouts in ${formatCount(groups)} groups`),
          h("a", { href: link("tree", [...this.run, step]) }, "Prefix tree"),
          h("a", { href: link("ledger", [...this.run, step]) }, "Ledger")),
        h("dl", { class: "figures small" }, phases.map(([phase, value]) => h("div", { class: "pair" }, h("dt", null, phase), h("dd", null, formatSeconds(value)))))),
      ledger ? ledgerBar(ledger, link("ledger", [...this.run, step])) : h("p", { class: "soft small" }, "No ledger was recorded for this step."));
  }

  /**
   * @param {string} text
   * @param {number | null} step
   */
  button(text, step) {
    return h("button", { type: "button", disabled: step === null, "on:click": () => step !== null && this.onStep(step) }, text);
  }
}

/**
 * Times of a step by short names: "time/step_checkpoint_s" is "checkpoint".
 * @param {Record<string, number>} seconds  by metric
 * @returns {[string, number][]}
 */
export function phaseSeconds(seconds) {
  /** @type {Map<string, number>} */
  const phases = new Map();
  for (const [metric, value] of Object.entries(seconds)) {
    const name = metric.replace(/^time\//, "").replace(/^step_/, "").replace(/^(s\/)?gpu\//, "").replace(/_s$/, "").replaceAll("_", " ");
    if (!phases.has(name)) phases.set(name, value);
  }
  return [...phases];
}
