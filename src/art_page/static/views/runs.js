/** Runs: which there are, whether they learn, what they do now. Those that differ in the seed alone are one line. Up to twenty can be compared. */
import { get } from "../lib/api.js";
import { sparkline } from "../chart/spark.js";
import { joinSeries, MAX_ITEMS } from "../curves/seeds.js";
import { h, replace } from "../lib/dom.js";
import { formatAge, formatCount, formatSeconds, formatUsd, plural, UNKNOWN } from "../lib/format.js";
import { go, link, setQuery } from "../lib/router.js";
import { showWhenLoaded } from "../lib/states.js";
import { firstSteps } from "../parts/first_steps.js";
import { groupFindings } from "../parts/findings.js";
import { starButton, tagChips } from "../parts/run_labels.js";
import { keyOf, linesOf } from "../parts/run_order.js";
import { baseModelText, groupHeadline, headlineText, outcomeText, rewardText, spread, spreadText, stateChip } from "../parts/run_summary.js";

/** Titles of the columns, each with the name in `SORTS` by which it can be sorted. */
const COLUMNS = /** @type {[string, string | null][]} */ ([
  ["Compare", null], ["Run", "name"], ["State", "state"], ["Step", "step"], ["Held-out", "heldout"], ["Training reward", "reward"], ["Curve", null], ["Time", "time"], ["Cost", "cost"], ["Updated", "updated"],
]);
const NUMBERS = ["Step", "Time", "Cost"];

/** @typedef {import("../parts/run_order.js").Line} Line */

/** @type {import("../lib/context.js").View} */
export const runsView = {
  title: () => "Runs",
  async show(root, route, ctx) {
    const list = new RunRows(root, route.query, ctx);
    await showWhenLoaded(root, ctx.signal, () => list.load(), (answer) => {
      list.fill(answer);
    });
    ctx.keys([
      { key: "/", text: "search the runs", run: () => list.search.focus() },
      { key: "j", text: "next run (Enter opens it)", run: () => list.move(1) },
      { key: "k", text: "previous run", run: () => list.move(-1) },
    ]);
    ctx.refreshEvery(2, async () => {
      if (list.isDue()) list.fill(await list.load());
    });
  },
};

class RunRows {
  /**
   * @param {HTMLElement} root
   * @param {URLSearchParams} query
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, query, ctx) {
    this.root = root;
    this.ctx = ctx;
    /** @type {Set<string>} */
    this.chosen = new Set(query.getAll("run"));
    /** @type {Set<string>} keys of groups whose runs are shown */
    this.opened = new Set(query.getAll("open"));
    /** @type {Map<string, {text: string, row: HTMLElement, age: HTMLElement}>} */
    this.rows = new Map();
    /** @type {Map<string, string>} */
    this.states = new Map();
    this.isActive = true;
    this.ticks = 0;
    this.answer = /** @type {{runs: any[], groups: any[], now: number}} */ ({ runs: [], groups: [], now: 0 });
    this.sort = query.get("sort");
    this.descending = query.get("order") !== "up";
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search names, tags and notes", value: query.get("text") ?? "", "on:input": () => this.onFilter() });
    this.project = this.makeChoice("project", "All projects", query);
    this.tag = this.makeChoice("tag", "All tags", query);
    this.state = this.makeChoice("state", "All states", query);
    this.starred = h("input", { type: "checkbox", checked: query.get("starred") === "on", "on:change": () => this.onFilter() });
    this.archived = h("input", { type: "checkbox", checked: query.get("archived") === "on", "on:change": () => this.onFilter() });
    this.seeds = h("input", { type: "checkbox", checked: query.get("seeds") !== "apart", "on:change": () => this.onFilter() });
    this.starredBox = h("label", null, this.starred, "Starred");
    this.archivedBox = h("label", null, this.archived, "Archived");
    this.seedsBox = h("label", { title: "Show runs that differ in the seed alone as one line" }, this.seeds, "Seeds as one");
    const sorted = COLUMNS.filter(([, sort]) => sort !== null);
    this.order = h("select", { class: "narrow", "aria-label": "Sort", "on:change": () => this.sortBy(this.order.value) }, h("option", { value: "" }, "Newest first"), sorted.map(([title, sort]) => h("option", { value: sort }, `by ${title.toLowerCase()}`)));
    this.compare = h("button", { type: "button", "on:click": () => go("compare", [], { run: [...this.chosen] }) }, "Compare");
    this.count = h("span", { class: "soft" });
    this.body = h("tbody");
    this.heads = COLUMNS.map((column) => this.makeHead(column));
    this.table = h("table", { class: "runs" }, h("thead", null, h("tr", null, this.heads)), this.body);
    this.head = h("div", { class: "head" },
      h("div", { class: "row" }, h("h1", null, "Runs"), this.count),
      h("div", { class: "row run-filters" }, this.search, this.project, this.tag, this.state, this.order, this.starredBox, this.archivedBox, this.seedsBox, this.compare));
    this.showOrder();
  }

  /** @returns {Promise<any>} */
  load() {
    return get("runs", {}, this.ctx.signal);
  }

  /**
   * @param {string} name
   * @param {string} all
   * @param {URLSearchParams} query
   */
  makeChoice(name, all, query) {
    const value = query.get(name) ?? "";
    return h("select", { "aria-label": `Filter by ${name}`, "data-all": all, "on:change": () => this.onFilter() }, h("option", { value: "" }, all), value ? h("option", { value, selected: true }, value) : null);
  }

  /** @param {[string, string | null]} column */
  makeHead([title, sort]) {
    if (sort === null) return h("th", { scope: "col" }, title === "Compare" ? h("span", { class: "unseen" }, title) : title);
    return h("th", { scope: "col", class: NUMBERS.includes(title) ? "number" : null, "data-sort": sort }, h("button", { type: "button", class: "sorter", "on:click": () => this.sortBy(sort) }, title, h("span", { class: "arrow", "aria-hidden": true })));
  }

  /** Highest first, then lowest first, then the newest first again. @param {string} sort */
  sortBy(sort) {
    if (sort === "") this.sort = null;
    else if (this.sort !== sort) [this.sort, this.descending] = [sort, sort !== "name" && sort !== "state"];
    else if (this.descending === (sort !== "name" && sort !== "state")) this.descending = !this.descending;
    else this.sort = null;
    setQuery({ sort: this.sort, order: this.sort !== null && !this.descending ? "up" : null });
    this.showOrder();
    this.arrange();
  }

  showOrder() {
    this.order.value = this.sort ?? "";
    for (const head of this.heads) {
      const isSorted = head.dataset.sort !== undefined && head.dataset.sort === this.sort;
      const arrow = head.querySelector(".arrow");
      if (arrow) arrow.textContent = isSorted ? (this.descending ? " ↓" : " ↑") : "";
      if (isSorted) head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  /** Every two seconds while something runs, else every ten. */
  isDue() {
    this.ticks += 1;
    return this.isActive || this.ticks % 5 === 0;
  }

  /** @param {{runs: any[], groups: any[], now: number}} answer */
  fill(answer) {
    this.answer = answer;
    this.isActive = answer.runs.some((run) => run.state === "training" || run.state === "waiting");
    if (answer.runs.length === 0) {
      replace(this.root, firstSteps());
      return;
    }
    if (!this.root.contains(this.table)) replace(this.root, this.head, h("div", { class: "runs-place" }, this.table));
    this.fillChoice(this.project, answer.runs.map((run) => run.project));
    this.fillChoice(this.tag, answer.runs.flatMap((run) => run.labels.tags));
    this.fillChoice(this.state, answer.runs.map((run) => run.state));
    this.starredBox.hidden = !answer.runs.some((run) => run.labels.star) && !this.starred.checked;
    this.archivedBox.hidden = !answer.runs.some((run) => run.labels.archived) && !this.archived.checked;
    this.seedsBox.hidden = answer.groups.length === 0;
    for (const run of answer.runs) {
      const before = this.states.get(keyOf(run));
      if (before !== undefined && before !== run.state) this.ctx.announce(`${keyOf(run)} is ${run.state}`);
      this.states.set(keyOf(run), run.state);
    }
    this.arrange();
  }

  /**
   * Offer the values that the runs have; a filter with one value to choose is left out.
   * @param {HTMLSelectElement} choice
   * @param {string[]} values
   */
  fillChoice(choice, values) {
    const { value } = choice;
    const known = [...new Set([...values, ...(value ? [value] : [])])].sort();
    choice.hidden = known.length < 2 && !value;
    if (choice.options.length === known.length + 1) return;
    replace(choice, h("option", { value: "" }, choice.dataset.all), known.map((one) => h("option", { value: one, selected: one === value }, one)));
  }

  /**
   * The row of a line, made again if what it shows has changed.
   * @param {Line} line
   * @param {string} kind  "one", "group" or "member"
   */
  rowOf(line, kind) {
    const place = `${kind} ${line.key}`;
    const text = JSON.stringify([line.runs.map((run) => ({ ...run, updated_at: null })), kind, this.opened.has(line.key)]);
    let kept = this.rows.get(place);
    if (kept?.text !== text) {
      const age = h("span", { class: "nowrap" });
      const focused = kept?.row.contains(document.activeElement) ? [...kept.row.querySelectorAll("a, button, input")].findIndex((one) => one === document.activeElement) : -1;
      const row = kind === "group" ? this.makeGroup(line, age) : this.makeRow(line.runs[0], age, kind === "member");
      kept?.row.replaceWith(row);
      if (focused >= 0) /** @type {HTMLElement | undefined} */ ([...row.querySelectorAll("a, button, input")][focused])?.focus({ preventScroll: true });
      kept = { text, row, age };
      this.rows.set(place, kept);
    }
    kept.age.textContent = formatAge(Math.max(...line.runs.map((run) => run.updated_at ?? 0)) || null, this.answer.now);
    return kept.row;
  }

  /**
   * @param {string} key
   * @param {string} what
   */
  makeBox(key, what) {
    return h("td", { class: "run-choose" }, h("label", { class: "hit" }, h("input", { type: "checkbox", "aria-label": `Compare ${what}`, checked: this.chosen.has(key), "data-run": key, "on:change": (/** @type {Event} */ event) => this.onChoose(key, /** @type {HTMLInputElement} */ (event.target).checked) })));
  }

  /**
   * @param {import("../parts/run_summary.js").RunSummary} run
   * @param {HTMLElement} age
   * @param {boolean} isMember  of a group that is shown above
   */
  makeRow(run, age, isMember) {
    const key = keyOf(run);
    const address = [run.project, run.name];
    const name = h("a", { class: "run-link", href: link("run", address) }, h("span", { class: "run-project" }, `${run.project}/`), run.name);
    const spark = run.spark && run.spark.steps.length > 0 ? h("a", { href: link("curves", address, { metric: [run.main_metric] }) }, sparkline(run.spark, run.main_metric, run.reward?.split !== "train")) : null;
    const about = [run.base_model ? [baseModelText(run.base_model), ", "] : null, isMember ? `seed ${run.seed}, ` : null, plural(run.num_rollouts, "rollout"), run.indexing ? " so far (indexing)" : ""];
    const cells = [
      this.makeBox(key, key),
      h("td", { class: "run-who" }, starButton(key, run.labels, async () => this.fill(await this.load())), name, tagChips(run.labels), h("div", { class: "small soft" }, about)),
      h("td", { "data-label": "State" }, stateChip(run.state)),
      h("td", { class: "number", "data-label": "Step" }, h("a", { href: link("rollouts", address, { step: run.step }) }, formatCount(run.step)), run.num_steps ? h("span", { class: "soft" }, `/${formatCount(run.num_steps)}`) : null),
      h("td", { "data-label": "Held-out" }, run.headline ? [headlineText(run.headline), h("div", { class: "small soft" }, `${run.headline.split}/${run.headline.metric}`)] : h("span", { class: "soft" }, UNKNOWN)),
      h("td", { "data-label": "Training reward" }, run.training_reward ? rewardText(run.training_reward) : [rewardText(run.reward), run.reward ? h("span", { class: "small soft" }, ` ${run.reward.split}`) : null]),
      h("td", { class: "run-curve" }, spark),
      h("td", { class: "number", "data-label": "Time" }, h("span", { title: `${formatSeconds(run.seconds_per_step)} per step` }, formatSeconds(run.seconds))),
      h("td", { class: "number", "data-label": "Cost" }, h("a", { href: link("costs", address) }, formatUsd(run.costs_usd))),
      h("td", { "data-label": "Updated" }, age, run.eta_s === null || run.eta_s === undefined ? null : h("span", { class: "small soft" }, ` done in ${formatSeconds(run.eta_s)}`)),
    ];
    return h("tr", { class: isMember ? "run-row is-member" : "run-row" }, cells, this.makeNotes(run, address));
  }

  /**
   * Runs that differ in the seed alone: means, with the lowest and the highest.
   * @param {Line} line
   * @param {HTMLElement} age
   */
  makeGroup({ key, name, runs, group }, age) {
    const changes = runs.map((run) => run.headline).filter((one) => one && one.a !== one.b);
    const figures = group ?? Object.fromEntries(["before", "after", "difference"].map((one) => [one, spread(changes.map((change) => change[one]?.mean))]));
    const sparks = runs.map((run) => run.spark).filter((one) => one && one.metric === runs[0].main_metric);
    const isOpen = this.opened.has(key);
    const steps = spread(runs.map((run) => run.step));
    const states = [...new Set(runs.map((run) => run.state))];
    const toggle = h("button", { type: "button", class: "run-link quiet", "aria-expanded": String(isOpen), "on:click": () => this.toggle(key) }, h("span", { class: "triangle", "aria-hidden": true }, isOpen ? "▾" : "▸"), name);
    const [first] = changes;
    return h("tr", { class: "run-row is-group" },
      this.makeBox(key, `${name}, ${runs.length} runs as one`),
      h("td", { class: "run-who" }, toggle, h("div", { class: "small soft" }, `${runs.length} runs that differ in the seed alone: ${runs.map((run) => run.seed).join(", ")}`)),
      h("td", { "data-label": "State" }, states.map(stateChip)),
      h("td", { class: "number", "data-label": "Step" }, steps && steps.low !== steps.high ? `${formatCount(steps.low)} to ${formatCount(steps.high)}` : formatCount(steps?.low)),
      h("td", { "data-label": "Held-out" }, groupHeadline(figures), first ? h("div", { class: "small soft" }, `${first.split}/${first.metric}, ${changes.length} of ${plural(runs.length, "seed")}`) : null),
      h("td", { "data-label": "Training reward" }, spreadText(spread(runs.map((run) => run.training_reward?.mean)))),
      h("td", { class: "run-curve" }, sparks.length > 0 ? h("a", { href: link("compare", [], { run: [key], metric: [runs[0].main_metric] }) }, sparkline(/** @type {any} */ (joinSeries(sparks)), `mean of ${sparks.length} runs`, runs[0].reward?.split !== "train")) : null),
      h("td", { class: "number", "data-label": "Time" }, h("span", { title: "mean of the runs" }, formatSeconds(spread(runs.map((run) => run.seconds))?.mean))),
      h("td", { class: "number", "data-label": "Cost" }, h("span", { title: "mean of the runs" }, formatUsd(spread(runs.map((run) => run.costs_usd))?.mean))),
      h("td", { "data-label": "Updated" }, age));
  }

  /** @param {string} key */
  toggle(key) {
    if (!this.opened.delete(key)) this.opened.add(key);
    setQuery({ open: [...this.opened] });
    this.arrange();
  }

  /**
   * What happened or runs now, and the newest finding; laid out below the figures.
   * @param {import("../parts/run_summary.js").RunSummary} run
   * @param {string[]} address
   */
  makeNotes(run, address) {
    const [finding, ...more] = groupFindings(run.findings);
    if (!run.now && !finding && !run.outcome && !run.labels.notes) return null;
    const reason = run.outcome?.why?.[0] ?? (run.outcome && run.state !== "failed" ? null : run.now);
    return h("td", { class: "run-notes small" },
      run.outcome || reason ? h("div", null, outcomeText(run.outcome), run.outcome ? " " : null, reason) : null,
      run.labels.notes ? h("div", { class: "notes" }, run.labels.notes.split("\n")[0]) : null,
      finding ? h("div", { class: "run-finding" },
        h("a", { href: link("run", address, { step: finding.steps[0] }) }, `step ${finding.steps[0]}`), ` ${finding.text}`,
        more.length > 0 ? h("a", { href: link("run", address) }, ` ${plural(more.length, "more kind of finding", "more kinds of finding")}`) : null) : null);
  }

  /** Put the rows that the filters keep into their order. */
  arrange() {
    const { runs, groups } = this.answer;
    const filter = { text: this.search.value, project: this.project.value, tag: this.tag.value, state: this.state.value, archived: this.archived.checked, starred: this.starred.checked };
    const lines = linesOf(runs, groups, { filter, joinsSeeds: this.seeds.checked, sort: this.sort, descending: this.descending });
    const rows = lines.flatMap((line) => {
      if (line.runs.length === 1) return [this.rowOf(line, "one")];
      const members = this.opened.has(line.key) ? line.runs.map((run) => this.rowOf({ key: keyOf(run), name: keyOf(run), runs: [run], group: null }, "member")) : [];
      return [this.rowOf(line, "group"), ...members];
    });
    if (rows.length !== this.body.children.length || rows.some((row, at) => this.body.children[at] !== row)) {
      const focused = document.activeElement;
      replace(this.body, rows);
      if (focused instanceof HTMLElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
    }
    if (rows.length === 0) replace(this.body, h("tr", null, h("td", { colspan: COLUMNS.length, class: "soft" }, "No run matches. ", runs.some((run) => run.labels.archived) && !this.archived.checked ? "Archived runs are left out." : null)));
    const shown = lines.reduce((sum, line) => sum + line.runs.length, 0);
    this.count.textContent = shown === runs.length ? plural(runs.length, "run") : `${formatCount(shown)} of ${plural(runs.length, "run")}`;
    this.showChosen();
  }

  onFilter() {
    setQuery({
      text: this.search.value, project: this.project.value, tag: this.tag.value, state: this.state.value,
      starred: this.starred.checked ? "on" : null, archived: this.archived.checked ? "on" : null, seeds: this.seeds.checked ? null : "apart",
    });
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
    const known = new Set(this.answer.runs.map(keyOf));
    for (const key of this.chosen) if (!key.split("/")[1]?.split(",").every((name) => known.has(`${key.split("/")[0]}/${name}`))) this.chosen.delete(key);
    const { size } = this.chosen;
    this.compare.disabled = size < 2;
    this.compare.hidden = this.answer.runs.length < 2;
    this.compare.textContent = size < 2 ? `Choose 2 to ${MAX_ITEMS} to compare` : `Compare ${size}`;
    for (const box of this.body.querySelectorAll("input")) box.disabled = size >= MAX_ITEMS && !box.checked;
  }

  /** @param {number} rows */
  move(rows) {
    const links = [.../** @type {NodeListOf<HTMLElement>} */ (this.body.querySelectorAll(".run-link"))];
    const at = links.findIndex((one) => one.closest("tr")?.contains(document.activeElement));
    links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + rows))]?.focus();
  }
}
