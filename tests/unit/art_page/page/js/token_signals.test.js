// Signals, their scales and categories, joining pieces of a path, why a value is missing.
import assert from "node:assert/strict";
import { test } from "node:test";
import { SIGNALS, appendTokens, binsOf, categoriesOf, categoryOf, emptyPath, roundUp, scaleOf, signalAfter, signalOf, whyMissing } from "../static/tokens/token_signals.js";

const span = (start, end, more = {}) => ({ start, end, role: "policy", exchange_id: "ex", policy_version: 3, sampled: true, trained: true, reason: "", ...more });
const answer = (first, spans, values, more = {}) => {
  const num = Object.values(values)[0].length;
  return { paths: [{ path: 0, num_tokens: 6 }], path: 0, first, token_ids: Array(num).fill(1), texts: Array(num).fill("x"), is_special: Array(num).fill(false), spans, values, missing: null, step: 4, update: 0, ...more };
};

test("a signal is found by its key or the short word of an address", () => {
  assert.equal(signalOf("ratio").key, "importance_ratio");
  assert.equal(signalOf("mask").key, "mask");
  assert.equal(signalOf("nonsense").key, "sampling_logprob");
  assert.equal(signalOf(undefined).key, "sampling_logprob");
});

test("the next signal comes round to the first", () => {
  let key = SIGNALS[0].key;
  const seen = new Set();
  for (const _ of SIGNALS) {
    seen.add(key);
    key = signalAfter(key).key;
  }
  assert.equal(key, SIGNALS[0].key);
  assert.equal(seen.size, SIGNALS.length);
});

test("log-probs have one scale for all rollouts: 0 is light, -6 and below dark", () => {
  const scale = scaleOf(signalOf("sampling_logprob"), [-100, -0.1, null]);
  assert.deepEqual([0, -3, -6, -100].map(scale.place), [0, 0.5, 1, 1]);
});

test("ratios are placed on a log scale with 1 in the middle", () => {
  const scale = scaleOf(signalOf("importance_ratio"), [0.5, 1, 2]);
  assert.equal(scale.high, 2);
  assert.ok(Math.abs(scale.place(1) - 0.5) < 1e-9);
  assert.ok(Math.abs(scale.place(2) - 1) < 1e-9 && Math.abs(scale.place(0.5)) < 1e-9);
  assert.ok(Math.abs(scale.place(Math.SQRT2) - 0.75) < 1e-9);
  assert.deepEqual(scale.ticks.map((tick) => tick.text), ["1/2", "1", "2"]);
  assert.equal(scaleOf(signalOf("importance_ratio"), [1, 1.01]).high, 1.1);
  assert.equal(scale.place(0), 0);
});

test("one outlier among many does not set the scale", () => {
  assert.equal(scaleOf(signalOf("importance_ratio"), [...Array(999).fill(1.05), 300]).high, 1.1);
});

test("advantages are placed about 0", () => {
  const scale = scaleOf(signalOf("advantage"), [-0.42, 0.31, null]);
  assert.deepEqual([scale.low, scale.high], [-0.5, 0.5]);
  assert.deepEqual([-0.5, 0, 0.5, 9].map(scale.place), [0, 0.5, 1, 1]);
  assert.deepEqual(scale.ticks.map((tick) => tick.text), ["−0.5", "0.0", "+0.5"]);
});

test("a scale without values is still a scale", () => {
  for (const signal of SIGNALS) assert.ok(scaleOf(signal, [null]).high > scaleOf(signal, [null]).low);
});

test("round numbers for the ends of a scale", () => {
  assert.deepEqual([0.3, 0.51, 1, 1.2, 7, 0.02].map(roundUp), [0.5, 1, 1, 2, 10, 0.02]);
});

test("answers join to one path, and a span that two answers share is one span", () => {
  const path = emptyPath(answer(0, [], { entropy: [1, 2, 3] }));
  appendTokens(path, answer(0, [span(0, 1, { sampled: false, trained: false, reason: "prompt" }), span(1, 5)], { entropy: [null, 2, 3] }));
  appendTokens(path, answer(3, [span(1, 5), span(5, 6, { exchange_id: "ex2" })], { entropy: [4, 5, 6], advantage: [0.5, 0.5, 0.5] }));
  assert.equal(path.ids.length, 6);
  assert.deepEqual(path.values.entropy, [null, 2, 3, 4, 5, 6]);
  assert.deepEqual(path.values.advantage, [null, null, null, 0.5, 0.5, 0.5]);
  assert.deepEqual(path.spans.map((entry) => [entry.start, entry.end]), [[0, 1], [1, 5], [5, 6]]);
  assert.deepEqual(path.spanOf, [0, 1, 1, 1, 1, 2]);
});

test("a signal that only the first answer knows is missing in the rest, not shifted", () => {
  const path = emptyPath(answer(0, [], { entropy: [1, 2, 3] }));
  appendTokens(path, answer(0, [span(0, 3)], { entropy: [1, 2, 3] }));
  appendTokens(path, answer(3, [span(3, 6)], { advantage: [0, 0, 0] }));
  assert.deepEqual([path.values.entropy.length, path.values.entropy[4] ?? null], [6, null]);
});

test("masks and versions are categories with counts", () => {
  const spans = [span(0, 4, { sampled: false, trained: false, reason: "prompt", policy_version: null }), span(4, 6, { policy_version: 10 }), span(6, 9, { policy_version: 9, trained: false, reason: "masked: off-policy" })];
  assert.deepEqual(categoriesOf(signalOf("mask"), spans).map((entry) => [entry.key, entry.count]), [["trained", 2], ["prompt", 4], ["masked: off-policy", 3]]);
  assert.deepEqual(categoriesOf(signalOf("version"), spans).map((entry) => entry.label), ["step 9", "step 10", "not sampled here"]);
  assert.equal(categoryOf(signalOf("mask"), undefined), "not known");
});

test("why a value is missing", () => {
  const path = emptyPath(answer(0, [], { entropy: [1] }, { missing: "The file of step 4 has been removed." }));
  appendTokens(path, answer(0, [span(0, 1, { sampled: false, trained: false, reason: "prompt" }), span(1, 2, { trained: false, reason: "masked: off-policy" }), span(2, 3)], { entropy: [null, null, null] }));
  assert.match(whyMissing(signalOf("entropy"), path, 0), /did not sample it \(prompt\)/);
  assert.match(whyMissing(signalOf("entropy"), path, 1), /did not learn .* \(masked: off-policy\)/);
  assert.match(whyMissing(signalOf("policy_logprob"), path, 1), /has been removed/);
  path.missing = null;
  assert.match(whyMissing(signalOf("policy_logprob"), path, 2), /not recorded for this rollout/);
});

test("pieces of a path: extremes, mean and number of known values", () => {
  assert.deepEqual(binsOf([1, 3, null, 5], 4, 2), [{ low: 1, high: 3, mean: 2, count: 2 }, { low: 5, high: 5, mean: 5, count: 1 }]);
  assert.deepEqual(binsOf([1, 2], 2, 4).map((bin) => bin.mean), [1, 1, 2, 2]);
  assert.equal(binsOf([null], 1, 1)[0].count, 0);
});
