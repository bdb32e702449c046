/** System: processes, memory, queues, throughput, jobs and disk of the server. */
import { get, getSession } from "../lib/api.js";
import { chart } from "../lib/chart.js";
import { categorical } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { formatBytes, formatCount, formatNumber, formatPercent, formatSeconds, plural, UNKNOWN } from "../lib/format.js";
import { link } from "../lib/router.js";
import { missing, showWhenLoaded } from "../lib/states.js";

/** @typedef {Record<string, any>} SystemAnswer  the wire type of art/protocol/live.py */

/** @type {import("../lib/context.js").View} */
export const systemView = {
  title: () => "System",
  async show(root, _route, ctx) {
    if (!getSession().has_server) {
      replace(root, missing("No server runs here: this page reads the files of a data directory. `art-server` shows its processes, memory and queues in this place."));
      return;
    }
    const load = () => get("system", {}, ctx.signal);
    const curves = new SystemCurves();
    const draw = (/** @type {SystemAnswer} */ answer) => {
      replace(root, drawSystem(answer, curves.element));
      curves.update(answer);
    };
    await showWhenLoaded(root, ctx.signal, load, draw);
    ctx.refreshEvery(2, async () => {
      const answer = await load();
      if (!ctx.signal.aborted && !isReading(root)) draw(answer);
    });
    return () => curves.destroy();
  },
};

/**
 * Whether the reader has marked text in the view or holds the focus there, which drawing again would take away.
 * @param {HTMLElement} root
 */
function isReading(root) {
  const marked = getSelection();
  const hasMarked = marked !== null && !marked.isCollapsed && marked.anchorNode !== null && root.contains(marked.anchorNode);
  return hasMarked || root.contains(document.activeElement);
}

const CURVES = /** @type {[string, string, (value: number | null) => string][]} */ ([
  ["Sampled tokens per second", "sampled_per_s", formatNumber], ["Trained tokens per second", "trained_per_s", formatNumber],
  ["Requests", "num_requests", formatCount], ["Memory of the processes", "rss_bytes", formatBytes],
]);

/** Curves of the server's last hour. They stay while the view is drawn again. */
class SystemCurves {
  constructor() {
    const axis = { word: "time", format: (/** @type {number | null} */ value) => (value === null ? UNKNOWN : value > -1 ? "now" : `${formatSeconds(-value)} ago`) };
    this.charts = CURVES.map(([title, , format], at) => chart({ title, lines: [], format, axis, height: 120, cursor: "system", hint: at === 2 ? "Requests that wait or are computed" : null }));
    this.element = h("section", { class: "system-curves", "aria-label": "The last hour" }, this.charts.map((one) => one.element));
  }

  /** @param {SystemAnswer} answer */
  update({ at: now, history }) {
    this.element.hidden = history.at.length === 0;
    const steps = history.at.map((/** @type {number} */ at) => at - now);
    CURVES.forEach(([, key], at) => this.charts[at].update({ lines: steps.length > 0 ? [{ label: "last hour", colour: categorical(at), steps, mean: history[key], marks: false }] : [] }));
  }

  destroy() {
    for (const one of this.charts) one.destroy();
  }
}

/** @param {SystemAnswer} answer @param {HTMLElement} curves */
function drawSystem(answer, curves) {
  return [
    h("div", { class: "head" }, h("h1", null, "System")),
    systemFigures(answer),
    curves,
    answer.is_whole ? null : h("p", { class: "soft" }, "This key sees one project: the processes and the machine are shown to keys for all projects."),
    answer.is_whole ? listed("Processes", processTable(answer.processes)) : null,
    answer.is_whole ? listed("Engines", answer.engines.length > 0 ? engineTable(answer.engines) : nothing("No engine is up.")) : null,
    ...(answer.cluster === null ? [] : clusterSections(answer.cluster)),
    listed("Jobs", answer.jobs.length > 0 ? jobTable(answer.jobs) : nothing("No job runs or waits.")),
    listed("Tokens since the server began", answer.tokens.length > 0 ? tokenTable(answer.tokens) : nothing("No model has been asked.")),
  ];
}

/** @param {SystemAnswer} answer */
function systemFigures({ at, started_at: startedAt, disk, memory_bytes: memory, processes, tokens, num_viewers: numViewers, cluster }) {
  const here = cluster === null ? processes : processes.filter((/** @type {any} */ one) => one.kind === "server");
  const used = here.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + (one.rss_bytes ?? 0), 0);
  const sampled = rateOf(tokens, "sampled_per_s");
  const trained = rateOf(tokens, "trained_per_s");
  /** @type {[string, string | null][]} */
  const figures = [
    ["up for", formatSeconds(at - startedAt)],
    ["sampled", sampled === null ? null : `${formatNumber(sampled)} tokens/s`],
    ["trained", trained === null ? null : `${formatNumber(trained)} tokens/s`],
    [cluster === null ? "memory of all processes" : "memory of the server", memory === null ? null : `${formatBytes(used)} of ${formatBytes(memory)}`],
    ["free disk", disk === null ? null : `${formatBytes(disk.free_bytes)} of ${formatBytes(disk.total_bytes)}`],
    ["live viewers", formatCount(numViewers)],
  ];
  return h("dl", { class: "figures" }, figures.map(([word, text]) => h("div", null, h("dt", null, word), h("dd", null, text ?? UNKNOWN))));
}

/**
 * @param {Record<string, any>[]} tokens
 * @param {string} name
 */
function rateOf(tokens, name) {
  const known = tokens.map((one) => one[name]).filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0);
}

/**
 * @param {string} title
 * @param {HTMLElement} content
 */
function listed(title, content) {
  return h("section", null, h("h2", null, title), h("div", { class: "scroll", tabindex: 0 }, content));
}

/** @param {string} text */
function nothing(text) {
  return h("p", { class: "soft" }, text);
}

/**
 * @param {string[]} titles  those that begin with # are columns of numbers
 * @param {import("../lib/dom.js").Child[][]} rows
 */
function plainTable(titles, rows) {
  const isNumber = titles.map((title) => title.startsWith("#"));
  const head = titles.map((title, at) => h("th", { scope: "col", class: isNumber[at] ? "number" : null }, title.replace(/^#/, "")));
  return h("table", { class: "nowrap" }, h("thead", null, h("tr", null, head)), h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, at) => h("td", { class: isNumber[at] ? "number" : null }, cell))))));
}

/** @param {Record<string, any>[]} processes */
function processTable(processes) {
  const looks = /** @type {Record<string, string>} */ ({ up: "chip-good", starting: "chip-note", failed: "chip-bad" });
  return plainTable(["Process", "State", "Does", "#Requests", "#Policies", "Runs on", "#pid", "#Memory", "#Restarts"], processes.map((one) => [
    one.name,
    h("span", { class: `chip ${looks[one.state] ?? ""}` }, one.state),
    one.doing === null ? UNKNOWN : `${one.doing}${one.doing_s === null || one.doing_s < 2 ? "" : `, for ${formatSeconds(one.doing_s)}`}`,
    formatCount(one.num_requests),
    one.num_requests === null ? UNKNOWN : policyCount(one),
    one.place ?? UNKNOWN,
    one.pid === null ? UNKNOWN : String(one.pid),
    formatBytes(one.rss_bytes),
    one.num_restarts === 0 ? "0" : h("span", { class: "note", title: one.last_end ?? "" }, formatCount(one.num_restarts)),
  ]));
}

/**
 * How many policies an engine serves, and those that it refused though another replica serves them.
 * @param {Record<string, any>} engine
 */
function policyCount(engine) {
  const refused = Object.entries(engine.refused).map(([name, why]) => `${name}: ${why}`);
  const served = h("span", { title: engine.policies.join(", ") }, formatCount(engine.policies.length));
  return refused.length === 0 ? served : h("span", null, served, " ", h("span", { class: "chip chip-bad", title: refused.join("\n") }, `${formatCount(refused.length)} refused`));
}

/** @param {Record<string, any>[]} engines */
function engineTable(engines) {
  return plainTable(["Engine", "Base model", "#Requests computed", "#Requests waiting", "#Adapters", "Cache of keys and values"], engines.map((one) => [
    one.name, one.base_model, formatCount(one.num_running), formatCount(one.num_waiting), formatCount(one.num_adapters),
    one.kv_cache_share === null ? UNKNOWN : shareBar(one.kv_cache_share, formatPercent(one.kv_cache_share)),
  ]));
}

/** @param {Record<string, any>} cluster */
function clusterSections({ kind, nodes, actors, workers, free, store_bytes: store, store_used_bytes: used, num_lost: numLost }) {
  const facts = [`${plural(numLost, "worker")} lost so far`];
  if (nodes.length > 0) facts.push(`${amounts(free)} free`);
  if (store) facts.push(`object store: ${formatBytes(used)} of ${formatBytes(store)}`);
  const chip = (/** @type {boolean} */ good, /** @type {string} */ text) => h("span", { class: `chip ${good ? "chip-good" : "chip-bad"}` }, text);
  const sections = [listed("Cluster", nothing(`${kind}: ${facts.join(", ")}`))];
  if (nodes.length > 0) {
    sections.push(listed("Nodes", plainTable(["Node", "Address", "State", "Has"], nodes.map((/** @type {any} */ one) => [
      one.machine, one.address, chip(one.alive, one.alive ? "alive" : "gone"), amounts(one.resources),
    ]))));
  }
  if (actors.length > 0) {
    sections.push(listed("Actors", plainTable(["Actor", "Runs on", "#Starts"], actors.map((/** @type {any} */ one) => [one.name, one.machines.join(", ") || one.problem || "not placed", formatCount(one.starts)]))));
  }
  sections.push(listed("Workers", workers.length === 0 ? nothing("No worker has come.") : plainTable(["Worker", "Machine", "#pid", "State"], workers.map((/** @type {any} */ one) => [
    one.kind, one.machine, String(one.pid), one.state,
  ]))));
  return sections;
}

/** @param {Record<string, number>} resources */
function amounts(resources) {
  return Object.entries(resources).map(([name, count]) => `${formatNumber(count)} ${name}`).join(", ");
}

/** @param {Record<string, any>[]} jobs */
function jobTable(jobs) {
  return plainTable(["Model", "Job", "State", "#Since", "Queue"], jobs.map((one) => [
    h("a", { href: link("run", [one.project, one.name]) }, `${one.project}/${one.name}`),
    one.kind,
    one.runs ? jobProgress(one.progress) : `waits${one.queue_place === null ? "" : `, place ${one.queue_place}`}`,
    formatSeconds(one.age_s),
    one.lane,
  ]));
}

/** @param {{phase: string, done: number, total: number} | null} progress */
function jobProgress(progress) {
  if (progress === null) return "runs";
  const unit = progress.phase === "train" ? plural(progress.total, "micro-batch", "micro-batches") : formatCount(progress.total);
  return progress.total > 0 ? shareBar(progress.done / progress.total, `${progress.phase}: ${formatCount(progress.done)} of ${unit}`) : progress.phase;
}

/** @param {Record<string, any>[]} tokens */
function tokenTable(tokens) {
  return plainTable(["Model", "#Prompt", "#From the cache", "#Sampled", "#per second", "#Trained", "#per second"], tokens.map((one) => [
    h("a", { href: link("run", [one.project, one.name]) }, `${one.project}/${one.name}`),
    formatCount(one.prompt), formatPercent(one.prompt > 0 ? one.cached / one.prompt : null), formatCount(one.sampled), formatNumber(one.sampled_per_s),
    formatCount(one.trained), formatNumber(one.trained_per_s),
  ]));
}

/**
 * @param {number} share  from 0 to 1
 * @param {string} text
 */
function shareBar(share, text) {
  const filled = h("span", { style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } });
  return h("span", { class: "nowrap" }, h("span", { class: "share", "aria-hidden": "true" }, filled), text);
}
