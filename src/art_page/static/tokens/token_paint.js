// The colour of each token for a chosen signal; the same for the text, the strip and the legend.

import { categorical, diverging, sequential, textOn } from "../lib/colours.js";
import { categoriesOf, categoryOf, scaleOf, valuesOf } from "./token_signals.js";

/** @typedef {import("./token_signals.js").PathTokens} PathTokens */
/** @typedef {import("./token_signals.js").Signal} Signal */
/** @typedef {{ kind: "solid"|"hatch"|"unknown"|"read", colour: string, strong?: string }} Paint
 *   `strong`: the colour in the strip, where no text lies on it
 *   `solid`: a value; `hatch`: masked; `unknown`: sampled, and the value is not known; `read`: not sampled, so it has none */

const UNKNOWN_COLOUR = "#9a9fa8";
const TRAINED_COLOUR = "#b5d4f5";

export class TokenPainter {
  /** @param {Signal} signal @param {PathTokens} tokens */
  constructor(signal, tokens) {
    this.signal = signal;
    this.tokens = tokens;
    this.values = valuesOf(signal, tokens);
    this.scale = scaleOf(signal, this.values);
    this.categories = signal.kind === "category" ? categoriesOf(signal, tokens.spans) : [];
    this.paints = new Map(this.categories.map((category, index) => [category.key, paintOfCategory(signal, category, index, this.categories.length)]));
  }

  /** @param {number} place 0 to 1 on the scale @returns {string} */
  colourAt(place) {
    return this.signal.kind === "diverging" ? diverging(2 * place - 1) : sequential(place);
  }

  /** @param {number} token @returns {Paint} */
  paint(token) {
    const span = this.tokens.spans[this.tokens.spanOf[token]];
    if (this.signal.kind === "category") return this.paints.get(categoryOf(this.signal, span)) ?? { kind: "unknown", colour: UNKNOWN_COLOUR };
    const value = this.values[token];
    if (value !== null && value !== undefined) return { kind: "solid", colour: this.colourAt(this.scale.place(value)) };
    return span !== undefined && !span.sampled ? { kind: "read", colour: "transparent" } : { kind: "unknown", colour: UNKNOWN_COLOUR };
  }
}

/** Policy versions go from light (old) to dark (new). What the policy did not sample is grey.
 * @param {Signal} signal @param {import("./token_signals.js").Category} category @param {number} index @param {number} count of categories @returns {Paint} */
function paintOfCategory(signal, category, index, count) {
  const { key } = category;
  if (key === "not known") return { kind: "unknown", colour: UNKNOWN_COLOUR };
  if (key === "not sampled here") return { kind: "read", colour: "transparent" };
  if (signal.key === "mask" && key !== "trained") return { kind: "hatch", colour: category.isSampled ? categorical(index) : UNKNOWN_COLOUR };
  if (signal.key === "version") return { kind: "solid", colour: sequential(0.2 + (0.7 * index) / Math.max(1, count - 1)) };
  return { kind: "solid", colour: TRAINED_COLOUR, strong: categorical(0) };
}

/** Gives an element the colours of a token.
 * @param {HTMLElement} element @param {Paint} paint */
export function applyPaint(element, paint) {
  element.classList.add(`paint-${paint.kind}`);
  if (paint.kind === "read") return;
  if (paint.kind === "hatch") {
    element.style.setProperty("--hatch", paint.colour);
    return;
  }
  element.style.setProperty("background-color", paint.colour);
  element.style.setProperty("color", textOn(paint.colour));
}
