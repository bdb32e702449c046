// The tab "exact tokens": the tokens of a path as the model saw them, coloured by a signal that the reader chooses.

import { copyButton } from "../lib/copy.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, plural } from "../lib/format.js";
import { addKeys } from "../lib/keys.js";
import { setQuery } from "../lib/router.js";
import { empty, failed, missing, showWhenLoaded } from "../lib/states.js";
import { visibleText } from "../lib/visible_text.js";
import { legendView } from "./token_legend.js";
import { TokenPainter } from "./token_paint.js";
import { tokenPanel } from "./token_panel.js";
import { findWords, firstTokenOf, loadPathRest, loadPathStart } from "./token_path.js";
import { SIGNALS, signalAfter, signalOf } from "./token_signals.js";
import { TokenStrip } from "./token_strip.js";
import { TokenView } from "./token_view.js";

/** @typedef {{ path: string, ctx: import("../lib/context.js").Context, signal: AbortSignal, query: URLSearchParams }} TokensOptions
 *   `path`: address of the answer; `query`: color, path, token, exchange, space */

/** @param {HTMLElement} root @param {TokensOptions} options */
export function showTokens(root, options) {
  const path = Number(options.query.get("path") ?? 0) || 0;
  return showWhenLoaded(root, options.signal, () => loadPathStart(options.path, path, options.signal), (loaded) => {
    if (loaded.tokens.ids.length === 0) {
      replace(root, loaded.tokens.missing ? missing(loaded.tokens.missing) : empty("No tokens are recorded for this rollout.", "Only requests that went through this server have exact tokens."));
      return;
    }
    const close = new AbortController();
    const signal = AbortSignal.any([options.signal, close.signal]);
    new TokensTab(root, { ...options, signal }, loaded, (query) => {
      close.abort();
      showTokens(root, { ...options, query });
    }).start();
  });
}

class TokensTab {
  /** @param {HTMLElement} root @param {TokensOptions} options @param {import("./token_path.js").LoadedPath} loaded
   * @param {(query: URLSearchParams) => void} reopen shows another path in place of this one */
  constructor(root, options, loaded, reopen) {
    this.root = root;
    this.reopen = reopen;
    this.options = options;
    this.tokens = loaded.tokens;
    this.paths = loaded.paths;
    this.colour = signalOf(options.query.get("color") ?? undefined);
    this.shownToken = -1;
    /** @type {ReturnType<typeof setTimeout>|undefined} */ this.saving = undefined;
    /** @type {Promise<void>|undefined} */ this.rest = undefined;
    this.legend = h("div", { class: "legend-place" });
    this.panel = h("div", { class: "panel-place" });
    this.progress = h("span", { class: "soft", role: "status" });
    this.colourChoice = h("div", { class: "choice", role: "group", "aria-label": "colour by" });
    this.find = h("input", { type: "search", placeholder: "find in the tokens", "aria-label": "find in the tokens", class: "find" });
    this.strip = new TokenStrip((token) => this.view.focusToken(token, "centre"));
    this.view = new TokenView(this.tokens, {
      onFocus: (token, isChosen) => this.#showToken(token, isChosen),
      onWindow: (first, last) => this.strip.setWindow(first, last),
    }, options.signal);
  }

  start() {
    const whitespace = this.options.query.get("space") === "1";
    const space = h("input", { type: "checkbox", checked: whitespace, "on:change": () => this.#setWhitespace(space.checked) });
    replace(this.root,
      h("div", { class: "token-tools" }, this.#pathChoice(), this.colourChoice,
        h("label", null, space, "spaces and line ends"), this.find, copyButton(() => this.#idsText(), "copy token ids"), this.progress),
      this.tokens.missing ? missing(this.tokens.missing) : null,
      this.legend, this.strip.element,
      h("div", { class: "token-columns" }, this.view.element, this.panel));
    this.view.whitespace = whitespace;
    replace(this.panel, tokenPanel(this.tokens, null));
    this.view.added(0);
    this.#setColour(this.colour.key, false);
    this.#addControls(space);
    this.#jumpToAsked();
    this.rest = this.#loadRest();
  }

  /** All token ids of the path, once they are here. */
  async #idsText() {
    await this.rest;
    return JSON.stringify([...this.tokens.ids]);
  }

  /** @param {HTMLInputElement} space */
  #addControls(space) {
    const { signal } = this.options;
    const observer = new ResizeObserver(() => this.strip.draw());
    observer.observe(this.strip.element);
    const removeKeys = addKeys([
      { key: "c", text: "colour by the next signal", run: () => this.#setColour(signalAfter(this.colour.key).key, true) },
      { key: "w", text: "show spaces and line ends", run: () => space.click() },
      { key: "/", text: "find in the tokens", run: () => this.find.focus() },
    ]);
    signal.addEventListener("abort", () => {
      observer.disconnect();
      removeKeys();
    }, { once: true });
    document.addEventListener("art-theme", () => this.strip.draw(), { signal });
    this.find.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.#findNext();
      if (event.key === "Escape") this.view.element.focus();
    });
  }

  #findNext() {
    const token = findWords(this.tokens, this.find.value, this.view.focused);
    const found = token >= 0;
    this.find.setAttribute("aria-invalid", String(!found));
    if (found) this.view.focusToken(token, "centre");
    else this.options.ctx.announce("The path has no such words.");
  }

  #pathChoice() {
    if (this.paths.length < 2) return null;
    const select = h("select", { "aria-label": "path", "on:change": () => {
      setQuery({ path: select.value === "0" ? null : select.value, token: null, exchange: null });
      this.reopen(new URLSearchParams(location.hash.split("?")[1] ?? ""));
    } }, this.paths.map((path) => h("option", { value: path.path }, visibleText(`path ${path.path}: ${path.label}, ${formatCount(path.num_tokens)} tokens`))));
    select.value = String(this.tokens.path);
    return select;
  }

  /** @param {string} key @param {boolean} isChosen */
  #setColour(key, isChosen) {
    this.colour = signalOf(key);
    if (isChosen) {
      setQuery({ color: key });
      this.options.ctx.announce(`coloured by ${this.colour.label}`);
    }
    const select = h("select", { class: "colour-select", "aria-label": "colour by", "on:change": () => this.#setColour(select.value, true) },
      SIGNALS.map((signal) => h("option", { value: signal.key }, signal.label)));
    select.value = key;
    replace(this.colourChoice, select, SIGNALS.map((signal) => h("button", {
      type: "button", class: "choice-item", "aria-pressed": String(signal.key === key), "on:click": () => this.#setColour(signal.key, true),
    }, signal.label)));
    this.#paint();
  }

  #paint() {
    const painter = new TokenPainter(this.colour, this.tokens);
    replace(this.legend, legendView(painter));
    this.strip.show(painter);
    this.view.setPainter(painter);
  }

  /** "1,403 tokens, 580 learnt in step 12" */
  #about() {
    const { step, update } = this.tokens;
    const path = this.paths.find((one) => one.path === this.tokens.path);
    const tokens = plural(this.tokens.ids.length, "token");
    if (step === null) return `${tokens}, ${formatCount(path?.num_sampled ?? 0)} sampled`;
    return `${tokens}, ${formatCount(path?.num_trained ?? 0)} learnt in step ${step}${update ? `, update ${update + 1}` : ""}`;
  }

  /** @param {boolean} whitespace */
  #setWhitespace(whitespace) {
    setQuery({ space: whitespace ? 1 : null });
    this.view.setWhitespace(whitespace);
  }

  /** @param {number} token @param {boolean} isChosen by a click or a key: then the address names it */
  #showToken(token, isChosen) {
    if (token !== this.shownToken) replace(this.panel, tokenPanel(this.tokens, token));
    this.shownToken = token;
    clearTimeout(this.saving);
    if (!isChosen) return;
    this.saving = setTimeout(() => !this.options.signal.aborted && setQuery({ token, exchange: null }), 400);
  }

  /** Goes to the token or the answer that the address names. */
  #jumpToAsked() {
    const exchange = this.options.query.get("exchange");
    const asked = this.options.query.get("token");
    const token = exchange !== null ? firstTokenOf(this.tokens, exchange) : asked !== null ? Number(asked) : null;
    if (token === null || !(token >= 0) || token >= this.tokens.ids.length) return false;
    requestAnimationFrame(() => {
      this.view.focusToken(token, "centre");
      this.view.element.scrollIntoView({ block: "nearest" });
    });
    return true;
  }

  async #loadRest() {
    const { path, signal } = this.options;
    let isFound = this.#isAskedHere();
    try {
      await loadPathRest(path, this.tokens, signal, (first) => {
        replace(this.progress, `${formatCount(this.tokens.ids.length)} of ${plural(this.tokens.numTokens, "token")} are here`);
        this.view.added(first);
        this.#paint();
        if (!isFound) isFound = this.#jumpToAsked();
      });
    } catch (error) {
      if (!signal.aborted) replace(this.progress, failed(error, () => void this.#loadRest()));
      return;
    }
    if (signal.aborted) return;
    replace(this.progress, this.#about());
    if (!isFound) this.#askNextPath();
  }

  /** Whether the asked answer lies among the tokens that have arrived; true if none was asked for. */
  #isAskedHere() {
    const exchange = this.options.query.get("exchange");
    return exchange === null || firstTokenOf(this.tokens, exchange) !== null;
  }

  /** An answer that is not on this path lies on a later one. */
  #askNextPath() {
    if (this.options.query.get("exchange") === null) return;
    const next = this.paths.find((path) => path.path > this.tokens.path);
    if (next === undefined) this.options.ctx.announce("The tokens of that answer are not recorded.");
    else {
      const query = new URLSearchParams(this.options.query);
      query.set("path", String(next.path));
      this.reopen(query);
    }
  }
}
