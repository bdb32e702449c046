// The tab "conversation": the messages of one history of a rollout, as a person reads them.

import { copyButton } from "../lib/copy.js";
import { h, replace } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { empty } from "../lib/states.js";
import { messagesText } from "./copies.js";
import { messageView, toolNamesOf } from "./message.js";
import { saidNodes, saidText } from "./said_text.js";

/** @typedef {{ name: string, items: import("./first_difference.js").Item[],
 *   tools: { name: string, description: string|null, parameters: any }[] }} Conversation */

const AT_ONCE = 200;

/** @param {HTMLElement} root @param {Conversation[]} histories
 * @param {{ history: number, chooseHistory: (history: number) => void, tokensHref: (exchange: string) => string, requestText: ((exchange: string) => Promise<string>)|null }} options */
export function showConversation(root, histories, options) {
  const conversation = histories[options.history] ?? histories[0];
  if (conversation === undefined || conversation.items.length === 0) {
    replace(root, historyChoice(histories, options), empty("This rollout has no message.", "A rollout that failed before its first request leaves none; the tab record has its error and logs."));
    return;
  }
  const list = h("div", { class: "messages" });
  const copy = h("div", { class: "row conversation-tools" }, copyButton(() => messagesText(conversation.items), "copy messages"));
  replace(root, historyChoice(histories, options), copy, toolsView(conversation.tools), list);
  addMessages(list, conversation.items, options);
}

/** @param {Conversation[]} histories @param {{ history: number, chooseHistory: (history: number) => void }} options */
function historyChoice(histories, options) {
  if (histories.length < 2) return null;
  return h("div", { class: "choice", role: "group", "aria-label": "conversation" },
    h("span", { class: "soft" }, `${histories.length} conversations`),
    histories.map((history, index) => h("button", {
      type: "button", class: "choice-item", "aria-pressed": String(index === options.history), "on:click": () => options.chooseHistory(index),
    }, saidNodes(history.name), h("span", { class: "soft" }, ` ${history.items.length}`))));
}

/** @param {HTMLElement} list @param {import("./first_difference.js").Item[]} items
 * @param {{ tokensHref: (exchange: string) => string, requestText: ((exchange: string) => Promise<string>)|null }} options */
function addMessages(list, items, { tokensHref, requestText }) {
  const toolNames = toolNamesOf(items);
  let shown = 0;
  const more = h("button", { type: "button", class: "more" });
  const addSome = () => {
    const end = Math.min(items.length, shown + AT_ONCE);
    for (let number = shown; number < end; number += 1) {
      const exchange = items[number].exchange_id;
      list.append(messageView(items[number], { number, toolNames, tokensHref: exchange ? tokensHref(exchange) : null, requestText: exchange && requestText ? () => requestText(exchange) : null }));
    }
    shown = end;
    if (shown < items.length) {
      more.textContent = `show the next ${Math.min(AT_ONCE, items.length - shown)} of ${plural(items.length, "message")}`;
      list.append(more);
    } else more.remove();
  };
  more.addEventListener("click", addSome);
  addSome();
}

/** @param {Conversation["tools"]} tools */
function toolsView(tools) {
  if (tools.length === 0) return null;
  return h("details", { class: "tools" },
    h("summary", null, `${plural(tools.length, "tool")} offered`),
    tools.map((tool) => h("div", { class: "tool-offered" },
      h("span", { class: "tool-name" }, saidNodes(tool.name)),
      tool.description ? saidText(tool.description, { limit: 600 }) : null,
      tool.parameters ? h("details", null, h("summary", null, "parameters"), saidText(JSON.stringify(tool.parameters, null, 2), { mono: true })) : null)));
}
