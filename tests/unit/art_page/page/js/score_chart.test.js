// The chart of compared models: which have a place on it, and where.
import assert from "node:assert/strict";
import { test } from "node:test";
import { axisPositions, placedModels } from "../static/parts/score_chart.js";

const score = { mean: 0.5, low: 0.4, high: 0.6 };
const models = [
  { label: "priced", kind: "endpoint", headline: score, usd_per_1000: 2, rollout_latency_s: { median: 1, p95: 2 } },
  { label: "unpriced", kind: "local", headline: score, usd_per_1000: null, rollout_latency_s: { median: 3, p95: 4 } },
  { label: "scripted", kind: "scripted", headline: score, usd_per_1000: null, rollout_latency_s: { median: 0.01, p95: 1 } },
  { label: "failed", kind: "endpoint", headline: null, usd_per_1000: null, rollout_latency_s: null },
];

test("a model without a price or a score has no place, and is never at 0", () => {
  assert.deepEqual(placedModels(models, "cost").map(({ model, x }) => [model.label, x]), [["priced", 2]]);
  assert.deepEqual(placedModels(models, "latency").map(({ model, x }) => [model.label, x]), [["priced", 1], ["unpriced", 3]]);
});

test("values that differ little lie on an axis from 0", () => {
  const { positions, isLog } = axisPositions([1, 2, 4]);
  assert.equal(isLog, false);
  assert.deepEqual(positions, [0.25, 0.5, 1]);
});

test("values that differ much lie on a logarithmic axis", () => {
  const { positions, isLog } = axisPositions([0.1, 1, 10]);
  assert.equal(isLog, true);
  assert.ok(Math.abs(positions[1] - 0.5) < 1e-9 && positions[0] === 0 && positions[2] === 1);
});

test("free models and single models have a place too", () => {
  assert.deepEqual(axisPositions([0, 0]).positions, [0.5, 0.5]);
  assert.deepEqual(axisPositions([3]).positions, [1]);
});
