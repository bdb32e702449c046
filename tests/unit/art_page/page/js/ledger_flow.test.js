// The flow of the ledger: thickness and places of its bands.
import assert from "node:assert/strict";
import { test } from "node:test";
import { flowLayout } from "../static/parts/ledger_flow.js";
import { ledgerParts } from "../static/parts/ledger_bar.js";

test("bands are as thick as their share, and stacked without gaps on the left", () => {
  const { bands, height } = flowLayout([600, 300, 100], 1000);
  assert.deepEqual(bands.map((band) => band.thickness), [144, 72, 24]);
  assert.equal(bands[1].from, bands[0].from + 144);
  assert.equal(bands[2].from, bands[1].from + 72);
  assert.equal(bands[0].from * 2 + 240, height);
});

test("each label has room, however few tokens it names", () => {
  const counts = [99_990, 4, 3, 2, 1];
  const { bands, height } = flowLayout(counts, 100_000);
  for (let at = 1; at < bands.length; at += 1) assert.ok(bands[at].middle - bands[at - 1].middle >= 44);
  assert.ok(bands.every((band) => band.thickness >= 1.5 && band.to >= 0 && band.to + band.thickness <= height));
});

test("parts that are empty are left out, and reasons are named in words", () => {
  const parts = ledgerParts({ trained: 5, context: 0, dropped: { no_reward_spread: 2, truncated: 0 } });
  assert.deepEqual(parts.map((part) => [part.label, part.tokens, part.reason]), [["trained", 5, null], ["dropped: no reward spread", 2, "no_reward_spread"]]);
});
