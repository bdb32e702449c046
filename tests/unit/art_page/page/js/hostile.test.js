// Whatever a rollout, a tool, a judge or a name says becomes harmless text: no element, no control character, no turned text.
import assert from "node:assert/strict";
import { test } from "node:test";
import { judgementView } from "../static/rollout/judge.js";
import { showConversation } from "../static/rollout/conversation.js";
import { messageView } from "../static/rollout/message.js";
import { showRecord } from "../static/rollout/record.js";
import { columnsFor } from "../static/rollout/row_columns.js";
import { saidText } from "../static/rollout/said_text.js";
import { whyItBranched } from "../static/rollout/branches.js";
import { legendView } from "../static/tokens/token_legend.js";
import { TokenPainter } from "../static/tokens/token_paint.js";
import { tokenPanel } from "../static/tokens/token_panel.js";
import { signalOf } from "../static/tokens/token_signals.js";
import { Element, elementsOf, shownTexts, useFakeDom } from "./fake_dom.js";

useFakeDom();

const SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>";
const BAD = `${SCRIPT} \x1b[31mred\x1b[0m \0 \u202egnp.exe\u202c \ud800 \u200b \u{e0041} \x9b31m \r`;
const item = (more = {}) => ({
  role: "assistant", text: BAD, reasoning: BAD, is_sampled: true, exchange_id: "ex", finish_reason: BAD, num_tokens: 3, policy_version: 1,
  duration_s: 1, tool_calls: [{ id: BAD, name: BAD, arguments: BAD }, { id: "b", name: "f", arguments: JSON.stringify({ [BAD]: BAD }) }], ...more,
});

/** @returns every text of the tree, after checks that hold for all of them */
function checked(root) {
  const allowed = /^(article|header|div|span|a|details|summary|p|h1|h3|section|dl|dt|dd|table|caption|tbody|tr|th|td|ol|ul|li|button|strong|aside|i|svg|rect|line|circle|mark)$/;
  for (const element of elementsOf(root)) assert.match(element.tag, allowed);
  const texts = shownTexts(root);
  for (const text of texts) {
    assert.doesNotMatch(text, /[\0-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069]|[\u{e0000}-\u{e007f}]|\p{Surrogate}/u);
  }
  return root.textContent;
}

test("a message", () => {
  const text = checked(messageView(item(), { number: 0, tokensHref: "#/x", toolNames: new Map() }));
  assert.equal(text.split(SCRIPT).length - 1, 7, "finish reason, reasoning, text, name, arguments and both sides of the JSON");
  checked(messageView(item({ role: BAD, is_sampled: false, text: "" }), { number: 0 }));
  assert.match(checked(messageView(item({ role: "tool", tool_call_id: "a" }), { number: 0, toolNames: new Map([["a", BAD]]) })), /<script>/);
});

test("a message that differs from another, at every place of its text", () => {
  for (let char = 0; char <= BAD.length; char += 5) {
    checked(messageView(item(), { number: 0, difference: { item: 0, part: "text", char } }));
  }
});

test("a conversation with its tools and the names of sub-agents", () => {
  const root = new Element("div");
  const history = { name: BAD, items: [item(), item({ role: "user", is_sampled: false })], tools: [{ name: BAD, description: BAD, parameters: { [BAD]: BAD } }] };
  showConversation(root, [history, history], { history: 0, chooseHistory: () => {}, tokensHref: () => "#/x" });
  assert.match(checked(root), /<script>/);
});

test("judge, record, table, panel, legend and branches", () => {
  checked(judgementView({ name: BAD, score: 1, passes: [0, 1], disagreement: 0.5, explanation: BAD, parts: { [BAD]: 1 } }));
  const record = new Element("div");
  showRecord(record, { error: BAD, started_at: 1, duration_s: 1, policy_version: 1, stop: BAD, outcome: "ok", metrics: { [BAD]: 1 }, metadata: { [BAD]: BAD }, logs: [BAD] });
  assert.match(checked(record), /<script>/);
  const row = { split: "train", step: 1, group: 0, index: 0, scenario: BAD, stop: BAD, dropped_because: BAD, outcome: "ok", metrics: { [BAD]: 1 }, snippet: { text: BAD, start: 1, end: 9 }, group_rewards: [1, null] };
  const cells = columnsFor(["p", "n"], { isNarrow: false, hasText: true, hasSplit: false, hasStep: false, metrics: [BAD, "none"] }).map((column) => column.cell(row));
  const cell = new Element("td");
  cell.append(...cells.flat().filter((child) => child !== null));
  assert.match(checked(cell), /<script>/);
  const span = { start: 0, end: 1, role: BAD, exchange_id: "ex", policy_version: 1, sampled: true, trained: false, reason: BAD };
  const tokens = { path: 0, numTokens: 1, ids: [7], texts: [BAD], isSpecial: [true], spans: [span], spanOf: [0], values: {}, alternatives: { 0: [[7, BAD, -0.5]] }, missing: BAD, step: 1, update: 0 };
  assert.match(checked(tokenPanel(tokens, 0)), /<script>/);
  assert.match(checked(legendView(new TokenPainter(signalOf("mask"), tokens))), /<script>/);
  const why = new Element("span");
  why.append(saidText(whyItBranched({ path: 1, label: BAD, num_tokens: 1, num_sampled: 0, num_trained: 0, parent: 0, branches_at: 1, branch_reason: BAD })));
  checked(why);
});

test("a line of a million characters is folded, and cut into pieces that the browser lays out quickly", () => {
  const folded = saidText("x".repeat(1_000_000));
  assert.ok(folded.textContent.length < 10_000);
  const whole = saidText("x".repeat(50_000), { limit: 50_000 });
  assert.equal(whole.textContent.length, 50_000);
  assert.ok(Math.max(...shownTexts(whole).map((text) => text.length)) <= 2000);
});
