// The panel about one token: its id and text, every value that is known of it, and why the others are not.

import { h } from "../lib/dom.js";
import { formatCount, formatNumber, formatSigned } from "../lib/format.js";
import { namedValue, saidNodes } from "../rollout/said_text.js";
import { visibleText } from "../lib/visible_text.js";
import { SIGNALS, maskOf, whyMissing } from "./token_signals.js";

/** The text of a token with every character visible, in quotes. @param {string|null} text @returns {string} */
export function quotedToken(text) {
  if (text === null) return "no text";
  if (text === "") return "a part of the next character";
  return `"${visibleText(text.replace(/\r/g, "‹CR›")).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·")}"`;
}

/** @param {import("./token_signals.js").PathTokens} tokens @param {number|null} token @returns {HTMLElement} */
export function tokenPanel(tokens, token) {
  if (token === null || token >= tokens.ids.length) {
    return h("aside", { class: "token-panel", "aria-label": "this token" }, h("p", { class: "soft" }, "Point at a token, or move with the arrow keys, to see what is known about it."));
  }
  const span = tokens.spans[tokens.spanOf[token]];
  /** @type {Map<string, string[]>} names of signals by the reason why they are not known */
  const gaps = new Map();
  const rows = [];
  for (const signal of SIGNALS) {
    if (signal.kind === "category") continue;
    const value = tokens.values[signal.key]?.[token];
    if (value === null || value === undefined) addTo(gaps, whyMissing(signal, tokens, token), signal.label);
    else rows.push(namedValue(signal.label, signal.key === "advantage" ? formatSigned(value, 3) : formatNumber(value), signal.about));
    if (signal.key === "sampling_logprob" && typeof value === "number") rows.push(namedValue("sampler probability", formatNumber(Math.exp(value))));
  }
  const weight = tokens.values.weight?.[token];
  if (weight !== null && weight !== undefined && weight !== 0) rows.push(namedValue("weight", weightText(weight), "What its part of the loss is multiplied by."));
  return h("aside", { class: "token-panel", "aria-label": "this token" },
    h("p", { class: "token-title" }, h("strong", { class: "mono" }, saidNodes(quotedToken(tokens.texts[token]))), tokens.isSpecial[token] ? h("span", { class: "chip" }, "special") : null),
    h("dl", { class: "facts-list" },
      namedValue("id", tokens.ids[token] === null ? "not known" : String(tokens.ids[token])),
      namedValue("place", `${formatCount(token + 1)} of ${formatCount(tokens.numTokens)}`),
      namedValue("role", saidNodes(span?.role ?? "not known")),
      rows,
      namedValue("learnt", span === undefined ? "not known" : span.trained ? "yes" : saidNodes(`no: ${maskOf(span)}`)),
      span?.policy_version !== null && span?.policy_version !== undefined ? namedValue("policy version", `step ${span.policy_version}`) : null),
    alternativesTable(tokens.alternatives[token] ?? [], tokens.ids[token]),
    [...gaps].map(([reason, labels]) => h("p", { class: "soft" }, `No ${labels.join(", ")}: `, saidNodes(reason.charAt(0).toLowerCase() + reason.slice(1)))));
}

/** The most likely tokens at this place, where the server records them (`record_alternatives`).
 * @param {[number, string|null, number][]} best id, text and log-prob @param {number|null} drawn @returns {HTMLElement|null} */
function alternativesTable(best, drawn) {
  if (best.length === 0) return null;
  return h("table", { class: "alternatives" },
    h("caption", {}, "most likely here"),
    h("tbody", {}, best.map(([id, text, logprob]) => h("tr", { class: id === drawn ? "is-drawn" : null },
      h("th", { scope: "row", class: "mono" }, saidNodes(text === null ? String(id) : quotedToken(text))),
      h("td", { class: "number" }, formatNumber(Math.exp(logprob)))))));
}

/** @param {Map<string, string[]>} gaps @param {string} reason @param {string} label */
function addTo(gaps, reason, label) {
  gaps.set(reason, [...(gaps.get(reason) ?? []), label]);
}

/** @param {number} weight @returns {string} a weight such as 1/412 as a fraction where it is one */
export function weightText(weight) {
  const inverse = 1 / weight;
  const whole = Math.round(inverse);
  return whole > 1 && Math.abs(inverse - whole) < 0.002 * whole ? `1/${formatCount(whole)}` : formatNumber(weight);
}
