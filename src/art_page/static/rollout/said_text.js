// Texts of people, models and tools on the page: text nodes only, marks for hidden characters, long texts folded.

import { h, replace } from "../lib/dom.js";
import { beginningOf, sizeOfText, visiblePieces, visibleText } from "../lib/visible_text.js";

const MAX_MARKS = 500;
const MORE = 100000;
const BLOCK = 2000;

/** Nodes of a text: ordinary runs as text, marks of hidden characters in another colour.
 * A very long line becomes several elements, because the browser lays out one endless word slowly.
 * @param {string} text @returns {(string|HTMLElement)[]} */
export function saidNodes(text) {
  const pieces = visiblePieces(text);
  if (pieces.length > 2 * MAX_MARKS) return blocksOf(visibleText(text));
  return pieces.flatMap((piece) => (piece.isMark ? [h("span", { class: "hidden-char" }, piece.text)] : blocksOf(piece.text)));
}

/** @param {string} text @returns {(string|HTMLElement)[]} */
function blocksOf(text) {
  if (text.length <= BLOCK * 4 || !/[^\s]{2000}/.test(text)) return [text];
  const blocks = [];
  for (let start = 0; start < text.length; ) {
    const block = beginningOf(text.slice(start), BLOCK);
    blocks.push(h("span", { class: "text-block" }, block));
    start += block.length;
  }
  return blocks;
}

/** @typedef {{ limit?: number, differsAt?: number|null, mono?: boolean }} SaidOptions
 *  `limit`: characters shown at first; `differsAt`: UTF-16 unit at which the text leaves the text that it is compared with */

/** Whether a text has lines that only read well below each other: at least three in a row of one length, of which most characters stand
 * apart from words, or a table of | or of box-drawing characters.
 * @param {string} text @returns {boolean} */
export function isBoard(text) {
  const lines = text.slice(0, 4000).split("\n").map((line) => line.trimEnd());
  return lines.some((line, at) => {
    const block = lines.slice(at, at + 3);
    if (block.length < 3 || block.some((one) => one.length !== line.length) || line.length < 2) return false;
    return block.every((one) => /[\u2500-\u257f|]/.test(one) || !/[a-z]{3}/i.test(one));
  });
}

/** A text as people read it, folded to its beginning if it is longer than `limit`.
 * @param {string} text @param {SaidOptions} [options] @returns {HTMLElement} */
export function saidText(text, options = {}) {
  const differsAt = options.differsAt ?? null;
  const root = h("div", { class: options.mono || isBoard(text) ? "said said-mono" : "said", dir: "auto" });
  let shown = Math.max(options.limit ?? 6000, differsAt === null ? 0 : differsAt + 200);
  const draw = () => {
    const beginning = beginningOf(text, shown);
    replace(root, nodesWithDifference(beginning, differsAt));
    if (beginning.length < text.length) root.append(moreButton());
  };
  const moreButton = () => {
    const rest = text.length - shown;
    const label = rest > MORE ? `show ${MORE.toLocaleString("en-US")} more of ${sizeOfText(text)}` : `show all ${sizeOfText(text)}`;
    return h("button", { type: "button", class: "more", "on:click": () => {
      shown += MORE;
      draw();
      root.tabIndex = -1;
      root.focus({ preventScroll: true });
    } }, label);
  };
  draw();
  return root;
}

/** @param {string} text @param {number|null} differsAt @returns {(string|HTMLElement)[]} */
function nodesWithDifference(text, differsAt) {
  if (differsAt === null) return saidNodes(text);
  const mark = h("span", { class: "differs-here", title: "The first difference is here.", role: "img", "aria-label": "first difference" }, "▸");
  return [...saidNodes(text.slice(0, differsAt)), mark, h("span", { class: "differs" }, saidNodes(text.slice(differsAt)))];
}

/** A name and its value in a <dl>.
 * @param {import("../lib/dom.js").Child} name @param {import("../lib/dom.js").Child} value @param {string|null} [hint] */
export function namedValue(name, value, hint) {
  return h("div", { title: hint ?? null }, h("dt", null, name), h("dd", null, value));
}
