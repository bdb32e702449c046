/** One place of the live view for each request: its last message, and its text as it is sampled. Places stay where they are. */
import { h, replace, setStyle } from "../lib/dom.js";
import { formatCount, formatSeconds } from "../lib/format.js";
import { visibleText } from "../lib/visible_text.js";

const MAX_PLACES = 64;
const NEAR_END_PX = 24;
/** Each frame shows this part of the text that has come: most of it appears in the fifth of a second between two deliveries. */
const FRAMES_PER_PIECE = 8;

/** @typedef {import("./live_state.js").LiveRequest} LiveRequest */

export class LiveCards {
  constructor() {
    this.more = h("p", { class: "soft live-more", hidden: true });
    /** @type {Set<string>} */
    this.shown = new Set();
    this.grid = h("div", { class: "live-grid" });
    this.element = h("div", null, this.grid, this.more);
    /** @type {(LiveCard)[]} */
    this.places = [];
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  }

  /**
   * Show requests, each in the place that it has. A new one gets the place of one that has gone, else a further one.
   * @param {LiveRequest[]} requests
   * @param {number} now  Unix seconds
   * @param {string | null} stragglerId
   */
  update(requests, now, stragglerId) {
    const wanted = new Map(requests.map((request) => [request.id, request]));
    const placed = new Set(this.places.map((card) => card.request?.id));
    const waiting = requests.filter((request) => !placed.has(request.id) && !request.ended);
    // Requests that began and ended between two looks get places that nobody else needs, once.
    const brief = requests.filter((request) => !this.shown.has(request.id) && request.ended);
    for (const card of this.places) {
      const isGone = card.request === null || !wanted.has(card.request.id);
      const next = (isGone || card.request?.ended ? waiting.shift() : undefined) ?? (isGone ? brief.shift() : undefined);
      if (next) card.take(next);
      else if (isGone) card.take(null);
    }
    for (const request of [...waiting.splice(0, MAX_PLACES - this.places.length), ...brief]) {
      if (this.places.length >= MAX_PLACES) break;
      const card = new LiveCard();
      card.take(request);
      this.places.push(card);
      this.grid.append(card.element);
    }
    this.shown = new Set([...this.shown, ...this.places.map((card) => card.request?.id ?? "")].filter((id) => wanted.has(id)));
    while (this.places.length > 0 && this.places.at(-1)?.request === null) this.places.pop()?.element.remove();
    for (const card of this.places) {
      card.isSlowest = card.request !== null && card.request.id === stragglerId;
      card.update(now);
    }
    this.more.hidden = waiting.length === 0;
    this.more.textContent = waiting.length === 0 ? "" : `${formatCount(waiting.length)} more requests run; choose a model to see fewer.`;
  }

  /** Show a part of the text that has come. Returns whether there is more. */
  reveal() {
    let hasMore = false;
    const now = Date.now() / 1000;
    for (const card of this.places) {
      hasMore = card.reveal(this.isCalm, now) || hasMore;
    }
    return hasMore;
  }
}

class LiveCard {
  constructor() {
    /** @type {LiveRequest | null} */
    this.request = null;
    this.shown = 0;
    this.isSlowest = false;
    this.name = h("span", { class: "live-name" });
    this.state = h("span", { class: "chip" });
    this.last = h("p", { class: "live-last small soft" });
    this.content = document.createTextNode("");
    this.text = h("div", { class: "live-text", tabindex: 0, role: "log", "aria-live": "off" });
    this.text.append(this.content);
    this.figures = h("p", { class: "small soft live-figures" });
    this.element = h("article", { class: "live-card" }, h("header", null, this.name, this.state), this.last, this.text, this.figures);
  }

  /** @param {LiveRequest | null} request */
  take(request) {
    this.request = request;
    this.shown = 0;
    this.content.data = "";
    setStyle(this.element, { visibility: request === null ? "hidden" : "visible" });
    if (request === null) return;
    const title = visibleText(request.scenario ?? `${request.project}/${request.name}`).replace(/\s+/g, " ");
    replace(this.name, h("span", { class: "live-scenario" }, title), h("span", { class: "soft" }, `turn ${request.turn}, step ${request.policy_version}`));
    this.name.title = [title, `${request.project}/${request.name}`, request.rollout_id === null ? `exchange ${request.id}` : `rollout ${request.rollout_id}`].join("\n");
    replace(this.last, `${request.last_role ?? "prompt"}: ${request.last_text}`);
    this.text.setAttribute("aria-label", `${title}, turn ${request.turn}`);
    this.text.scrollTop = 0;
  }

  /** @param {number} now  Unix seconds */
  update(now) {
    const { request } = this;
    if (request === null) return;
    const { ended } = request;
    const [word, look] = ended ? outcomeOf(ended) : this.isSlowest ? ["slowest", "chip-note"] : request.num_tokens > 0 ? ["sampling", "chip-accent"] : request.is_text_known ? ["waiting", ""] : ["runs", "chip-accent"];
    if (this.state.textContent !== word) {
      this.state.textContent = word;
      this.state.className = `chip ${look}`;
    }
    this.element.classList.toggle("is-ended", ended !== null);
    const age = ended ? ended.total_s : Math.max(0, now - request.started_at);
    const isTold = request.is_text_known || ended !== null;
    const tokens = isTold ? `${formatCount(request.num_tokens)} of at most ${formatCount(request.max_tokens)} tokens` : "its text comes when it ends";
    this.figures.textContent = `${formatCount(request.num_prompt_tokens)} prompt, ${tokens}, ${formatSeconds(age)}`;
  }

  /**
   * @param {boolean} isCalm  show all at once
   * @param {number} now  Unix seconds
   * @returns {boolean} whether there is more to show
   */
  reveal(isCalm, now) {
    const { request } = this;
    if (request === null) return false;
    const end = request.numCut + request.text.length;
    if (this.shown >= end) return false;
    const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < NEAR_END_PX;
    if (this.shown < request.numCut || this.shown - request.numCut > request.text.length || this.shown === 0) {
      this.content.data = visibleText(request.text);
      this.shown = end;
    } else {
      const count = isCalm ? end - this.shown : Math.ceil((end - this.shown) / FRAMES_PER_PIECE);
      const from = this.shown - request.numCut;
      const piece = wholeCharacters(request.text, from, from + count);
      this.content.appendData(visibleText(piece));
      this.shown += piece.length;
    }
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
    this.update(now);
    return this.shown < end;
  }
}

/** A part of a text that does not end inside a character, or between the two characters of a line end.
 * @param {string} text @param {number} start @param {number} end @returns {string} */
export function wholeCharacters(text, start, end) {
  return text.slice(start, /^(?:[\ud800-\udbff][\udc00-\udfff]|\r\n)/.test(text.slice(end - 1, end + 1)) ? end + 1 : end);
}

/**
 * @param {import("./live_state.js").EndedRequest} ended
 * @returns {[string, string]}
 */
function outcomeOf(ended) {
  if (ended.outcome === "failed") return ["failed", "chip-bad"];
  if (ended.outcome === "cancelled") return ["cancelled", "chip-note"];
  return [{ stop: "done", length: "cut at the limit", tool_calls: "calls a tool" }[ended.outcome], ended.outcome === "length" ? "chip-note" : "chip-good"];
}
