// Rollouts side by side, message by message, with the first place where each differs from the first one.
// Message n of every rollout lies in the same row, so the page scrolls all of them together.

import { h, replace } from "../lib/dom.js";
import { formatNumber, formatSigned, plural } from "../lib/format.js";
import { aroundDifference, firstDifference, numAlikeItems, partsOf } from "./first_difference.js";
import { messageView, speakerOf, toolNamesOf } from "./message.js";
import { oneLine } from "./row_columns.js";

/** @typedef {import("./first_difference.js").Item} Item */
/** @typedef {import("./first_difference.js").Difference} Difference */
/** @typedef {{ rollout: any, href: string, label: string, head?: import("../lib/dom.js").Child }} Compared  a `RolloutDetail`, its page and its name in the head of the column */

const MOST_MESSAGES = 150;
const SPECIAL_WORDS = /** @type {Record<string, string>} */ ({ role: "the message itself", reasoning: "the reasoning", text: "the text" });

/** @param {any} rollout @returns {Item[]} */
export function mainItems(rollout) {
  return rollout.histories[0]?.items ?? [];
}

/** Columns of rollouts, of which the first is what the others are compared with.
 * @param {Compared[]} compared @param {{ isStacked: boolean, base: string }} options `base`: what the first is, as in "where BASE has"
 * @returns {import("../lib/dom.js").Child[]} */
export function sideBySide(compared, { isStacked, base }) {
  const conversations = compared.map(({ rollout }) => mainItems(rollout));
  const numAlike = compared.length > 1 ? numAlikeItems(conversations) : 0;
  const end = Math.min(numAlike + MOST_MESSAGES, Math.max(...conversations.map((items) => items.length)));
  const columns = compared.map((one, place) => {
    const difference = place === 0 ? null : firstDifference(conversations[0], conversations[place]);
    return column(one, conversations[place], { difference, isBase: place === 0, numAlike, end, base, baseItems: conversations[0] });
  });
  const grid = h("div", { class: "group-scroll", tabindex: 0, role: "region", "aria-label": `${plural(columns.length, "rollout")}, compared with ${base}`, style: { "--columns": columns.length, "--rows": Math.max(1, end - numAlike) } },
    isStacked ? null : h("div", { class: "group-heads" }, columns.map((one) => one.head)),
    h("div", { class: "group-columns" }, columns.map((one) => h("section", { class: "group-column", "aria-label": one.label }, isStacked ? one.head : null, one.cells))));
  return [numAlike > 0 ? alike(conversations[0].slice(0, numAlike)) : null, grid,
    conversations.some((items) => items.length > end) ? h("p", { class: "soft" }, `The first ${MOST_MESSAGES} messages after the common ones are shown; a rollout's own page has all.`) : null];
}

/** @param {Item[]} items the messages that all shown rollouts have alike */
function alike(items) {
  const body = h("div", { class: "messages" });
  const details = h("details", { class: "alike" }, h("summary", null, `${plural(items.length, "message")} alike`), body);
  details.addEventListener("toggle", () => {
    if (details.open && body.childElementCount === 0) replace(body, items.map((item, number) => messageView(item, { number, toolNames: toolNamesOf(items) })));
  });
  return details;
}

/** @param {Compared} compared @param {Item[]} items
 * @param {{ difference: Difference|null, isBase: boolean, numAlike: number, end: number, base: string, baseItems: Item[] }} about */
function column({ rollout, href, label, head: above }, items, about) {
  const toolNames = toolNamesOf(items);
  const { difference, numAlike } = about;
  const cells = items.slice(numAlike, about.end).map((item, place) => {
    const number = numAlike + place;
    const isSame = difference !== null && number < difference.item;
    return isSame ? h("p", { class: "same-as-best soft" }, `message ${number + 1} (${speakerOf(item)}) as in ${about.base}`)
      : messageView(item, { number, toolNames, difference: difference?.item === number ? difference : null });
  });
  const first = cells[(difference?.item ?? 0) - numAlike];
  const head = h("header", { class: "column-head" },
    h("div", { class: "row" }, h("a", { href }, label), h("strong", null, formatNumber(rollout.reward)),
        h("span", { class: "soft" }, `advantage ${formatSigned(rollout.advantage)}`),
        rollout.judge ? h("span", { class: "soft", title: oneLine(rollout.judge.explanation, 1000) }, `judge ${formatNumber(rollout.judge.score)}`) : null,
        rollout.outcome === "ok" ? null : h("span", { class: "bad" }, rollout.outcome.replace("_", " "))),
    above ?? null,
    about.isBase ? h("p", { class: "soft" }, "The others are compared with this one.") : differenceLine(difference, items, about.baseItems, { base: about.base, message: first }));
  return { head, cells, label };
}

/** Where a rollout leaves the first one, with the words there; a click goes to the message, where it is shown.
 * @param {Difference|null} difference @param {Item[]} items @param {Item[]} baseItems @param {{ base: string, message?: HTMLElement }} about */
export function differenceLine(difference, items, baseItems, { base, message }) {
  if (difference === null) return h("p", { class: "soft" }, "No difference in its messages.");
  const textOf = (/** @type {Item|undefined} */ item) => (item ? partsOf(item).find((part) => part.key === difference.part)?.text : undefined);
  const [ours, theirs] = [textOf(items[difference.item]), textOf(baseItems[difference.item])];
  const words = (/** @type {string|undefined} */ text) => (text === undefined ? "nothing" : h("code", { class: "words" }, oneLine(aroundDifference(text, difference.char, 24).after, 26) || "(end)"));
  const what = SPECIAL_WORDS[difference.part] ?? difference.part.replace(/^call (\d+)/, (_, number) => `call ${Number(number) + 1}:`);
  const place = `differs in message ${difference.item + 1}`;
  const jump = () => {
    message?.scrollIntoView({ block: "center" });
    message?.querySelector(".differs-here")?.classList.add("is-lit");
  };
  return h("p", { class: "differs-line" }, message ? h("button", { type: "button", class: "as-link", "on:click": jump }, place) : place,
    difference.part === "role" ? null : [` (${what}): `, words(ours), ` where ${base} has `, words(theirs)]);
}
