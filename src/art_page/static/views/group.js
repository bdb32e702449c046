// A group: its rollouts side by side, the best first, with the first place where each differs from the best; or a line for each.

import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatNumber, formatSigned } from "../lib/format.js";
import { go, link, setQuery } from "../lib/router.js";
import { empty, missing, showWhenLoaded } from "../lib/states.js";
import { firstDifference } from "../rollout/first_difference.js";
import { isSampledItem } from "../rollout/message.js";
import { oneLine, reasonText, rewardStrip } from "../rollout/row_columns.js";
import { namedValue, saidNodes } from "../rollout/said_text.js";
import { differenceLine, mainItems, sideBySide } from "../rollout/side_by_side.js";
import { addStepKeys } from "../rollout/step_keys.js";
import { visibleText } from "../lib/visible_text.js";

const AT_FIRST = 4;
const MOST_METRICS = 8;

/** @type {import("../lib/context.js").View} */
export const groupView = {
  title: (route) => `Group ${route.args.slice(2).join("/")} of ${route.args.slice(0, 2).join("/")}`,
  async show(root, route, ctx) {
    const [project, name, split, step, group] = route.args;
    await showWhenLoaded(root, ctx.signal, () => get(`runs/${project}/${name}/groups/${split}/${step}/${group}`, {}, ctx.signal), (answer) => {
      new GroupPage(root, route, ctx, answer).draw();
      addStepKeys(ctx, route, "group");
    });
  },
};

/** The rollouts to show at first, of a list from the best to the worst: all, or as many of the best as of the worst.
 * @param {number} count @param {number} limit @returns {number[]} */
export function shownAtFirst(count, limit) {
  const all = Array.from({ length: count }, (_, place) => place);
  return count <= limit ? all : [...all.slice(0, Math.ceil(limit / 2)), ...all.slice(count - Math.floor(limit / 2))];
}

class GroupPage {
  /** @param {HTMLElement} root @param {import("../lib/router.js").Route} route @param {import("../lib/context.js").Context} ctx @param {any} answer */
  constructor(root, route, ctx, answer) {
    this.root = root;
    this.run = route.args.slice(0, 2);
    this.key = route.args.slice(2);
    this.ctx = ctx;
    this.answer = answer;
    const asked = (route.query.get("show") ?? "").split(",").filter((part) => part !== "").map(Number);
    const places = asked.map((index) => answer.rollouts.findIndex((/** @type {any} */ rollout) => rollout.index === index)).filter((place) => place >= 0);
    /** @type {Set<number>} places in the list of rollouts */
    this.shown = new Set(places.length > 0 ? places : shownAtFirst(answer.rollouts.length, AT_FIRST));
    this.isCompact = route.query.get("form") === "compact";
    this.choice = h("div", { class: "choice", role: "group", "aria-label": "rollouts to show" });
    this.columns = h("div", { class: "group-place" });
    this.narrow = matchMedia("(max-width: 720px)");
    this.narrow.addEventListener("change", () => this.#drawColumns(), { signal: ctx.signal });
  }

  draw() {
    const { answer } = this;
    if (answer.rollouts.length === 0) {
      replace(this.root, this.#header(), empty("This group has no rollout.", "All of them failed before they had a trajectory."));
      return;
    }
    replace(this.root, this.#header(), answer.missing ? missing(answer.missing) : null, this.choice, this.columns);
    this.#drawChoice();
    this.#drawColumns();
    this.ctx.keys([
      { key: "j", text: "next group of the step", run: () => void this.#move(1) },
      { key: "k", text: "previous group of the step", run: () => void this.#move(-1) },
    ]);
  }

  /** @param {number} by */
  async #move(by) {
    const [split, step, group] = this.key;
    const target = Number(group) + by;
    const rows = target < 0 ? { total: 0 } : await get(`runs/${this.run[0]}/${this.run[1]}/rollouts`, { split, step, group: target, limit: 1 }, this.ctx.signal);
    if (rows.total > 0) go("group", [...this.run, split, step, target]);
    else this.ctx.announce(by > 0 ? "This is the last group of the step." : "This is the first group of the step.");
  }

  #header() {
    const { answer } = this;
    const [split, step, group] = this.key;
    const rewards = answer.rollouts.map((/** @type {any} */ rollout) => rollout.reward);
    const metrics = Object.entries(answer.metrics).filter(([, value]) => value !== null);
    return h("header", { class: "rollout-head" },
      h("h1", null, saidNodes(oneLine(answer.scenario ?? `group ${group}`, 300))),
      h("nav", { class: "places", "aria-label": "places of this group" },
        h("a", { href: link("rollouts", this.run, { split, step }) }, `${visibleText(split)} step ${step}`), h("span", null, `group ${group}`),
        h("a", { href: link("rollouts", this.run, { split, step, group }) }, "as a table"), h("a", { href: link("tree", [...this.run, step]) }, "prefix tree")),
      h("dl", { class: "facts-line", tabindex: 0 },
        namedValue("rollouts", String(answer.num_rollouts ?? answer.rollouts.length)), namedValue("rewards, best first", rewardStrip(rewards, -1)),
        answer.dropped_because ? namedValue("dropped because", reasonText(answer.dropped_because)) : null,
        metrics.slice(0, 8).map(([name, value]) => namedValue(saidNodes(name), formatNumber(/** @type {number} */ (value))))));
  }

  #drawChoice() {
    const { rollouts } = this.answer;
    const form = h("button", { type: "button", "aria-pressed": String(this.isCompact), title: "a line for each rollout", "on:click": () => this.#setForm(!this.isCompact) }, "Compact");
    if (this.isCompact || rollouts.length <= 2) {
      replace(this.choice, form);
      return;
    }
    replace(this.choice, form, h("span", { class: "soft" }, `${this.shown.size} of ${rollouts.length} shown`), rollouts.map((/** @type {any} */ rollout, /** @type {number} */ place) => h("button", {
      type: "button", class: "choice-item", "aria-pressed": String(this.shown.has(place)), "on:click": () => this.#toggle(place),
    }, `${rollout.index}: ${formatNumber(rollout.reward)}`)));
  }

  /** @param {boolean} isCompact */
  #setForm(isCompact) {
    this.isCompact = isCompact;
    setQuery({ form: isCompact ? "compact" : null });
    this.#drawChoice();
    this.#drawColumns();
  }

  /** @param {number} place */
  #toggle(place) {
    if (!this.shown.delete(place)) this.shown.add(place);
    if (this.shown.size === 0) this.shown.add(0);
    const indices = [...this.shown].sort((a, b) => a - b).map((at) => this.answer.rollouts[at].index);
    setQuery({ show: indices.join(",") });
    this.#drawChoice();
    this.#drawColumns();
  }

  #drawColumns() {
    const rollouts = [...this.shown].sort((a, b) => a - b).map((place) => this.answer.rollouts[place]);
    if (this.isCompact) {
      replace(this.columns, this.#compactTable());
      return;
    }
    replace(this.columns, sideBySide(rollouts.map((rollout) => ({ rollout, href: this.#hrefOf(rollout), label: `rollout ${rollout.index}` })), { isStacked: this.narrow.matches, base: "the best" }));
  }

  /** @param {any} rollout */
  #hrefOf(rollout) {
    return link("rollout", [...this.run, rollout.split, rollout.step, rollout.group, rollout.index]);
  }

  /** All rollouts, a line each: numbers, where it leaves the best, and what it said last. */
  #compactTable() {
    const { rollouts } = this.answer;
    const metrics = [...new Set(rollouts.flatMap((/** @type {any} */ rollout) => Object.keys(rollout.metrics)))].slice(0, MOST_METRICS);
    const number = (/** @type {import("../lib/dom.js").Child} */ text) => h("td", { class: "number" }, text);
    const best = mainItems(rollouts[0]);
    const titles = ["rollout", "reward", "advantage", ...metrics.map((name) => oneLine(name, 40)), "turns", "tokens", "stop", "leaves the best", "said last"];
    return h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "compact-group" },
      h("thead", null, h("tr", null, titles.map((title, at) => h("th", { scope: "col", class: at > 0 && at < metrics.length + 5 ? "number" : null }, title)))),
      h("tbody", null, rollouts.map((/** @type {any} */ rollout, /** @type {number} */ place) => {
        const items = mainItems(rollout);
        const last = items.findLast(isSampledItem);
        const said = last ? [last.text, ...(last.tool_calls ?? []).map((call) => `${call.name} ${call.arguments}`)].filter(Boolean).join(" ") : "";
        return h("tr", { class: rollout.outcome === "ok" ? null : "has-fault" },
          h("td", null, h("a", { href: this.#hrefOf(rollout) }, `rollout ${rollout.index}`)), number(formatNumber(rollout.reward)), number(formatSigned(rollout.advantage)),
          metrics.map((name) => number(formatNumber(rollout.metrics[name] ?? null))), number(String(rollout.num_turns)), number(formatCount(rollout.num_tokens)), h("td", null, oneLine(rollout.stop)),
          h("td", null, place === 0 ? h("span", { class: "soft" }, "is the best") : differenceLine(firstDifference(best, items), items, best, { base: "the best" })),
          h("td", { class: "said-last", title: oneLine(said, 600) }, oneLine(said, 120) || "-"));
      }))));
  }
}
