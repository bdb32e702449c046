// The list of runs: filters, sorting, and runs that differ in the seed alone as one line and one curve.
import assert from "node:assert/strict";
import { test } from "node:test";
import { isItem, itemName, joinSeries, runsOf } from "../static/curves/seeds.js";
import { lookOf } from "../static/lib/colours.js";
import { linesOf } from "../static/parts/run_order.js";
import { groupHeadline, outcomeText, spread } from "../static/parts/run_summary.js";
import { joinSettings } from "../static/parts/settings_table.js";
import { useFakeDom } from "./fake_dom.js";

useFakeDom();

const run = (name, more = {}) => ({ project: "games", name, base_model: "b", state: "finished", step: 4, labels: { tags: [], notes: "", star: false, archived: false, ...more.labels }, ...more.fields });
const held = (after, difference = null) => ({ headline: { a: 0, b: 4, before: { mean: 0.5 }, after: { mean: after }, difference: difference === null ? null : { mean: difference } } });
const RUNS = [
  run("seed0", { fields: held(0.7, 0.2), labels: { tags: ["long"] } }), run("other", { fields: held(0.9), labels: { star: true } }),
  run("seed1", { fields: held(0.6, 0.1) }), run("old", { fields: { state: "failed", headline: null }, labels: { archived: true, notes: "a leak" } }),
];
const GROUPS = [{ project: "games", name: "seed*", runs: ["seed0", "seed1"] }];
const EVERY = { text: "", project: "", tag: "", state: "", archived: false, starred: false };
const keys = (filter = {}, more = {}) => linesOf(RUNS, GROUPS, { filter: { ...EVERY, ...filter }, joinsSeeds: true, sort: null, descending: true, ...more }).map((line) => line.key);

test("runs of one group are one line, and starred runs come first", () => {
  assert.deepEqual(keys(), ["games/other", "games/seed0,seed1"]);
  assert.deepEqual(keys({}, { joinsSeeds: false }), ["games/other", "games/seed0", "games/seed1"]);
});

test("filters by text, tag, state, star and archive", () => {
  assert.deepEqual(keys({ tag: "long" }), ["games/seed0"], "what is left of a group is one run");
  assert.deepEqual(keys({ text: "LEAK", archived: true }), ["games/old"]);
  assert.deepEqual(keys({ state: "failed" }), []);
  assert.deepEqual(keys({ state: "failed", archived: true }), ["games/old"]);
  assert.deepEqual(keys({ starred: true }), ["games/other"]);
  assert.deepEqual(keys({ project: "mails" }), []);
});

test("lines are sorted by the mean of their runs, and what is not known comes last", () => {
  assert.deepEqual(keys({ archived: true }, { sort: "heldout" }), ["games/other", "games/seed0,seed1", "games/old"]);
  assert.deepEqual(keys({ archived: true }, { sort: "heldout", descending: false }), ["games/seed0,seed1", "games/other", "games/old"]);
  assert.deepEqual(keys({ archived: true }, { sort: "name", descending: false }), ["games/old", "games/other", "games/seed0,seed1"]);
});

test("an item of an address is a run or several", () => {
  assert.deepEqual(runsOf("games/a,b"), ["games/a", "games/b"]);
  assert.equal(itemName("games/a,b,c"), "games/a and 2 more");
  assert.deepEqual(["games/a", "games/a,b", "games", "games/a/b"].map(isItem), [true, true, false, false]);
});

test("curves of several runs become a mean with the range, also where they were measured at other steps", () => {
  const series = (steps, mean) => ({ metric: "train/reward", split: "train", steps, mean, low: null, high: null, num: null, num_steps: null });
  const joined = joinSeries([series([1, 2, 3], [0, 0.2, 0.4]), series([1, 3], [0.2, 0.8]), series([], [])]);
  assert.deepEqual(joined.steps, [1, 2, 3]);
  assert.deepEqual(joined.mean.map((value) => Number(value.toFixed(6))), [0.1, 0.35, 0.6]);
  assert.deepEqual([joined.low, joined.high], [[0, 0.2, 0.4], [0.2, 0.5, 0.8]]);
  const shorter = joinSeries([series([1, 2], [0, 1]), series([1], [1])]);
  assert.deepEqual([shorter.mean, shorter.low], [[0.5, 1], [0, null]], "a run that has ended is not guessed further");
  assert.equal(joinSeries([series([1], [2])]).mean[0], 2);
});

test("twenty lines differ in colour or dash", () => {
  assert.equal(new Set(Array.from({ length: 20 }, (_, at) => JSON.stringify(lookOf(at)))).size, 20);
});

test("figures of several runs", () => {
  assert.deepEqual(spread([0.2, null, 0.4]), { mean: 0.30000000000000004, low: 0.2, high: 0.4, num: 2 });
  assert.equal(spread([null, undefined]), null);
  assert.match(groupHeadline({ before: spread([0.4, 0.6]), after: spread([0.7, 0.9]), difference: spread([0.3, 0.3]) }).textContent, /0\.500 → 0\.800 \+0\.30 \[\+0\.30, \+0\.30\]/);
  assert.equal(outcomeText({ kind: "bad", text: "It failed at step 1 of 8" }).textContent, "It failed at step 1 of 8.");
});

test("settings of several runs have all values where they differ", () => {
  const joined = joinSettings([{ program: { art: "1" }, recipe: { seed: 0 } }, { program: { art: "1" }, recipe: { seed: 1 } }]);
  assert.equal(joined["recipe.seed"], "0, 1");
  assert.equal(joined["program.art"], "1");
  assert.equal(joinSettings([{ a: "x".repeat(60) }, { a: "y".repeat(60) }]).a, `${"x".repeat(60)} and 1 more`);
});
