// One message of a conversation: who said it, reasoning, text, tool calls, and what is known about an answer of the policy.

import { copyButton } from "../lib/copy.js";
import { h } from "../lib/dom.js";
import { formatSeconds, plural } from "../lib/format.js";
import { saidNodes, saidText } from "./said_text.js";
import { prettyArguments, sizeOfText, visibleText } from "../lib/visible_text.js";

/** @typedef {import("./first_difference.js").Item} Item */
/** @typedef {import("./first_difference.js").ToolCall} ToolCall */
/** @typedef {import("./first_difference.js").Difference} Difference */
/** @typedef {{ number: number, tokensHref?: string|null, requestText?: (() => Promise<string>)|null, difference?: Difference|null, toolNames?: Map<string, string> }} MessageOptions
 *   `requestText`: makes a command line that asks for this answer again; `difference`: where this message leaves another rollout's; `toolNames`: name of the tool by id of the call */

const FOLDED_TOOL_RESULT = 1200;
const ROLE_WORDS = /** @type {Record<string, string>} */ ({ developer: "system" });

/** @param {Item} item @returns {string} "policy" for an answer that the model sampled, else the role, as text that can be shown */
export function speakerOf(item) {
  return isSampledItem(item) ? "policy" : (ROLE_WORDS[item.role] ?? visibleText(item.role).slice(0, 80));
}

/** @param {Item} item @returns {boolean} */
export function isSampledItem(item) {
  return item.is_sampled ?? (item.exchange_id !== null && item.exchange_id !== undefined);
}

/** @param {Item} item @param {MessageOptions} options @returns {HTMLElement} */
export function messageView(item, options) {
  const speaker = speakerOf(item);
  const known = ["system", "user", "policy", "assistant", "tool"].includes(speaker) ? speaker : "other";
  return h("article", { class: `message message-${known}`, id: `message-${options.number}`, "aria-label": `message ${options.number + 1}, ${speaker}` },
    h("header", { class: "message-head" },
      h("span", { class: "speaker", title: `message ${options.number + 1}` }, speaker),
      item.role === "tool" ? h("span", { class: "tool-of" }, saidNodes(options.toolNames?.get(item.tool_call_id ?? "") ?? item.tool_call_id ?? "")) : null,
      factsOf(item),
      isSampledItem(item) && options.tokensHref ? h("a", { class: "to-tokens", href: options.tokensHref }, "tokens") : null,
      options.requestText ? copyButton(options.requestText, "copy request") : null),
    h("div", { class: "message-body" }, bodyOf(item, options.difference ?? null)));
}

/** What is known about an answer: finish reason, tokens, the step that sampled it, seconds from the request to its end.
 * @param {Item} item @returns {HTMLElement|null} */
function factsOf(item) {
  const facts = [];
  if (item.finish_reason) facts.push(item.finish_reason);
  if (item.num_tokens !== null && item.num_tokens !== undefined) facts.push(plural(item.num_tokens, "token"));
  if (item.policy_version !== null && item.policy_version !== undefined) facts.push(`step ${item.policy_version}`);
  if (item.duration_s !== null && item.duration_s !== undefined) facts.push(formatSeconds(item.duration_s));
  return facts.length > 0 ? h("span", { class: "facts" }, facts.map((fact) => h("span", null, saidNodes(fact)))) : null;
}

/** @param {Item} item @param {Difference|null} difference @returns {HTMLElement[]} */
function bodyOf(item, difference) {
  const at = (/** @type {string} */ part) => (difference !== null && difference.part === part ? difference.char : null);
  const body = [];
  if (difference !== null && difference.part === "role") body.push(h("p", { class: "differs-note" }, "From here on the messages differ."));
  if (item.reasoning) body.push(reasoningView(item.reasoning, at("reasoning")));
  if (item.text) body.push(item.role === "tool" ? toolResult(item.text, at("text")) : saidText(item.text, { differsAt: at("text") }));
  (item.tool_calls ?? []).forEach((call, index) => body.push(toolCallView(call, at(`call ${index} name`), at(`call ${index} arguments`))));
  if (body.length === 0) body.push(h("p", { class: "soft" }, "(no text)"));
  return body;
}

/** @param {string} text @param {number|null} differsAt @returns {HTMLElement} */
function reasoningView(text, differsAt) {
  return h("details", { class: "reasoning", open: differsAt !== null }, h("summary", null, `reasoning, ${sizeOfText(text)}`), saidText(text, { differsAt }));
}

/** @param {string} text @param {number|null} differsAt @returns {HTMLElement} */
function toolResult(text, differsAt) {
  const pretty = prettyArguments(text);
  const limit = text.length > FOLDED_TOOL_RESULT || text.split("\n").length > 24 ? limitByLines(text, FOLDED_TOOL_RESULT / 2, 12) : FOLDED_TOOL_RESULT;
  const isStructured = pretty.isJson && /^\s*[[{]/.test(text) && differsAt === null && text.length <= FOLDED_TOOL_RESULT;
  return saidText(isStructured ? pretty.text : text, { limit: isStructured ? pretty.text.length : limit, differsAt, mono: true });
}

/** @param {string} text @param {number} characters @param {number} lines @returns {number} characters to show at first */
function limitByLines(text, characters, lines) {
  let end = -1;
  for (let line = 0; line < lines; line += 1) {
    end = text.indexOf("\n", end + 1);
    if (end < 0) return characters;
  }
  return Math.min(end, characters);
}

/** A tool call with its arguments: indented, or as they are where they are no JSON.
 * @param {ToolCall} call @param {number|null} nameDiffers @param {number|null} argumentsDiffer @returns {HTMLElement} */
function toolCallView(call, nameDiffers, argumentsDiffer) {
  const pretty = prettyArguments(call.arguments);
  return h("div", { class: "tool-call" },
    h("div", { class: "tool-call-head" },
      h("span", { class: nameDiffers === null ? "tool-name" : "tool-name differs" }, saidNodes(call.name || "(no name)")),
      pretty.isJson ? null : h("span", { class: "fault" }, "arguments are no JSON"),
      copyButton(call.arguments, "copy")),
    saidText(pretty.text, { limit: 3000, mono: true, differsAt: argumentsDiffer }));
}

/** Names of the called tools by the id of the call, so that a result can say whose it is.
 * @param {Item[]} items @returns {Map<string, string>} */
export function toolNamesOf(items) {
  const names = new Map();
  for (const item of items) for (const call of item.tool_calls ?? []) if (call.id) names.set(call.id, call.name);
  return names;
}
