// Where two conversations part: the first item, the part of it (reasoning, text, a tool call) and the first character.

import { prettyArguments } from "../lib/visible_text.js";

/** @typedef {{ id: string|null, name: string, arguments: string }} ToolCall */
/** @typedef {{
 *   role: string, text: string|null, is_sampled?: boolean, reasoning?: string|null, tool_calls?: ToolCall[]|null, tool_call_id?: string|null,
 *   exchange_id?: string|null, policy_version?: number|null, finish_reason?: string|null, num_tokens?: number|null,
 *   started_at?: number|null, duration_s?: number|null }} Item  one message of a conversation */
/** @typedef {{ key: string, text: string }} Part  a text of an item: "role", "reasoning", "text", "call 0 name", ... */
/** @typedef {{ item: number, part: string, char: number }} Difference  `char` counts UTF-16 units of that part */

/** The texts that make up an item, in the order in which the model said them. Arguments that are JSON are indented alike, so
 * that only what they say counts.
 * @param {Item} item @returns {Part[]} */
export function partsOf(item) {
  const parts = [{ key: "role", text: item.role }];
  if (item.reasoning) parts.push({ key: "reasoning", text: item.reasoning });
  if (item.text) parts.push({ key: "text", text: item.text });
  (item.tool_calls ?? []).forEach((call, index) => {
    parts.push({ key: `call ${index} name`, text: call.name }, { key: `call ${index} arguments`, text: prettyArguments(call.arguments).text });
  });
  return parts;
}

/** The index of the first UTF-16 unit in which two texts differ, moved back to the start of a surrogate pair; null if equal.
 * @param {string} a @param {string} b @returns {number|null} */
export function firstCharDifference(a, b) {
  if (a === b) return null;
  const end = Math.min(a.length, b.length);
  let index = 0;
  while (index < end && a.charCodeAt(index) === b.charCodeAt(index)) index += 1;
  const before = index > 0 ? a.charCodeAt(index - 1) : 0;
  return before >= 0xd800 && before < 0xdc00 ? index - 1 : index;
}

/** Where `items` leaves `base`; null if the two say the same. An item that only one of them has differs in its role at 0.
 * @param {Item[]} base @param {Item[]} items @returns {Difference|null} */
export function firstDifference(base, items) {
  for (let item = 0; item < Math.max(base.length, items.length); item += 1) {
    if (item >= base.length || item >= items.length) return { item, part: "role", char: 0 };
    const [ours, theirs] = [partsOf(items[item]), partsOf(base[item])];
    for (let part = 0; part < Math.max(ours.length, theirs.length); part += 1) {
      const [our, their] = [ours[part], theirs[part]];
      if (our === undefined) return { item, part: ours[part - 1].key, char: ours[part - 1].text.length };
      if (their === undefined || our.key !== their.key) return { item, part: our.key, char: 0 };
      const char = firstCharDifference(our.text, their.text);
      if (char !== null) return { item, part: our.key, char };
    }
  }
  return null;
}

/** The number of items at the start that all conversations have alike.
 * @param {Item[][]} conversations @returns {number} */
export function numAlikeItems(conversations) {
  if (conversations.length === 0) return 0;
  const first = conversations[0];
  const rest = conversations.slice(1).map((items) => firstDifference(first, items)?.item ?? first.length);
  return Math.min(first.length, ...rest);
}

/** The text around a difference for one line: at most `width` characters on each side.
 * @param {string} text @param {number} char @param {number} width @returns {{ before: string, after: string }} */
export function aroundDifference(text, char, width) {
  const start = Math.max(0, char - width);
  const end = Math.min(text.length, char + width);
  return {
    before: (start > 0 ? "…" : "") + text.slice(start, char),
    after: text.slice(char, end) + (end < text.length ? "…" : ""),
  };
}
