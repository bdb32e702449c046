/** Runs: which there are, whether they learn, what they do now. Up to six can be chosen and compared. */
import { get } from "../lib/api.js";
import { sparkline } from "../chart/spark.js";
import { h, replace } from "../lib/dom.js";
import { formatAge, formatCount, formatSeconds, formatUsd, plural, UNKNOWN } from "../lib/format.js";
import { go, link, setQuery } from "../lib/router.js";
import { showWhenLoaded } from "../lib/states.js";
import { firstSteps } from "../parts/first_steps.js";
import { groupFindings } from "../parts/findings.js";
import { baseModelText, headlineText, rewardText, stateChip } from "../parts/run_summary.js";

const MAX_COMPARED = 6;
const SEARCH_FROM = 6;
const COLUMNS = ["Compare", "Run", "State", "Step", "Held-out", "Reward", "Curve", "Per step", "Cost", "Updated"];

/** @type {import("../lib/context.js").View} */
export const runsView = {
  title: () => "Runs",
  async show(root, route, ctx) {
    const list = new RunRows(route.query, ctx);
    const load = () => get("runs", {}, ctx.signal);
    await showWhenLoaded(root, ctx.signal, load, (answer) => {
      list.fill(root, answer);
    });
    ctx.keys([
      { key: "/", text: "search the runs", run: () => list.search.focus() },
      { key: "j", text: "next run (Enter opens it)", run: () => list.move(1) },
      { key: "k", text: "previous run", run: () => list.move(-1) },
    ]);
    ctx.refreshEvery(2, async () => {
      if (list.isDue()) list.fill(root, await load());
    });
  },
};

class RunRows {
  /**
   * @param {URLSearchParams} query
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(query, ctx) {
    this.ctx = ctx;
    /** @type {Set<string>} */
    this.chosen = new Set(query.getAll("run"));
    /** @type {Map<string, {text: string, row: HTMLElement, age: HTMLElement, state: string}>} */
    this.rows = new Map();
    this.isActive = true;
    this.ticks = 0;
    this.runs = /** @type {import("../parts/run_summary.js").RunSummary[]} */ ([]);
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search the runs", value: query.get("text") ?? "", "on:input": () => this.onSearch() });
    this.compare = h("button", { type: "button", "on:click": () => go("compare", [], { run: [...this.chosen] }) }, "Compare");
    this.count = h("span", { class: "soft" });
    this.body = h("tbody");
    this.table = h("table", { class: "runs" },
      h("thead", null, h("tr", null, COLUMNS.map((title) => h("th", { scope: "col", class: ["Step", "Per step", "Cost"].includes(title) ? "number" : null }, title === "Compare" ? h("span", { class: "unseen" }, title) : title)))), this.body);
    this.head = h("div", { class: "head" }, h("div", { class: "row" }, h("h1", null, "Runs"), this.count), h("div", { class: "row" }, this.search, this.compare));
  }

  /** Every two seconds while something runs, else every ten. */
  isDue() {
    this.ticks += 1;
    return this.isActive || this.ticks % 5 === 0;
  }

  /**
   * @param {HTMLElement} root
   * @param {{runs: import("../parts/run_summary.js").RunSummary[], now: number}} answer
   */
  fill(root, answer) {
    this.runs = answer.runs;
    this.isActive = answer.runs.some((run) => run.state === "training" || run.state === "waiting");
    if (answer.runs.length === 0) {
      replace(root, firstSteps());
      return;
    }
    if (!root.contains(this.table)) replace(root, this.head, this.table);
    this.count.textContent = plural(answer.runs.length, "run");
    this.search.hidden = answer.runs.length < SEARCH_FROM;
    for (const run of answer.runs) this.draw(run, answer.now);
    this.arrange();
    this.showChosen();
  }

  /**
   * @param {import("../parts/run_summary.js").RunSummary} run
   * @param {number} now
   */
  draw(run, now) {
    const key = keyOf(run);
    const text = JSON.stringify({ ...run, updated_at: null });
    const kept = this.rows.get(key);
    if (kept && kept.state !== run.state) this.ctx.announce(`${key} is ${run.state}`);
    if (kept?.text !== text) {
      const age = h("span", { class: "nowrap" });
      const row = this.makeRow(run, age);
      const hadFocus = kept?.row.contains(document.activeElement);
      kept?.row.replaceWith(row);
      if (hadFocus) /** @type {HTMLElement | null} */ (row.querySelector(".run-link"))?.focus({ preventScroll: true });
      this.rows.set(key, { text, row, age, state: run.state });
    }
    const age = this.rows.get(key)?.age;
    if (age) age.textContent = formatAge(run.updated_at, now);
  }

  /**
   * @param {import("../parts/run_summary.js").RunSummary} run
   * @param {HTMLElement} age
   */
  makeRow(run, age) {
    const key = keyOf(run);
    const address = [run.project, run.name];
    const choose = h("input", { type: "checkbox", "aria-label": `Compare ${key}`, checked: this.chosen.has(key), "data-run": key, "on:change": (/** @type {Event} */ event) => this.onChoose(key, /** @type {HTMLInputElement} */ (event.target).checked) });
    const name = h("a", { class: "run-link", href: link("run", address) }, h("span", { class: "run-project" }, `${run.project}/`), run.name);
    const spark = run.spark && run.spark.steps.length > 0 ? h("a", { href: link("curves", address, { metric: [run.main_metric] }) }, sparkline(run.spark, run.main_metric, run.reward?.split !== "train")) : null;
    const cells = [
      h("td", { class: "run-choose" }, h("label", { class: "hit" }, choose)),
      h("td", { class: "run-who" }, name, h("div", { class: "small soft" }, [run.base_model ? [baseModelText(run.base_model), ", "] : null, `${run.num_rollouts === 1 ? "1 rollout" : `${formatCount(run.num_rollouts)} rollouts`}${run.indexing ? " so far (indexing)" : ""}`])),
      h("td", { "data-label": "State" }, stateChip(run.state)),
      h("td", { class: "number", "data-label": "Step" }, h("a", { href: link("rollouts", address, { step: run.step }) }, formatCount(run.step))),
      h("td", { "data-label": "Held-out" }, run.headline ? [headlineText(run.headline), h("div", { class: "small soft" }, `${run.headline.split}/${run.headline.metric}`)] : h("span", { class: "soft" }, UNKNOWN)),
      h("td", { "data-label": "Reward" }, rewardText(run.reward), run.reward ? h("span", { class: "small soft" }, ` ${run.reward.split}`) : null),
      h("td", { class: "run-curve" }, spark),
      h("td", { class: "number", "data-label": "Per step" }, formatSeconds(run.seconds_per_step)),
      h("td", { class: "number", "data-label": "Cost" }, h("a", { href: link("costs", address) }, formatUsd(run.costs_usd))),
      h("td", { "data-label": "Updated" }, age, run.eta_s === null || run.eta_s === undefined ? null : h("span", { class: "small soft" }, ` done in ${formatSeconds(run.eta_s)}`)),
    ];
    return h("tr", { class: "run-row" }, cells, this.makeNotes(run, address));
  }

  /**
   * What runs now and the newest finding; laid out below the figures.
   * @param {import("../parts/run_summary.js").RunSummary} run
   * @param {string[]} address
   */
  makeNotes(run, address) {
    const [finding, ...more] = groupFindings(run.findings);
    if (!run.now && !finding) return null;
    return h("td", { class: "run-notes small" },
      run.now ? h("div", null, run.now) : null,
      finding ? h("div", { class: "run-finding" },
        h("a", { href: link("run", address, { step: finding.steps[0] }) }, `step ${finding.steps[0]}`), ` ${finding.text}`,
        more.length > 0 ? h("a", { href: link("run", address) }, ` ${plural(more.length, "more kind of finding", "more kinds of finding")}`) : null) : null);
  }

  /** Put the rows that the search keeps into the order of the answer. */
  arrange() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = this.runs.filter((run) => words.every((word) => `${keyOf(run)} ${run.base_model ?? ""} ${run.state}`.toLowerCase().includes(word)));
    const rows = shown.map((run) => /** @type {HTMLElement} */ (this.rows.get(keyOf(run))?.row));
    if (rows.length !== this.body.children.length || rows.some((row, at) => this.body.children[at] !== row)) {
      const focused = document.activeElement;
      replace(this.body, rows);
      if (focused instanceof HTMLElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
    }
    if (rows.length === 0) replace(this.body, h("tr", null, h("td", { colspan: COLUMNS.length, class: "soft" }, `No run matches "${this.search.value}".`)));
  }

  onSearch() {
    setQuery({ text: this.search.value });
    this.arrange();
  }

  /**
   * @param {string} key
   * @param {boolean} isChosen
   */
  onChoose(key, isChosen) {
    if (isChosen) this.chosen.add(key);
    else this.chosen.delete(key);
    setQuery({ run: [...this.chosen] });
    this.showChosen();
  }

  showChosen() {
    for (const key of this.chosen) if (!this.rows.has(key)) this.chosen.delete(key);
    const { size } = this.chosen;
    this.compare.disabled = size < 2;
    this.compare.hidden = this.runs.length < 2;
    this.compare.textContent = size < 2 ? "Choose 2 to 6 to compare" : `Compare ${size} runs`;
    for (const box of this.body.querySelectorAll("input")) box.disabled = size >= MAX_COMPARED && !box.checked;
  }

  /** @param {number} rows */
  move(rows) {
    const links = [.../** @type {NodeListOf<HTMLElement>} */ (this.body.querySelectorAll(".run-link"))];
    const at = links.findIndex((one) => one.closest("tr")?.contains(document.activeElement));
    links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + rows))]?.focus();
  }
}

/** @param {import("../parts/run_summary.js").RunSummary} run */
function keyOf(run) {
  return `${run.project}/${run.name}`;
}
