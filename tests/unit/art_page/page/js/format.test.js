// Numbers, durations, money and times as text.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../static/lib/format.js";

test("numbers keep about three digits and use a true minus", () => {
  const cases = [[0, "0"], [0.0123, "0.0123"], [1.2345, "1.23"], [12.34, "12.3"], [1234.5, "1,235"], [12345678, "12.3 M"], [-0.5, "−0.5"], [1.6e-6, "1.6e-6"]];
  for (const [value, text] of cases) assert.equal(format.formatNumber(value), text);
});

test("what is not known is a dash everywhere", () => {
  const functions = ["formatNumber", "formatFixed", "formatSigned", "formatCount", "formatPercent", "formatSeconds", "formatUsd", "formatBytes", "formatAge", "formatTime"];
  for (const name of functions) for (const value of [null, undefined, NaN, Infinity]) assert.equal(format[name](value), "–", `${name}(${value})`);
  assert.equal(format.formatInterval(null), "–");
});

test("signs: zero has none, also after rounding", () => {
  assert.deepEqual([0.314, -0.2, 0, -0.001, 0.001].map((value) => format.formatSigned(value)), ["+0.31", "−0.20", "0.00", "0.00", "0.00"]);
});

test("counts, shares, bytes and money", () => {
  assert.deepEqual([0, 412, 41200, 4123456, 1.2e9].map(format.formatCount), ["0", "412", "41,200", "4.12 M", "1.2 G"]);
  assert.deepEqual([0, 0.0012, 0.055, 0.38, 1].map(format.formatPercent), ["0 %", "0.12 %", "5.5 %", "38 %", "100 %"]);
  assert.deepEqual([0, 999, 999.6, 1234567, 5.4e9].map(format.formatBytes), ["0 B", "999 B", "1 kB", "1.23 MB", "5.4 GB"]);
  assert.deepEqual([0, 0.0042, 0.41, 1234.5, -2].map(format.formatUsd), ["$0", "$0.0042", "$0.41", "$1,234.50", "−$2.00"]);
});

test("durations never show 60 of a unit", () => {
  const cases = [[0, "0 s"], [0.0004, "< 1 ms"], [0.2134, "213 ms"], [0.9999, "1 s"], [2.31, "2.3 s"], [9.96, "10 s"], [99.4, "99 s"], [99.6, "2 min"], [3570, "60 min"], [7200, "2 h 0 min"], [200000, "2 d 8 h"], [-3, "−3 s"]];
  for (const [value, text] of cases) assert.equal(format.formatSeconds(value), text);
  for (let value = 0.001; value < 3e6; value *= 1.07) assert.doesNotMatch(format.formatSeconds(value), /h 60 min|d 24 h|^1000 ms/);
});

test("ages and intervals", () => {
  assert.deepEqual([1000, 980, 700, 1000 - 7200, 1000 - 3 * 86400].map((time) => format.formatAge(time, 1000)), ["just now", "20 s ago", "5 min ago", "2 h ago", "3 d ago"]);
  assert.equal(format.formatInterval({ mean: 0.7123, low: 0.66, high: 0.75 }), "0.71 [0.66, 0.75]");
  assert.equal(format.formatInterval({ mean: 0.7123, low: null, high: null }), "0.71");
  assert.deepEqual([format.plural(1, "rollout"), format.plural(1200, "rollout"), format.plural(2, "entry", "entries")], ["1 rollout", "1,200 rollouts", "2 entries"]);
});
