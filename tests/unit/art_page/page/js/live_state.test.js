// What the live view makes of the server's events.
import assert from "node:assert/strict";
import { test } from "node:test";
import { wholeCharacters } from "../static/live/live_cards.js";
import { findStraggler, forgetEnded, LINGER_S, makeLiveFacts, quantile, takeLiveEvent, tokenRate } from "../static/live/live_state.js";

const started = (id, fields = {}) => ({
  type: "request_started",
  data: { id, project: "p", name: "m", policy_version: 3, rollout_id: null, scenario: null, turn: 1, last_role: "user", last_text: "hi", num_prompt_tokens: 5, max_tokens: 99, started_at: 100, text: "", num_tokens: 0, is_text_known: true, ...fields },
});
const tokens = (...pieces) => ({ type: "tokens", data: { pieces: pieces.map(([id, text, num]) => ({ id, text, num_tokens: num })) } });
const ended = (id, fields = {}) => ({
  type: "request_ended",
  data: { id, project: "p", name: "m", policy_version: 3, rollout_id: null, scenario: null, turn: 1, outcome: "stop", error: null, num_prompt_tokens: 5, num_cached_tokens: 0, num_tokens: 3, started_at: 100, total_s: 2, queue_s: 0.1, prefill_s: 0.4, decode_s: 1.4, ...fields },
});

test("a request grows by its pieces and keeps its place for a while after its end", () => {
  const facts = makeLiveFacts();
  takeLiveEvent(facts, started("a"), 100);
  takeLiveEvent(facts, started("b", { text: "so far", num_tokens: 2 }), 100);
  takeLiveEvent(facts, tokens(["a", "x", 1], ["gone", "?", 1]), 101);
  takeLiveEvent(facts, tokens(["a", "y<script>", 2]), 101.5);
  const a = facts.requests.get("a");
  assert.deepEqual([a.text, a.num_tokens, a.firstAt], ["xy<script>", 3, 101]);
  assert.deepEqual([facts.requests.get("b").text, facts.requests.get("b").firstAt], ["so far", 100]);
  takeLiveEvent(facts, ended("a"), 102);
  assert.equal(a.ended.outcome, "stop");
  assert.equal(facts.ended.length, 1);
  assert.equal(forgetEnded(facts, 102 + LINGER_S - 1), false);
  assert.equal(forgetEnded(facts, 102 + LINGER_S + 1), true);
  assert.deepEqual([...facts.requests.keys()], ["b"]);
});

test("a long text keeps its end and says what was cut", () => {
  const facts = makeLiveFacts();
  takeLiveEvent(facts, started("a"), 100);
  for (let i = 0; i < 50; i += 1) takeLiveEvent(facts, tokens(["a", "z".repeat(999) + "!", 10]), 100 + i);
  const { text, numCut } = facts.requests.get("a");
  assert.ok(text.length <= 40000);
  assert.equal(text.length + numCut, 50000);
  assert.ok(text.endsWith("z!"));
});

test("reset forgets what ran", () => {
  const facts = makeLiveFacts();
  takeLiveEvent(facts, started("a"), 100);
  takeLiveEvent(facts, ended("old"), 100);
  takeLiveEvent(facts, { type: "reset", data: {} }, 101);
  assert.deepEqual([facts.requests.size, facts.ended.length], [0, 0]);
});

test("jobs are shown until they end; what failed and what was found is news", () => {
  const facts = makeLiveFacts();
  const job = (state, fields = {}) => ({ type: "job_progress", data: { job_id: "j", job_kind: "train", project: "p", name: "m", state, phase: null, done: null, total: null, error: null, ...fields } });
  takeLiveEvent(facts, job("queued"), 1);
  takeLiveEvent(facts, job("running", { phase: "train", done: 1, total: 4 }), 2);
  assert.deepEqual([facts.jobs.size, facts.jobs.get("j").done], [1, 1]);
  takeLiveEvent(facts, job("failed", { error: "no memory" }), 3);
  takeLiveEvent(facts, { type: "step", data: { project: "p", name: "m", step: 7, trained: true, metrics: { "data/reward_mean": 0.5, "time/publish_s": 1.25 } } }, 4);
  takeLiveEvent(facts, { type: "step", data: { project: "p", name: "m", step: 7, trained: false, metrics: {} } }, 5);
  takeLiveEvent(facts, { type: "finding", data: { project: "p", name: "m", step: 7, text: "entropy fell" } }, 6);
  assert.equal(facts.jobs.size, 0);
  assert.deepEqual(facts.news.map((one) => [one.type, one.model, one.step, one.text, one.isBad]), [
    ["job", "p/m", null, "A job (train) failed: no memory", true],
    ["step", "p/m", 7, "reward 0.5, publish 1.3 s", false],
    ["step", "p/m", 7, "was not trained: nothing to learn", false],
    ["finding", "p/m", 7, "entropy fell", false],
  ]);
  for (let i = 0; i < 300; i += 1) takeLiveEvent(facts, { type: "finding", data: { project: "p", name: "m", step: i, text: `${i}` } }, 8);
  assert.equal(facts.news.length, 100);
});

test("the rate of tokens forgets what is older than five seconds", () => {
  const facts = makeLiveFacts();
  takeLiveEvent(facts, tokens(["a", "x", 50]), 100);
  takeLiveEvent(facts, tokens(["a", "x", 50]), 103);
  assert.equal(tokenRate(facts, 104), 20);
  assert.equal(tokenRate(facts, 107), 10);
  assert.equal(tokenRate(facts, 120), 0);
});

test("the straggler takes more than twice the 95th percentile", () => {
  const facts = makeLiveFacts();
  for (let i = 0; i < 9; i += 1) takeLiveEvent(facts, ended(`e${i}`, { total_s: 1 + i / 10 }), 100);
  takeLiveEvent(facts, started("slow", { started_at: 100 }), 100);
  takeLiveEvent(facts, started("new", { started_at: 150 }), 150);
  const running = [...facts.requests.values()];
  assert.equal(findStraggler(running, facts.ended, 160), null); // too few to compare with
  takeLiveEvent(facts, ended("e9", { total_s: 500, outcome: "cancelled" }), 100);
  takeLiveEvent(facts, ended("e10", { total_s: 2 }), 100);
  assert.equal(findStraggler(running, facts.ended, 160).request.id, "slow");
  assert.equal(findStraggler(running, facts.ended, 103), null);
  assert.equal(findStraggler([], facts.ended, 160), null);
});

test("quantiles lie between the values", () => {
  assert.equal(quantile([3, 1, 2], 0.5), 2);
  assert.equal(quantile([0, 10], 0.95), 9.5);
  assert.ok(Number.isNaN(quantile([], 0.5)));
});

test("text is shown in pieces of whole characters, so that none of them looks broken", () => {
  assert.equal(wholeCharacters("a🙂b", 0, 2), "a🙂");
  assert.equal(wholeCharacters("a🙂b", 0, 1), "a");
  assert.equal(wholeCharacters("a🙂b", 1, 3), "🙂");
  assert.equal(wholeCharacters("a\r\nb", 0, 2), "a\r\n");
});
