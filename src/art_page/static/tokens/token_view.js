// The text of a path, token by token. Only the rows in view are on the page, so a path of 100,000 tokens scrolls like a short one.

import { h } from "../lib/dom.js";
import { saidNodes } from "../rollout/said_text.js";
import { applyPaint } from "./token_paint.js";
import { TokenRows, rowsInView } from "./token_rows.js";

const TOKEN_ROW_PX = 22;
const SPARE_TOKEN_ROWS = 8;
const GUTTER_PX = 88;
const NARROW_GUTTER_PX = 14;

/** @typedef {{ onFocus: (token: number, isChosen: boolean) => void, onWindow: (first: number, last: number) => void }} TokenViewEvents */

export class TokenView {
  /** @param {import("./token_signals.js").PathTokens} tokens @param {TokenViewEvents} events @param {AbortSignal} signal */
  constructor(tokens, events, signal) {
    this.tokens = tokens;
    this.events = events;
    this.focused = -1;
    this.whitespace = false;
    /** @type {Map<number, HTMLElement>} */ this.drawn = new Map();
    /** @type {import("./token_paint.js").TokenPainter|null} */ this.painter = null;
    this.rows = new TokenRows(80, false);
    /** @type {Set<number>} */ this.starts = new Set();
    this.space = h("div", { class: "token-space", role: "presentation" });
    this.element = h("div", { class: "token-view", role: "listbox", tabindex: "0", "aria-label": "tokens of the path", "aria-keyshortcuts": "ArrowLeft ArrowRight ArrowUp ArrowDown" }, this.space);
    this.element.addEventListener("scroll", () => this.#drawSoon(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("pointerover", (event) => this.#onPoint(event, false));
    this.element.addEventListener("click", (event) => this.#onPoint(event, true));
    const observer = new ResizeObserver(() => this.#resize());
    observer.observe(this.element);
    signal.addEventListener("abort", () => observer.disconnect(), { once: true });
    this.frame = 0;
    this.fixed = false;
  }

  /** Shows tokens that have arrived since the last call. @param {number} first the first new token */
  added(first) {
    for (const span of this.tokens.spans) {
      const before = this.tokens.spans[this.tokens.spanOf[span.start - 1]];
      if (span.start > 0 && before !== undefined && before.role !== span.role) this.starts.add(span.start);
    }
    this.rows.add(this.#rowTokens(), first);
    this.#dropRows();
    this.draw();
  }

  #rowTokens() {
    return { texts: this.tokens.texts, ids: this.tokens.ids, starts: this.starts };
  }

  /** @param {import("./token_paint.js").TokenPainter} painter */
  setPainter(painter) {
    this.painter = painter;
    this.#dropRows();
    this.draw();
  }

  /** @param {boolean} whitespace whether spaces and line ends are drawn as marks */
  setWhitespace(whitespace) {
    this.whitespace = whitespace;
    this.#layOut();
  }

  #layOut() {
    const top = this.rows.segmentTokens[this.rows.rowSegments[Math.floor(this.element.scrollTop / TOKEN_ROW_PX)]] ?? 0;
    this.rows = new TokenRows(this.#columns(), this.whitespace);
    this.rows.add(this.#rowTokens(), 0);
    this.#dropRows();
    this.space.style.setProperty("height", `${this.rows.numRows * TOKEN_ROW_PX}px`);
    this.element.scrollTop = this.rows.rowOf(top) * TOKEN_ROW_PX;
    this.draw();
  }

  #columns() {
    const probe = h("span", { class: "token-probe", "aria-hidden": "true" }, "0".repeat(100));
    this.element.append(probe);
    const width = probe.getBoundingClientRect().width / 100;
    probe.remove();
    const gutter = this.#gutter();
    return width > 0 ? Math.floor((this.element.clientWidth - gutter - 12) / width) : 80;
  }

  #gutter() {
    return this.element.clientWidth < 560 ? NARROW_GUTTER_PX : GUTTER_PX;
  }

  #resize() {
    if (this.element.clientWidth === 0) return;
    this.element.classList.toggle("is-narrow", this.#gutter() === NARROW_GUTTER_PX);
    if (this.#columns() !== this.rows.columns) this.#layOut();
    else this.draw();
  }

  #dropRows() {
    for (const row of this.drawn.values()) row.remove();
    this.drawn.clear();
  }

  #drawSoon() {
    if (this.frame !== 0) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const numRows = this.rows.numRows;
    this.space.style.setProperty("height", `${numRows * TOKEN_ROW_PX}px`);
    const { first, end } = rowsInView({ top: this.element.scrollTop, height: this.element.clientHeight, rowHeight: TOKEN_ROW_PX, numRows, spare: SPARE_TOKEN_ROWS });
    for (const [row, element] of this.drawn) {
      if (row >= first && row < end) continue;
      element.remove();
      this.drawn.delete(row);
    }
    const added = document.createDocumentFragment();
    for (let row = first; row < end; row += 1) {
      if (this.drawn.has(row)) continue;
      const element = this.#row(row);
      this.drawn.set(row, element);
      added.append(element);
    }
    this.space.append(added);
    this.#tellWindow(numRows);
  }

  /** @param {number} numRows */
  #tellWindow(numRows) {
    if (numRows === 0) return;
    const topRow = Math.min(numRows - 1, Math.floor(this.element.scrollTop / TOKEN_ROW_PX));
    const bottomRow = Math.min(numRows - 1, Math.floor((this.element.scrollTop + this.element.clientHeight) / TOKEN_ROW_PX));
    const last = this.rows.segments(bottomRow);
    this.events.onWindow(this.rows.segments(topRow)[0].token, last[last.length - 1].token);
  }

  /** @param {number} row @returns {HTMLElement} */
  #row(row) {
    const segments = this.rows.segments(row);
    const spanNumber = this.tokens.spanOf[segments[0].token];
    const span = this.tokens.spans[spanNumber];
    const first = segments[0].token;
    const isStart = !segments[0].continues && (first === 0 || this.starts.has(first));
    const label = isStart && span !== undefined ? span.role : null;
    const bar = h("span", { class: `token-bar ${span?.trained ? "is-trained" : span?.sampled ? "is-sampled" : ""}` });
    const element = h("div", { class: isStart ? "token-row is-start" : "token-row", role: "presentation" },
      h("span", { class: "token-gutter" }, label === null ? null : saidNodes(label)), bar,
      segments.map((segment) => this.#segment(segment)));
    element.style.setProperty("top", `${row * TOKEN_ROW_PX}px`);
    return element;
  }

  /** @param {import("./token_rows.js").Segment} segment @returns {HTMLElement} */
  #segment(segment) {
    const element = h("span", { class: "token", role: "option", "data-token": segment.token, id: segment.continues ? null : `token-${segment.token}`,
      "aria-selected": String(segment.token === this.focused), "aria-label": segment.text.trim() === "" ? "space" : null }, segment.text);
    if (this.tokens.isSpecial[segment.token] || this.tokens.texts[segment.token] === null) element.classList.add("is-special");
    if (segment.token === this.focused) element.classList.add("is-focused");
    if (this.painter !== null) applyPaint(element, this.painter.paint(segment.token));
    return element;
  }

  /** Makes a token the one that the panel is about, and scrolls it into view.
   * @param {number} token @param {"near"|"centre"|"none"} scroll @param {boolean} [isChosen] false where the pointer only passes */
  focusToken(token, scroll, isChosen = true) {
    const target = Math.min(Math.max(token, 0), this.tokens.ids.length - 1);
    if (target < 0) return;
    const row = this.rows.rowOf(target);
    const [top, height] = [row * TOKEN_ROW_PX, this.element.clientHeight];
    if (scroll === "centre") this.element.scrollTop = top - height / 2;
    else if (scroll === "near" && top < this.element.scrollTop) this.element.scrollTop = top - TOKEN_ROW_PX;
    else if (scroll === "near" && top + 2 * TOKEN_ROW_PX > this.element.scrollTop + height) this.element.scrollTop = top + 2 * TOKEN_ROW_PX - height;
    this.#mark(this.focused, false);
    this.focused = target;
    if (scroll !== "none") this.draw();
    this.#mark(target, true);
    this.element.setAttribute("aria-activedescendant", `token-${target}`);
    this.events.onFocus(target, isChosen);
  }

  /** @param {number} token @param {boolean} isFocused */
  #mark(token, isFocused) {
    for (const element of this.space.querySelectorAll(`[data-token="${token}"]`)) {
      element.classList.toggle("is-focused", isFocused);
      element.setAttribute("aria-selected", String(isFocused));
    }
  }

  /** @param {Event} event @param {boolean} isClick a click fixes the panel to its token, pointing no longer moves it */
  #onPoint(event, isClick) {
    const target = event.target instanceof Element ? event.target.closest("[data-token]") : null;
    const token = Number(target?.getAttribute("data-token") ?? -1);
    if (isClick) this.fixed = token >= 0 && !(this.fixed && token === this.focused);
    if (token >= 0 && (isClick || !this.fixed)) this.focusToken(token, "none", isClick);
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { rows, focused } = this;
    const page = Math.max(1, Math.floor(this.element.clientHeight / TOKEN_ROW_PX) - 2);
    const byRows = (/** @type {number} */ by) => rows.tokenAt(rows.rowOf(focused) + by, rows.columnOf(Math.max(focused, 0)));
    const target = /** @type {Record<string, () => number>} */ ({
      ArrowRight: () => focused + 1, ArrowLeft: () => focused - 1, ArrowDown: () => byRows(1), ArrowUp: () => byRows(-1),
      PageDown: () => byRows(page), PageUp: () => byRows(-page), Home: () => 0, End: () => this.tokens.ids.length - 1,
    })[event.key];
    if (event.key === "Escape") this.fixed = false;
    if (target === undefined) return;
    event.preventDefault();
    this.fixed = true;
    this.focusToken(Math.max(0, target()), "near");
  }
}
