/** Ledger: what became of every sampled token, of one step or of all. */
import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { go, link } from "../lib/router.js";
import { empty, missing, showWhenLoaded } from "../lib/states.js";
import { ledgerFlow, ledgerTable } from "../parts/ledger_flow.js";

/**
 * @typedef {{ledger: import("../parts/ledger_flow.js").LedgerNumbers | null, first: number | null, last: number | null, num_steps: number, meanings: Record<string, string>}} LedgerAnswer
 */

/** @type {import("../lib/context.js").View} */
export const ledgerView = {
  title: (route) => `Ledger of ${route.args.slice(0, 2).join("/")}${route.args[2] === undefined ? "" : `, step ${route.args[2]}`}`,
  async show(root, route, ctx) {
    await new LedgerPage(root, route.args.slice(0, 2), readStepArgument(route.args[2]), ctx).start();
  },
};

class LedgerPage {
  /**
   * @param {HTMLElement} root
   * @param {string[]} run  project and name
   * @param {number | null} step  null for all steps
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, run, step, ctx) {
    this.root = root;
    this.run = run;
    this.step = step;
    this.ctx = ctx;
    /** @type {LedgerAnswer | null} */
    this.whole = null;
    this.shown = "";
  }

  async start() {
    await showWhenLoaded(this.root, this.ctx.signal, () => this.load(), (answer) => this.draw(answer));
    this.ctx.keys([
      { key: "[", text: "previous step", run: () => this.move(-1) },
      { key: "]", text: "next step", run: () => this.move(1) },
    ]);
    this.ctx.refreshEvery(5, async () => this.draw(await this.load()));
  }

  /** @returns {Promise<LedgerAnswer>} */
  async load() {
    const path = `runs/${this.run.join("/")}/ledger`;
    this.whole = await get(path, {}, this.ctx.signal);
    if (this.step === null) return /** @type {LedgerAnswer} */ (this.whole);
    return get(path, { first: this.step, last: this.step }, this.ctx.signal);
  }

  /** @param {LedgerAnswer} answer */
  draw(answer) {
    const text = JSON.stringify([answer, this.whole]);
    if (text === this.shown || (this.shown !== "" && this.root.contains(document.activeElement) && document.activeElement?.tagName === "INPUT")) return;
    this.shown = text;
    replace(this.root, this.head(), this.body(answer));
  }

  /** @param {LedgerAnswer} answer */
  body(answer) {
    if (this.whole?.first === null) return empty("No ledger yet.", "Each training step writes what became of the tokens that were sampled for it.");
    if (answer.ledger === null) return missing(`Step ${this.step} has no ledger: nothing was trained in it, or by supervised data only.`);
    return [
      ledgerFlow(answer.ledger, (part) => this.rolloutsOf(part)),
      h("div", { class: "scroll", tabindex: 0 }, ledgerTable(answer.ledger, answer.meanings)),
    ];
  }

  head() {
    const { first, last } = this.whole ?? { first: null, last: null };
    const input = h("input", { type: "number", min: first, max: last, value: this.step ?? "", placeholder: "all", "aria-label": "Step; empty for all steps", "on:change": () => this.open(readStepArgument(input.value)) });
    const isAll = this.step === null;
    return h("div", { class: "head" },
      h("div", { class: "row" },
        h("h1", null, isAll ? "Ledger" : `Ledger of step ${this.step}`),
        h("span", { class: "soft" }, isAll && first !== null ? `steps ${first} to ${last}, summed` : "")),
      first === null ? null : h("div", { class: "row" },
        h("button", { type: "button", disabled: this.target(-1) === null, "on:click": () => this.move(-1) }, "Previous"),
        h("label", null, "step", input),
        h("button", { type: "button", disabled: this.target(1) === null, "on:click": () => this.move(1) }, "Next"),
        isAll ? null : h("a", { href: link("ledger", this.run) }, "All steps"),
        isAll ? null : h("a", { href: link("tree", [...this.run, this.step ?? 0]) }, "Prefix tree")));
  }

  /**
   * The rollouts of a part of the flow; those that other models sampled cannot be listed.
   * @param {import("../parts/ledger_bar.js").LedgerPart} part
   */
  rolloutsOf(part) {
    if (part.label === "context") return null;
    return link("rollouts", this.run, { split: "train", step: this.step, dropped: part.reason ?? "none" });
  }

  /** @param {number} direction */
  target(direction) {
    const { first, last } = this.whole ?? { first: null, last: null };
    if (first === null || last === null) return null;
    if (this.step === null) return direction < 0 ? last : first;
    const next = Math.max(first, Math.min(last, this.step + direction));
    return (next - this.step) * direction > 0 || this.step > last || this.step < first ? next : null;
  }

  /** @param {number} direction */
  move(direction) {
    const next = this.target(direction);
    if (next !== null) this.open(next);
  }

  /** @param {number | null} step */
  open(step) {
    if (step !== this.step) go("ledger", step === null ? this.run : [...this.run, step]);
  }
}

/** @param {string | undefined} text */
function readStepArgument(text) {
  return text !== undefined && /^\d{1,9}$/.test(text) ? Number(text) : null;
}
