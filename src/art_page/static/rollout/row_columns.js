// The columns of the table of rollouts.

import { h, svg } from "../lib/dom.js";
import { formatCount, formatFixed, formatNumber, formatSeconds, formatSigned } from "../lib/format.js";
import { link } from "../lib/router.js";
import { visibleText } from "../lib/visible_text.js";

/** @typedef {{ text: string, start: number, end: number }} Snippet  the match is characters (not UTF-16 units) start to end */

const BEFORE_MATCH = 28;

/** A snippet before, in and after its match; characters outside the basic plane count as one. What is far before the match is
 * left out, so that a cell shows the match.
 * @param {Snippet} snippet @returns {[string, string, string]} */
export function splitSnippet(snippet) {
  const characters = [...snippet.text];
  const part = (/** @type {number} */ start, /** @type {number|undefined} */ end) => visibleText(characters.slice(start, end).join("")).replace(/\s+/g, " ");
  const first = Math.max(0, snippet.start - BEFORE_MATCH);
  return [(first > 0 ? "…" : "") + part(first, snippet.start), part(snippet.start, snippet.end), part(snippet.end, undefined)];
}

/** One line of at most `limit` characters, safe to show in a cell. @param {string|null|undefined} text @param {number} [limit] @returns {string} */
export function oneLine(text, limit = 200) {
  return visibleText((text ?? "").slice(0, limit).replace(/\s+/g, " "));
}

/** A reason of the ledger in words: "no reward spread". @param {string|null|undefined} reason @returns {string} */
export function reasonText(reason) {
  return oneLine(reason?.replaceAll("_", " "));
}

/** The rewards of a group as bars, on a scale from the lowest of 0 and the rewards to the highest; this rollout's is filled.
 * @param {(number|null)[]} rewards @param {number} index */
export function rewardStrip(rewards, index) {
  const known = /** @type {number[]} */ (rewards.filter((reward) => reward !== null));
  const [low, high] = [Math.min(0, ...known), Math.max(0, ...known)];
  const y = (/** @type {number} */ reward) => 17 - (16 * (reward - low)) / (high - low || 1);
  const width = Math.max(1, Math.min(6, Math.floor(52 / rewards.length)));
  return svg("svg", { class: "reward-strip", width: width * rewards.length, height: 18, role: "img", "aria-label": `rewards of the group: ${rewards.map((reward) => formatNumber(reward)).join(", ")}` },
    rewards.map((reward, place) => {
      const [top, bottom] = reward === null ? [16, 17] : [Math.min(y(reward), y(0)), Math.max(y(reward), y(0))];
      return svg("rect", { x: place * width, y: Math.min(top, 16), width: Math.max(1, width - 1), height: Math.max(1, bottom - top), class: reward === null ? "no-reward" : place === index ? "this-one" : null });
    }));
}

/** @param {string} outcome */
function outcomeText(outcome) {
  return outcome === "ok" ? "ok" : h("span", { class: outcome === "infra_fault" ? "bad" : "note" }, outcome.replace("_", " "));
}

/** @param {string[]} args project and name
 * @param {{ isNarrow: boolean, hasText: boolean, hasSplit: boolean, hasStep: boolean, metrics: string[] }} shown
 *   `metrics`: the task's numbers that have a column
 * @returns {import("../lib/table.js").Column[]} */
export function columnsFor(args, shown) {
  /** @param {any} row */
  const place = (row) => [shown.hasSplit ? null : visibleText(row.split), shown.hasStep ? null : row.step, `${row.group}.${row.index}`].filter((part) => part !== null).join(" ");
  /** @type {Record<string, import("../lib/table.js").Column>} */
  const columns = {
    place: { key: "place", title: shown.hasStep ? "rollout" : "step, rollout", cell: place, sort: "step", width: 56 + (shown.hasSplit ? 0 : 44) + (shown.hasStep ? 0 : 48), hint: "split, step, and the rollout as group.index" },
    scenario: { key: "scenario", title: "scenario", cell: (row) => oneLine(row.scenario), cellHint: (row) => oneLine(row.scenario, 600) },
    snippet: { key: "snippet", title: "found", width: 360, cell: (row) => snippetCell(row.snippet), cellHint: (row) => (row.snippet ? oneLine(row.snippet.text, 2000) : null) },
    group: { key: "group", title: "group", width: 64, hint: "rewards of its group; opens the group side by side", cell: (row) => groupCell(args, row) },
    reward: { key: "reward", title: "reward", sort: "reward", number: true, width: 76, cell: (row) => formatFixed(row.reward, 3) },
    advantage: { key: "advantage", title: shown.isNarrow ? "adv." : "advantage", sort: "advantage", number: true, width: shown.isNarrow ? 64 : 88, cell: (row) => formatSigned(row.advantage) },
    judge: { key: "judge", title: "judge", sort: "judge_score", number: true, width: 64, cell: (row) => formatFixed(row.judge_score) },
    turns: { key: "turns", title: "turns", sort: "turns", number: true, width: 60, cell: (row) => formatCount(row.num_turns) },
    tokens: { key: "tokens", title: "tokens", sort: "tokens", number: true, width: 72, hint: "sampled tokens", cell: (row) => formatCount(row.num_tokens) },
    duration: { key: "duration", title: "time", sort: "duration", number: true, width: 72, cell: (row) => formatSeconds(row.duration_s) },
    stop: { key: "stop", title: "stop", width: 84, cell: (row) => oneLine(row.stop) },
    outcome: { key: "outcome", title: "outcome", width: 92, cell: (row) => outcomeText(row.outcome) },
    dropped: { key: "dropped", title: "dropped because", width: 168, cell: (row) => reasonText(row.dropped_because), cellHint: (row) => oneLine(row.dropped_because, 600) },
  };
  const wide = ["place", "scenario", "group", "reward", "advantage", "judge", "turns", "tokens", "duration", "stop", "outcome", "dropped"];
  const ofTask = shown.metrics.map((name) => `metric ${name}`);
  for (const name of shown.metrics) columns[`metric ${name}`] = { key: `metric ${name}`, title: oneLine(name, 40), hint: `${name}, a number that the task gives a rollout`, sort: `metric ${name}`, number: true, width: Math.max(56, Math.min(128, 28 + 7 * name.length)), cell: (row) => formatNumber(row.metrics[name] ?? null) };
  const keys = shown.isNarrow ? ["place", "reward", ...ofTask.slice(0, 1), "advantage", "scenario"] : [...wide.slice(0, 5), ...ofTask, ...wide.slice(5)];
  const shownKeys = shown.hasText ? withSnippet(keys) : keys;
  return shownKeys.map((key) => (shown.isNarrow && key === "scenario" ? { ...columns[key], width: 150 } : columns[key]));
}

/** The found words take the place of what matters less in a search. @param {string[]} keys @returns {string[]} */
function withSnippet(keys) {
  const kept = keys.filter((key) => !["judge", "turns", "duration", "dropped"].includes(key));
  return [...kept.slice(0, 2), "snippet", ...kept.slice(2)];
}

/** @param {Snippet|null} snippet */
function snippetCell(snippet) {
  if (!snippet) return null;
  const [before, match, after] = splitSnippet(snippet);
  return [before, h("mark", null, match), after];
}

/** @param {string[]} args @param {any} row */
function groupCell(args, row) {
  const rewards = row.group_rewards ?? [];
  return h("a", { href: link("group", [...args, row.split, row.step, row.group]), tabindex: -1, class: "group-cell" }, rewards.length > 0 ? rewardStrip(rewards, row.index) : `group ${row.group}`);
}
