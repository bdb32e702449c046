// One rollout: a header with its numbers, and five ways to read it. `?tab=` says which one is open.

import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatNumber, formatSeconds, formatSigned, plural } from "../lib/format.js";
import { go, link, setQuery } from "../lib/router.js";
import { copySession } from "../lib/page_copy.js";
import { missing, showWhenLoaded } from "../lib/states.js";
import { showBranches } from "../rollout/branches.js";
import { requestText } from "../rollout/copies.js";
import { showConversation } from "../rollout/conversation.js";
import { showJudge } from "../rollout/judge.js";
import { showRecord } from "../rollout/record.js";
import { differenceTools } from "../rollout/marked.js";
import { reasonText } from "../rollout/row_columns.js";
import { saidNodes } from "../rollout/said_text.js";
import { addStepKeys } from "../rollout/step_keys.js";
import { showTokens } from "../tokens/tokens.js";

const TABS = /** @type {[string, string][]} */ ([
  ["conversation", "Conversation"], ["tokens", "Exact tokens"], ["branches", "Branches"], ["judge", "Judge"], ["record", "Record"],
]);

/** @type {import("../lib/context.js").View} */
export const rolloutView = {
  title: (route) => `Rollout ${route.args.slice(2).join("/")} of ${route.args.slice(0, 2).join("/")}`,
  async show(root, route, ctx) {
    const [project, name, split, step, group, index] = route.args;
    const path = `runs/${project}/${name}/rollouts/${split}/${step}/${group}/${index}`;
    await showWhenLoaded(root, ctx.signal, () => get(path, {}, ctx.signal), (rollout) => {
      const page = new RolloutPage(root, route, ctx, rollout, path);
      page.draw();
      addStepKeys(ctx, route, "rollout", () => page.kept());
    });
  },
};

class RolloutPage {
  /** @param {HTMLElement} root @param {import("../lib/router.js").Route} route @param {import("../lib/context.js").Context} ctx
   * @param {any} rollout @param {string} path */
  constructor(root, route, ctx, rollout, path) {
    this.run = route.args.slice(0, 2);
    this.key = route.args.slice(2);
    this.query = route.query;
    this.ctx = ctx;
    this.rollout = rollout;
    this.path = path;
    this.root = root;
    this.body = h("div", { class: "tab-body", role: "tabpanel", id: "tab-body", tabindex: "-1" });
    this.closeTab = new AbortController();
  }

  draw() {
    const asked = this.query.get("tab") ?? "";
    this.tab = TABS.some(([key]) => key === asked) ? asked : "conversation";
    this.tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "ways to read the rollout", "on:keydown": (/** @type {KeyboardEvent} */ event) => this.#moveTab(event) });
    replace(this.root, this.#header(), this.tabs, this.body);
    this.#drawTab();
    this.ctx.signal.addEventListener("abort", () => this.closeTab.abort(), { once: true });
    const move = (/** @type {any} */ key) => () => key !== null && go("rollout", [...this.run, key.split, key.step, key.group, key.index], this.kept());
    this.ctx.keys([
      { key: "j", text: "next rollout of the step", run: move(this.rollout.next ?? null) },
      { key: "k", text: "previous rollout of the step", run: move(this.rollout.previous ?? null) },
    ]);
  }

  /** What stays the same when another rollout is opened. */
  kept() {
    const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
    return { tab: query.get("tab"), color: query.get("color"), space: query.get("space") };
  }

  /** @param {string} tab @param {Record<string, string|number|null>} [more] */
  open(tab, more = {}) {
    this.tab = tab;
    setQuery({ tab: tab === "conversation" ? null : tab, ...more });
    this.#drawTab();
  }

  /** @param {Record<string, string|number|null>} query @returns {string} */
  #href(query) {
    return link("rollout", [...this.run, ...this.key], query);
  }

  #drawTab() {
    this.closeTab.abort();
    this.closeTab = new AbortController();
    const tabs = /** @type {HTMLElement} */ (this.tabs);
    replace(tabs, TABS.map(([key, label]) => h("button", {
      type: "button", role: "tab", class: "tab", id: `tab-${key}`, "aria-controls": "tab-body", "aria-selected": String(key === this.tab),
      tabindex: key === this.tab ? 0 : -1, "on:click": () => this.open(key),
    }, label, this.#tabNote(key))));
    replace(this.body);
    this.body.setAttribute("aria-labelledby", `tab-${this.tab}`);
    const { signal } = this.closeTab;
    if (this.tab === "tokens") showTokens(this.body, { path: `${this.path}/tokens`, ctx: this.ctx, signal, query: new URLSearchParams(location.hash.split("?")[1] ?? "") });
    else if (this.tab === "branches") showBranches(this.body, signal, { tokensPath: `${this.path}/tokens`, tokensHref: (path) => this.#href({ tab: "tokens", path }) });
    else if (this.tab === "judge") showJudge(this.body, this.rollout);
    else if (this.tab === "record") showRecord(this.body, this.rollout);
    else this.#drawConversation();
  }

  #drawConversation() {
    const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
    showConversation(this.body, this.rollout.histories, {
      history: Number(query.get("history") ?? 0) || 0,
      chooseHistory: (history) => this.open("conversation", { history: history === 0 ? null : history }),
      tokensHref: (exchange) => this.#href({ tab: "tokens", exchange }),
      requestText: copySession() === null ? (exchange) => requestText(this.path, exchange) : null,
    });
    if (this.rollout.missing) this.body.prepend(missing(this.rollout.missing));
  }

  /** @param {string} key */
  #tabNote(key) {
    if (key === "judge" && this.rollout.judge) return h("span", { class: "soft" }, ` ${formatNumber(this.rollout.judge.score)}`);
    if (key === "record" && this.rollout.error) return h("span", { class: "fault" }, " error");
    return null;
  }

  /** @param {KeyboardEvent} event */
  #moveTab(event) {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (by === 0) return;
    event.preventDefault();
    const at = TABS.findIndex(([key]) => key === this.tab);
    this.open(TABS[(at + by + TABS.length) % TABS.length][0]);
    document.getElementById(`tab-${this.tab}`)?.focus();
  }

  #header() {
    const { rollout } = this;
    const [split, step, group, index] = this.key;
    const neighbour = (/** @type {any} */ key, /** @type {string} */ text, /** @type {string} */ hint) => key
      ? h("a", { href: link("rollout", [...this.run, key.split, key.step, key.group, key.index], this.kept()), title: hint }, text)
      : h("span", { class: "soft" }, text);
    return h("header", { class: "rollout-head" },
      h("h1", null, saidNodes(shortened(rollout.scenario ?? `rollout ${index} of group ${group}`))),
      h("nav", { class: "places", "aria-label": "places of this rollout" },
        h("a", { href: link("rollouts", this.run, { split, step }) }, `${split} step ${step}`),
        h("a", { href: link("group", [...this.run, split, step, group]) }, `group ${group}`),
        h("span", null, `rollout ${index}`),
        h("a", { href: link("tree", [...this.run, step]) }, "prefix tree"),
        differenceTools([...this.run, ...this.key]),
        neighbour(rollout.previous, "previous", "key k"), neighbour(rollout.next, "next", "key j")),
      h("dl", { class: "facts-line", tabindex: 0 }, this.#facts().map(([name, value, kind]) => h("div", { class: kind || null }, h("dt", null, name), h("dd", null, saidNodes(value))))));
  }

  /** @returns {[string, string, string][]} */
  #facts() {
    const { rollout } = this;
    const facts = /** @type {[string, string|null, string][]} */ ([
      ["reward", formatNumber(rollout.reward), "main-fact"], ["advantage", formatSigned(rollout.advantage), "main-fact"],
      ["outcome", rollout.outcome.replace("_", " "), rollout.outcome === "ok" ? "" : "fault"],
      ["dropped because", rollout.dropped_because && reasonText(rollout.dropped_because), ""], ["stop", rollout.stop, ""],
      ["policy version", rollout.policy_version === null ? null : `step ${rollout.policy_version}`, ""],
      ["turns", String(rollout.num_turns), ""], ["sampled", rollout.num_tokens === null ? null : plural(rollout.num_tokens, "token"), ""],
      ["duration", rollout.duration_s === null ? null : formatSeconds(rollout.duration_s), ""],
    ]);
    return /** @type {[string, string, string][]} */ (facts.filter(([, value]) => value !== null && value !== undefined));
  }
}

/** @param {string} text @returns {string} */
function shortened(text) {
  return text.length > 300 ? `${text.slice(0, 300)}…` : text;
}
