// Loads the tokens of a path piece by piece, so that the first rows are on the page before the last have arrived.

import { get } from "../lib/api.js";
import { appendTokens, emptyPath } from "./token_signals.js";

const PIECE = 20000;

/** @typedef {import("./token_signals.js").PathTokens} PathTokens */
/** @typedef {{ tokens: PathTokens, paths: import("../rollout/branches.js").TokenPath[] }} LoadedPath */

/** Loads the first piece of a path.
 * @param {string} address @param {number} path @param {AbortSignal} signal @returns {Promise<LoadedPath>} */
export async function loadPathStart(address, path, signal) {
  const answer = await get(address, { path, first: 0, last: PIECE }, signal);
  const tokens = emptyPath(answer);
  appendTokens(tokens, answer);
  return { tokens, paths: answer.paths };
}

/** Loads the rest of a path, and calls `onPiece` with the first new token after each piece.
 * @param {string} address @param {PathTokens} tokens @param {AbortSignal} signal @param {(first: number) => void} onPiece */
export async function loadPathRest(address, tokens, signal, onPiece) {
  while (tokens.ids.length < tokens.numTokens && !signal.aborted) {
    const first = tokens.ids.length;
    const answer = await get(address, { path: tokens.path, first, last: first + PIECE }, signal);
    if (signal.aborted) return;
    if (answer.token_ids.length === 0) {
      tokens.numTokens = first;
      return;
    }
    appendTokens(tokens, answer);
    onPiece(first);
  }
}

/** The first token of an answer, or null while none of its tokens has arrived.
 * @param {PathTokens} tokens @param {string} exchange @returns {number|null} */
export function firstTokenOf(tokens, exchange) {
  return tokens.spans.find((span) => span.exchange_id === exchange)?.start ?? null;
}

/** The first token after `after` at which `words` begin, over the borders of tokens; goes on at the start; -1 if there is none.
 * @param {PathTokens} tokens @param {string} words @param {number} after @returns {number} */
export function findWords(tokens, words, after) {
  if (words === "") return -1;
  const sought = words.toLowerCase();
  /** @type {number[]} */
  const offsets = [];
  let joined = "";
  for (const text of tokens.texts) {
    offsets.push(joined.length);
    joined += lowerCase(text ?? "");
  }
  let at = joined.indexOf(sought, after < 0 ? 0 : (offsets[after + 1] ?? joined.length));
  if (at < 0) at = joined.indexOf(sought);
  return at < 0 ? -1 : tokenAtOffset(offsets, at);
}

/** Lower case that keeps the number of UTF-16 units, so that offsets hold. @param {string} text @returns {string} */
function lowerCase(text) {
  const lower = text.toLowerCase();
  return lower.length === text.length ? lower : text;
}

/** @param {number[]} offsets @param {number} at @returns {number} */
function tokenAtOffset(offsets, at) {
  let [low, high] = [0, offsets.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (offsets[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}
