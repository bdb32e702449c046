// A group: its rollouts side by side, the best first, with the first place where each differs from the best.
// Message n of every rollout lies in the same row, so the page scrolls all of them together.

import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatNumber, formatSigned, plural } from "../lib/format.js";
import { go, link, setQuery } from "../lib/router.js";
import { empty, missing, showWhenLoaded } from "../lib/states.js";
import { aroundDifference, firstDifference, numAlikeItems, partsOf } from "../rollout/first_difference.js";
import { messageView, speakerOf, toolNamesOf } from "../rollout/message.js";
import { oneLine, reasonText, rewardStrip } from "../rollout/row_columns.js";
import { namedValue, saidNodes } from "../rollout/said_text.js";
import { addStepKeys } from "../rollout/step_keys.js";
import { visibleText } from "../lib/visible_text.js";

/** @typedef {import("../rollout/first_difference.js").Item} Item */
/** @typedef {import("../rollout/first_difference.js").Difference} Difference */

const AT_FIRST = 4;
const MOST_MESSAGES = 150;
const SPECIAL_WORDS = /** @type {Record<string, string>} */ ({ role: "the message itself", reasoning: "the reasoning", text: "the text" });

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
    if (rollouts.length <= 2) return;
    replace(this.choice, h("span", { class: "soft" }, `${this.shown.size} of ${rollouts.length} shown`), rollouts.map((/** @type {any} */ rollout, /** @type {number} */ place) => h("button", {
      type: "button", class: "choice-item", "aria-pressed": String(this.shown.has(place)), "on:click": () => this.#toggle(place),
    }, `${rollout.index}: ${formatNumber(rollout.reward)}`)));
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
    const conversations = /** @type {Item[][]} */ (rollouts.map((rollout) => rollout.histories[0]?.items ?? []));
    const numAlike = rollouts.length > 1 ? numAlikeItems(conversations) : 0;
    const end = Math.min(numAlike + MOST_MESSAGES, Math.max(...conversations.map((items) => items.length)));
    const base = rollouts[0];
    const columns = rollouts.map((rollout, place) => {
      const difference = place === 0 ? null : firstDifference(conversations[0], conversations[place]);
      return this.#column(rollout, conversations[place], { difference, isBase: place === 0, numAlike, end, base: conversations[0] });
    });
    const isStacked = this.narrow.matches;
    const grid = h("div", { class: "group-scroll", tabindex: 0, role: "region", style: { "--columns": columns.length, "--rows": Math.max(1, end - numAlike) } },
      isStacked ? null : h("div", { class: "group-heads" }, columns.map((column) => column.head)),
      h("div", { class: "group-columns" }, columns.map((column) => h("section", { class: "group-column", "aria-label": column.label }, isStacked ? column.head : null, column.cells))));
    replace(this.columns, numAlike > 0 ? this.#alike(conversations[0].slice(0, numAlike)) : null, grid,
      conversations.some((items) => items.length > end) ? h("p", { class: "soft" }, `The first ${MOST_MESSAGES} messages after the common ones are shown; a rollout's own page has all.`) : null);
    grid.setAttribute("aria-label", `${plural(columns.length, "rollout")}, compared with rollout ${base.index}`);
  }

  /** @param {Item[]} items the messages that all shown rollouts have alike */
  #alike(items) {
    const body = h("div", { class: "messages" });
    const details = h("details", { class: "alike" }, h("summary", null, `${plural(items.length, "message")} alike`), body);
    details.addEventListener("toggle", () => {
      if (details.open && body.childElementCount === 0) replace(body, items.map((item, number) => messageView(item, { number, toolNames: toolNamesOf(items) })));
    });
    return details;
  }

  /** @param {any} rollout @param {Item[]} items
   * @param {{ difference: Difference|null, isBase: boolean, numAlike: number, end: number, base: Item[] }} about */
  #column(rollout, items, about) {
    const toolNames = toolNamesOf(items);
    const href = link("rollout", [...this.run, rollout.split, rollout.step, rollout.group, rollout.index]);
    const { difference, numAlike } = about;
    const cells = items.slice(numAlike, about.end).map((item, place) => {
      const number = numAlike + place;
      const isSame = difference !== null && number < difference.item;
      return isSame ? h("p", { class: "same-as-best soft" }, `message ${number + 1} (${speakerOf(item)}) as in the best`)
        : messageView(item, { number, toolNames, difference: difference?.item === number ? difference : null });
    });
    const first = cells[(difference?.item ?? 0) - numAlike];
    const head = h("header", { class: "column-head" },
      h("div", { class: "row" }, h("a", { href }, `rollout ${rollout.index}`), h("strong", null, formatNumber(rollout.reward)),
          h("span", { class: "soft" }, `advantage ${formatSigned(rollout.advantage)}`),
          rollout.judge ? h("span", { class: "soft", title: oneLine(rollout.judge.explanation, 1000) }, `judge ${formatNumber(rollout.judge.score)}`) : null,
          rollout.outcome === "ok" ? null : h("span", { class: "bad" }, rollout.outcome.replace("_", " "))),
        about.isBase ? h("p", { class: "soft" }, "The others are compared with this one.") : differenceLine(difference, items, about.base, first));
    return { head, cells, label: `rollout ${rollout.index}` };
  }
}

/** Where a rollout leaves the best one, with the words there; a click goes to the message.
 * @param {Difference|null} difference @param {Item[]} items @param {Item[]} base @param {HTMLElement|undefined} message */
function differenceLine(difference, items, base, message) {
  if (difference === null) return h("p", { class: "soft" }, "No difference in its messages.");
  const textOf = (/** @type {Item|undefined} */ item) => (item ? partsOf(item).find((part) => part.key === difference.part)?.text : undefined);
  const [ours, theirs] = [textOf(items[difference.item]), textOf(base[difference.item])];
  const words = (/** @type {string|undefined} */ text) => (text === undefined ? "nothing" : h("code", { class: "words" }, oneLine(aroundDifference(text, difference.char, 24).after, 26) || "(end)"));
  const what = SPECIAL_WORDS[difference.part] ?? difference.part.replace(/^call (\d+)/, (_, number) => `call ${Number(number) + 1}:`);
  const jump = () => {
    message?.scrollIntoView({ block: "center" });
    message?.querySelector(".differs-here")?.classList.add("is-lit");
  };
  return h("p", { class: "differs-line" }, h("button", { type: "button", class: "as-link", "on:click": jump }, `differs in message ${difference.item + 1}`),
    difference.part === "role" ? null : [` (${what}): `, words(ours), " where the best has ", words(theirs)]);
}
