/** Live: what agents say now, as it is sampled, where the time of their requests goes, and what trains meanwhile. */
import { getSession } from "../lib/api.js";
import { copyButton } from "../lib/copy.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatSeconds, plural } from "../lib/format.js";
import { setQuery } from "../lib/router.js";
import { empty, missing } from "../lib/states.js";
import { LiveCards } from "../live/live_cards.js";
import { LiveNewsList } from "../live/live_news.js";
import { findStraggler, forgetEnded, makeLiveFacts, takeLiveEvent, tokenRate } from "../live/live_state.js";
import { LiveTimes } from "../live/live_times.js";

const DRAW_EVERY_MS = 250;

/** @type {import("../lib/context.js").View} */
export const liveView = {
  title: () => "Live",
  async show(root, route, ctx) {
    if (!getSession().has_server) {
      replace(root, missing("No server runs here, so nothing is being sampled. The rollouts of finished runs are under Runs."));
      return;
    }
    const view = new LivePage(route.query.get("model") ?? "");
    replace(root, view.element);
    ctx.live((event) => view.take(event));
    ctx.keys([{ key: "p", text: "pause, or go on", run: () => view.togglePause() }]);
    const timer = setInterval(() => view.draw(), DRAW_EVERY_MS);
    view.draw();
    return () => clearInterval(timer);
  },
};

class LivePage {
  /** @param {string} model  show only requests of this model; "" for all */
  constructor(model) {
    this.facts = makeLiveFacts();
    this.model = model;
    this.isPaused = false;
    this.isLost = false;
    this.isRevealing = false;
    this.hasBegun = false;
    this.cards = new LiveCards();
    this.times = new LiveTimes();
    this.news = new LiveNewsList();
    this.counts = h("span", { class: "soft" });
    this.lost = h("span", { class: "chip chip-bad", hidden: true, role: "status" }, "connection lost, trying again");
    this.pause = h("button", { type: "button", "aria-pressed": "false", "on:click": () => this.togglePause() }, "Pause");
    this.select = h("select", { "aria-label": "Model", "on:change": () => this.choose(this.select.value) });
    this.straggler = h("p", { class: "note", role: "status" });
    this.nothing = noRequest();
    this.element = h("div", { class: "live" },
      h("div", { class: "head" }, h("div", { class: "row" }, h("h1", null, "Live"), this.counts, this.lost), h("div", { class: "row" }, this.select, this.pause)),
      this.straggler, this.nothing,
      h("div", { class: "live-parts" }, this.cards.element, h("div", { class: "live-side" }, this.news.element, this.times.element)));
    this.models = "";
  }

  /** @param {import("../lib/api.js").StreamEvent} event */
  take(event) {
    if (event.type === "open" || event.type === "lost") {
      this.isLost = event.type === "lost";
      this.lost.hidden = !this.isLost;
      return;
    }
    this.hasBegun = true;
    takeLiveEvent(this.facts, event, Date.now() / 1000);
    if (event.type === "tokens") this.startReveal();
  }

  startReveal() {
    if (this.isRevealing || this.isPaused) return;
    this.isRevealing = true;
    const next = () => {
      this.isRevealing = !this.isPaused && this.cards.reveal();
      if (this.isRevealing) requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.textContent = this.isPaused ? "Go on" : "Pause";
    this.pause.setAttribute("aria-pressed", String(this.isPaused));
    if (!this.isPaused) this.draw();
  }

  /** @param {string} model */
  choose(model) {
    this.model = model;
    setQuery({ model });
    this.draw();
  }

  draw() {
    const now = Date.now() / 1000;
    if (this.isPaused) return;
    forgetEnded(this.facts, now);
    const isShown = (/** @type {{project: string, name: string}} */ one) => this.model === "" || `${one.project}/${one.name}` === this.model;
    const requests = [...this.facts.requests.values()].filter(isShown);
    const running = requests.filter((request) => request.ended === null);
    const ended = this.facts.ended.filter(isShown);
    const straggler = findStraggler(running, ended, now);
    this.drawHead(running, now);
    this.straggler.hidden = straggler === null;
    this.straggler.textContent = straggler === null ? "" : `The slowest request of ${straggler.request.project}/${straggler.request.name} takes ${formatSeconds(straggler.age)}; half of the others took less than ${formatSeconds(straggler.median)}.`;
    this.nothing.hidden = !this.hasBegun || requests.length + ended.length > 0 || this.facts.requests.size > 0;
    this.cards.update(requests, now, straggler?.request.id ?? null);
    this.times.update(ended);
    this.news.update([...this.facts.jobs.values()].filter(isShown), this.facts.news.filter((one) => this.model === "" || one.model === this.model));
    this.startReveal();
  }

  /**
   * @param {import("../live/live_state.js").LiveRequest[]} running
   * @param {number} now
   */
  drawHead(running, now) {
    const known = [...this.facts.requests.values(), ...this.facts.ended, ...this.facts.jobs.values()];
    const models = [...new Set([...known.map((one) => `${one.project}/${one.name}`), ...(this.model ? [this.model] : [])])].sort();
    if (models.join("\n") !== this.models) {
      this.models = models.join("\n");
      replace(this.select, h("option", { value: "" }, "All models"), models.map((model) => h("option", { value: model }, model)));
      this.select.value = this.model;
    }
    this.select.hidden = models.length < 2 && this.model === "";
    const numSampling = running.filter((request) => request.num_tokens > 0).length;
    this.counts.textContent = `${plural(running.length, "request")}, ${formatCount(numSampling)} sampling, ${formatCount(tokenRate(this.facts, now))} tokens/s`;
  }
}

/** What the view says before the first request. */
function noRequest() {
  const address = getSession().base_url;
  const how = address ? [h("p", null, "Point your agent's OpenAI client at this base URL:"), h("div", { class: "row" }, h("code", null, address), copyButton(address))] : null;
  const state = empty("No request yet: the agent's first request appears here as it is sampled.", how);
  state.hidden = true;
  return state;
}
