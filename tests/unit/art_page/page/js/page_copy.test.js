// Answers of a copy on the disk: which file has them, and the table of rollouts as the server would answer it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fileOf, tableOf } from "../static/lib/page_copy.js";

test("each answer has its file", () => {
  const files = { runs: "all", "comparisons/c": "all", "runs/p/n": "p/n/run", "runs/p/n/series": "p/n/run", "runs/p/n/rollouts": "p/n/rollouts",
    "runs/p/n/rollouts/train/3/0/7/tokens": "p/n/train-3-0", "runs/p/n/groups/val/3/1": "p/n/val-3-1", "runs/p/n/steps/4/tree": "p/n/step-4" };
  for (const [path, file] of Object.entries(files)) assert.equal(fileOf(path), file);
});

test("the table is filtered, sorted and cut", () => {
  const row = (index, reward, more = {}) => ({ split: "train", step: 1, group: 0, index, reward, outcome: "ok", stop: "stop", scenario: "tea", dropped_because: null, advantage: 1, metrics: {}, ...more });
  const table = { rows: [row(0, 0.5, { metrics: { win: 1 } }), row(1, null), row(2, 0.9, { split: "val" }), row(3, 0.1, { dropped_because: "no_reward_spread", metrics: { win: 0 } })], total: 4 };
  const found = (params) => tableOf(table, params).rows.map((one) => one.index);
  assert.deepEqual(found({ sort: "reward", descending: true }), [2, 0, 3, 1]);
  assert.deepEqual(found({ sort: "reward", descending: false }), [3, 0, 2, 1]);
  assert.deepEqual(found({ split: "train", min_reward: "0.3" }), [0]);
  assert.deepEqual(found({ metric: "win", min_metric: 1 }), [0]);
  assert.deepEqual(found({ sort: "metric", sort_metric: "win" }), [0, 3, 1, 2]);
  assert.deepEqual([found({ dropped: "any" }), found({ dropped: "none" }), found({ step: 2 }), found({ text: "TEA" })], [[3], [0, 1, 2], [], [0, 1, 2, 3]]);
  assert.deepEqual(tableOf(table, { offset: 1, limit: 2 }).rows.length, 2);
  assert.equal(tableOf(table, { offset: 1, limit: 2 }).total, 4);
});
