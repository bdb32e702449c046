/** Two checkpoints on the same scenarios: the paired difference, and the scenarios that changed most. */
import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatBounds, formatFixed, formatInterval, formatSigned, plural } from "../lib/format.js";
import { link, setQuery } from "../lib/router.js";
import { missing, showWhenLoaded } from "../lib/states.js";
import { slopeChart } from "./slopes.js";

const PAGE = 100;

export class CheckpointComparison {
  /**
   * @param {string[]} run
   * @param {string | null} split
   * @param {AbortSignal} signal
   */
  constructor(run, split, signal) {
    this.run = run;
    this.isSplitChosen = split !== null;
    this.split = split ?? "val";
    this.signal = signal;
    this.steps = "";
    this.element = h("section", { class: "comparison", "aria-label": "Comparison of two checkpoints" });
  }

  /**
   * @param {number} a
   * @param {number} b
   */
  async show(a, b) {
    await showWhenLoaded(this.element, this.signal, () => this.fetch(a, b, 0), (answer) => this.draw(answer));
  }

  /**
   * @param {number} a
   * @param {number} b
   * @param {number} offset
   */
  fetch(a, b, offset) {
    return get(`runs/${this.run.join("/")}/checkpoints/compare`, { a, b, split: this.split, offset, limit: PAGE }, this.signal);
  }

  /** @param {any} answer */
  draw(answer) {
    const { a, b, scenarios, num_scenarios: total, splits } = answer;
    if (total === 0 && !this.isSplitChosen && splits.length > 0 && !splits.includes(this.split)) {
      this.split = splits[0];
      this.show(a, b);
      return;
    }
    const options = [...new Set([this.split, ...splits])];
    const choice = h("select", { "aria-label": "Split", "on:change": () => {
      this.split = choice.value;
      this.isSplitChosen = true;
      setQuery({ split: choice.value });
      this.show(a, b);
    } }, options.map((split) => h("option", { value: split, selected: split === this.split }, split)));
    const head = h("div", { class: "row" }, h("h2", null, `Step ${b} against step ${a}`), h("label", null, "on ", choice));
    if (total === 0) {
      replace(this.element, head, missing(answer.missing ?? `The two steps have no scenario of ${this.split} in common.`));
      return;
    }
    const rows = h("tbody", null, scenarios.map((/** @type {any} */ one) => this.row(one)));
    replace(this.element, head, this.summary(answer), answer.missing ? missing(answer.missing) : null,
      h("div", { class: "comparison-body" }, slopeChart(scenarios, a, b),
        h("div", { class: "scroll", tabindex: 0 },
          h("table", null, h("thead", null, h("tr", null, h("th", { scope: "col" }, "Scenario"), [`Step ${a}`, `Step ${b}`, "Difference"].map((title) => h("th", { scope: "col", class: "number" }, title)))), rows),
          scenarios.length < total ? this.moreButton(answer, rows) : null)));
  }

  /** @param {any} answer */
  summary({ metric, a, b, before, after, difference, num_scenarios: total, num_better: better, num_worse: worse }) {
    const known = difference.low !== null;
    const isClear = known && (difference.low > 0 || difference.high < 0);
    const verdict = !known ? "too few scenarios to tell" : !isClear ? "no clear difference" : difference.mean > 0 ? "better" : "worse";
    return h("dl", { class: "figures" },
      h("div", null, h("dt", null, `${metric} at step ${a}`), h("dd", null, formatInterval(before, 3))),
      h("div", null, h("dt", null, `${metric} at step ${b}`), h("dd", null, formatInterval(after, 3))),
      h("div", null, h("dt", null, `paired difference of ${metric}`), h("dd", null, formatSigned(difference.mean), " ", h("span", { class: "soft" }, known ? `${formatBounds(difference.low, difference.high)} ` : ""), h("span", { class: isClear ? (difference.mean > 0 ? "good" : "bad") : "soft" }, verdict))),
      h("div", null, h("dt", null, "scenarios"), h("dd", null, plural(total, "scenario"))),
      h("div", null, h("dt", null, "better, worse, the same"), h("dd", null, `${better}, ${worse}, ${total - better - worse}`)));
  }

  /**
   * @param {any} answer
   * @param {HTMLElement} rows
   */
  moreButton(answer, rows) {
    const button = h("button", { type: "button", "on:click": async () => {
      button.disabled = true;
      const more = await this.fetch(answer.a, answer.b, rows.children.length);
      rows.append(...more.scenarios.map((/** @type {any} */ one) => this.row(one)));
      button.disabled = false;
      if (more.scenarios.length === 0 || rows.children.length >= answer.num_scenarios) button.remove();
    } }, "Show more");
    return button;
  }

  /** @param {any} change */
  row({ scenario, a, b, difference, rollouts_a: before, rollouts_b: after }) {
    return h("tr", { "on:mouseenter": () => this.mark(scenario), "on:focusin": () => this.mark(scenario) },
      h("td", { class: "scenario" }, scenario),
      h("td", { class: "number" }, this.groupLink(a, before)),
      h("td", { class: "number" }, this.groupLink(b, after)),
      h("td", { class: difference > 0 ? "number good" : difference < 0 ? "number bad" : "number soft" }, formatSigned(difference)));
  }

  /**
   * The mean of a scenario, as a link to the rollouts that it is the mean of.
   * @param {{mean: number, num: number}} reward
   * @param {any[]} rollouts
   */
  groupLink(reward, rollouts) {
    const [first] = rollouts;
    if (!first) return formatFixed(reward.mean);
    const address = [...this.run, first.split, first.step, first.group];
    const href = rollouts.length > 1 ? link("group", address) : link("rollout", [...address, first.index]);
    return h("a", { href, title: `${plural(reward.num, "rollout")} of step ${first.step}` }, formatFixed(reward.mean));
  }

  /** @param {string} scenario  whose slope is drawn bold */
  mark(scenario) {
    for (const line of this.element.querySelectorAll(".slope")) line.classList.toggle("is-lit", line.getAttribute("data-scenario") === scenario);
  }
}
