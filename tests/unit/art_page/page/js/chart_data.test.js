// Smoothing, common steps, ranges of axes.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as data from "../static/chart/chart_data.js";

const near = (one, other) => assert.ok(Math.abs(one - other) < 1e-9, `${one} is not ${other}`);

test("smoothing keeps a constant, begins at the first value and never looks ahead", () => {
  assert.deepEqual(data.smoothValues([2, 2, 2], 0.9), [2, 2, 2]);
  assert.deepEqual(data.smoothValues([1, 5, 3], 0), [1, 5, 3]);
  const whole = data.smoothValues([1, 5, 3, 8], 0.6);
  assert.deepEqual(data.smoothValues([1, 5, 3], 0.6), whole.slice(0, 3));
  near(whole[1], (1 * 0.6 + 5) / (0.6 + 1));
});

test("smoothing leaves gaps and is not pulled towards 0 by them", () => {
  assert.deepEqual(data.smoothValues([null, 4, null, 4], 0.5), [null, 4, null, 4]);
});

test("a smoothed line keeps its raw values as dots and a band no narrower than the raw bands", () => {
  const line = { label: "x", colour: "#000000", steps: [0, 1, 2], mean: [0, 1, 0], low: [-0.5, 0.5, -0.5], high: [0.5, 1.5, 0.5] };
  const smooth = data.smoothLine(line, 0.8);
  assert.deepEqual(smooth.dots, line.mean);
  smooth.mean.forEach((mean, at) => {
    near(smooth.high[at] - mean, 0.5);
    near(mean - smooth.low[at], 0.5);
  });
  assert.equal(data.smoothLine(line, 0), line);
});

test("a band with gaps stays around the mean where it is known", () => {
  const smooth = data.smoothLine({ label: "x", colour: "#000000", steps: [0, 1], mean: [1, 3], low: [null, 2], high: [null, 4] }, 0.5);
  assert.equal(smooth.low[0], null);
  near(smooth.high[1] - smooth.mean[1], 1);
});

test("common steps: no point is undefined, an unknown value is null", () => {
  const lines = [{ steps: [0, 1, 3] }, { steps: [3, 5] }];
  const all = data.unionSteps(lines);
  assert.deepEqual(all, [0, 1, 3, 5]);
  assert.deepEqual(data.valuesAt(all, [0, 1, 3], [7, null, 9]), [7, null, 9, undefined]);
});

test("stacked areas add up, and a missing value lowers nothing", () => {
  const line = (steps, mean) => ({ label: "", colour: "", steps, mean });
  assert.deepEqual(data.stackLines([line([0, 1], [1, 2]), line([1], [10])]), { steps: [0, 1], tops: [[1, 2], [1, 12]] });
});

test("axes start where the meaning starts", () => {
  assert.deepEqual(data.axisRange(0.2, 0.93), [0, 1]);
  assert.deepEqual(data.axisRange(0, 0), [0, 1]);
  assert.deepEqual(data.axisRange(0.9, 1.15, { around: 1 }), [0.85, 1.15]);
  assert.deepEqual(data.axisRange(-4, -1), [-4, 0]);
  assert.deepEqual(data.axisRange(0.003, 19, { log: true }), [0.002, 20]);
  assert.deepEqual(data.axisRange(1, 1, { log: true }), [1, 2]);
  assert.deepEqual(data.axisRange(Infinity, -Infinity), [0, 1]);
  const [low, high] = data.axisRange(-0.3, 0.9);
  assert.ok(low <= -0.3 && high >= 0.9 && low > -0.8 && high < 1.5);
  for (let size = 1e-6; size < 1e6; size *= 1.7) assert.ok(data.axisRange(0, size)[1] >= size);
});

test("a live axis keeps its range until values leave it or fill less than a quarter", () => {
  assert.deepEqual(data.steadyRange(null, [0, 1]), [0, 1]);
  assert.deepEqual(data.steadyRange([0, 1], [0, 0.5]), [0, 1]);
  assert.deepEqual(data.steadyRange([0, 1], [0, 1.2]), [0, 1.2]);
  assert.deepEqual(data.steadyRange([0, 1], [0, 0.2]), [0, 0.2]);
});

test("value at a step is the newest that is not later", () => {
  assert.deepEqual([0, 2, 3, 4, 9].map((step) => data.valueAt([2, 4, 6], [20, 40, 60], step)), [null, 20, 20, 40, 60]);
});

test("wide bands do not squeeze the values, and never pull a rate below 0", () => {
  assert.deepEqual(data.shownRange([[0.4, 0.5]], [[-0.7, 0.3], [1.6, 0.7]]), [0, 1]);
  assert.deepEqual(data.shownRange([[0.4, 0.5]], [[0.35, 0.3], [0.6, 0.7]]), [0.3, 0.7]);
  assert.deepEqual(data.shownRange([[-1, 1]], [[-9], [2]]), [-3, 2]);
  assert.deepEqual(data.shownRange([[null]], [[1]]), [Infinity, -Infinity]);
});
