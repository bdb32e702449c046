// A strip that shows the chosen signal along the whole path; a click or the arrow keys jump.

import { h } from "../lib/dom.js";
import { formatCount } from "../lib/format.js";
import { themeColour } from "../lib/theme.js";
import { binsOf } from "./token_signals.js";

const HEIGHT = 40;

export class TokenStrip {
  /** @param {(token: number) => void} onJump */
  constructor(onJump) {
    this.onJump = onJump;
    this.numTokens = 1;
    /** @type {import("./token_paint.js").TokenPainter|null} */ this.painter = null;
    this.canvas = h("canvas", { class: "strip-canvas", "aria-hidden": "true" });
    this.window = h("div", { class: "strip-window" });
    this.element = h("div", { class: "strip", role: "slider", tabindex: "0", "aria-label": "place in the path", "aria-valuemin": "0",
      "on:keydown": (/** @type {KeyboardEvent} */ event) => this.#onKey(event), "on:pointerdown": (/** @type {PointerEvent} */ event) => this.#onPointer(event),
      "on:pointermove": (/** @type {PointerEvent} */ event) => event.buttons === 1 && this.#onPointer(event) }, this.canvas, this.window);
    this.first = 0;
  }

  /** @param {import("./token_paint.js").TokenPainter} painter */
  show(painter) {
    this.painter = painter;
    this.numTokens = Math.max(1, painter.tokens.numTokens);
    this.element.setAttribute("aria-valuemax", String(this.numTokens - 1));
    this.draw();
  }

  /** The part of the path that is in view. @param {number} first @param {number} last */
  setWindow(first, last) {
    this.first = first;
    this.window.style.setProperty("left", `${(100 * first) / this.numTokens}%`);
    this.window.style.setProperty("width", `${Math.max(0.4, (100 * (last + 1 - first)) / this.numTokens)}%`);
    this.element.setAttribute("aria-valuenow", String(first));
    this.element.setAttribute("aria-valuetext", `tokens ${formatCount(first + 1)} to ${formatCount(last + 1)} of ${formatCount(this.numTokens)}`);
  }

  draw() {
    const width = Math.max(1, Math.floor(this.element.clientWidth));
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    const context = this.canvas.getContext("2d");
    if (context === null || this.painter === null) return;
    context.scale(ratio, ratio);
    const numBins = Math.max(1, Math.min(Math.ceil(width / 2), this.numTokens));
    if (this.painter.signal.kind === "category") this.#drawCategories(context, width, numBins);
    else this.#drawBars(context, width, numBins);
  }

  /** Bars of a signal, in the colour of the most extreme value of the piece: from the bottom, or from the middle of a
   * diverging scale in both directions. A line marks the mean.
   * @param {CanvasRenderingContext2D} context @param {number} width @param {number} numBins */
  #drawBars(context, width, numBins) {
    const painter = /** @type {import("./token_paint.js").TokenPainter} */ (this.painter);
    const { scale } = painter;
    const base = scale.kind === "diverging" ? 0.5 : 0;
    const y = (/** @type {number} */ place) => HEIGHT - 1 - place * (HEIGHT - 2);
    const line = themeColour("--text");
    binsOf(painter.values, this.numTokens, numBins).forEach((bin, index) => {
      if (bin.count === 0) return;
      const left = (index * width) / numBins;
      const wide = Math.max(1, width / numBins - (width / numBins > 3 ? 1 : 0));
      for (const place of [scale.place(bin.low), scale.place(bin.high)]) {
        context.fillStyle = painter.colourAt(place);
        context.fillRect(left, Math.min(y(place), y(base)), wide, Math.max(1, Math.abs(y(place) - y(base))));
      }
      context.fillStyle = line;
      context.fillRect(left, y(scale.place(bin.mean)) - 0.5, wide, 1);
    });
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} numBins */
  #drawCategories(context, width, numBins) {
    const painter = /** @type {import("./token_paint.js").TokenPainter} */ (this.painter);
    for (const span of painter.tokens.spans) {
      const paint = painter.paint(span.start);
      if (paint.kind === "read") continue;
      const left = (width * span.start) / this.numTokens;
      const wide = Math.max(width / numBins / 2, (width * (span.end - span.start)) / this.numTokens);
      context.fillStyle = paint.strong ?? paint.colour;
      const isThin = paint.kind !== "solid";
      context.fillRect(left, isThin ? HEIGHT - 10 : 2, wide, isThin ? 8 : HEIGHT - 4);
    }
  }

  /** @param {PointerEvent} event */
  #onPointer(event) {
    const box = this.element.getBoundingClientRect();
    const share = Math.min(0.999999, Math.max(0, (event.clientX - box.left) / box.width));
    this.onJump(Math.floor(share * this.numTokens));
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const by = /** @type {Record<string, number>} */ ({ ArrowRight: 0.02, ArrowLeft: -0.02, PageDown: 0.1, PageUp: -0.1, Home: -1, End: 1 })[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.onJump(Math.min(this.numTokens - 1, Math.max(0, Math.round(this.first + by * this.numTokens))));
  }
}
