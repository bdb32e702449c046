// Snippets, steps, groups, branches, weights, words in tokens.
import assert from "node:assert/strict";
import { test } from "node:test";
import { treeRows, whyItBranched } from "../static/rollout/branches.js";
import { curlText, messagesText } from "../static/rollout/copies.js";
import { readPlace } from "../static/rollout/marked.js";
import { splitSnippet, oneLine } from "../static/rollout/row_columns.js";
import { isBoard } from "../static/rollout/said_text.js";
import { nextStep } from "../static/rollout/step_keys.js";
import { weightText, quotedToken } from "../static/tokens/token_panel.js";
import { findWords, firstTokenOf } from "../static/tokens/token_path.js";
import { shownAtFirst } from "../static/views/group.js";

test("the match of a snippet counts characters, not UTF-16 units", () => {
  assert.deepEqual(splitSnippet({ text: "🙂 the invoice\nof", start: 6, end: 13 }), ["🙂 the ", "invoice", " of"]);
  const far = splitSnippet({ text: `${"🙂".repeat(80)}found`, start: 80, end: 85 });
  assert.deepEqual(far, [`…${"🙂".repeat(28)}`, "found", ""]);
});

test("a cell holds one line without hidden characters", () => {
  assert.equal(oneLine("a\n\nb\u202e"), "a b‹RLO›");
  assert.equal(oneLine(null), "");
});

test("boards are drawn in a fixed font, words are not", () => {
  for (const board of ["X23\n4O6\n789", "Your board:\n+--+--+\n|a |b |\n+--+--+\n", "..#..\n.#.#.\n.....", "┌─┐\n│a│\n└─┘"]) assert.equal(isBoard(board), true, board);
  for (const text of ["one\ntwo\nsix", "X", "", "- milk\n- eggs\n- rice", "Two words.\nSome words.\nThe end."]) assert.equal(isBoard(text), false, text);
});

test("messages and requests can be pasted elsewhere", () => {
  const items = [{ role: "user", text: "it's" }, { role: "assistant", text: "", tool_calls: [{ id: "c1", name: "look", arguments: "{}" }] }, { role: "tool", text: "1", tool_call_id: "c1" }];
  assert.deepEqual(JSON.parse(messagesText(items))[1], { role: "assistant", content: "", tool_calls: [{ id: "c1", type: "function", function: { name: "look", arguments: "{}" } }] });
  const line = curlText("http://x/v1", { messages: [{ content: "it's $HOME" }], seed: 7 }, ["a note"]);
  assert.match(line, /^# a note\n# Not recorded.+\ncurl "http:\/\/x\/v1\/chat\/completions" \\\n/);
  assert.ok(line.includes(`it'\\''s $HOME`));
  assert.deepEqual([readPlace("p/n/train/1/2/3"), readPlace("p/n"), readPlace(null)], [["p", "n", "train", "1", "2", "3"], null, null]);
});

test("the nearest step with rollouts", () => {
  const ranges = [[0, 3], [10, 12]];
  assert.deepEqual([nextStep(ranges, 3, 1), nextStep(ranges, 10, -1), nextStep(ranges, 12, 1), nextStep(ranges, 0, -1), nextStep(ranges, 7, 1)], [10, 3, null, null, 10]);
  assert.equal(nextStep(ranges, Infinity, -1), 12);
  assert.equal(nextStep(ranges, -Infinity, 1), 0);
});

test("as many of the best as of the worst are shown at first", () => {
  assert.deepEqual(shownAtFirst(3, 4), [0, 1, 2]);
  assert.deepEqual(shownAtFirst(8, 4), [0, 1, 6, 7]);
});

test("paths come after the path that they leave, and none is lost in a circle", () => {
  const path = (number, parent) => ({ path: number, label: "", num_tokens: 1, num_sampled: 0, num_trained: 0, parent });
  const rows = treeRows([path(0, null), path(1, 2), path(2, 0), path(3, null), path(4, 5), path(5, 4)]);
  assert.deepEqual(rows.map((row) => [row.path.path, row.depth]), [[0, 0], [2, 1], [1, 2], [3, 0], [4, 0], [5, 0]]);
});

test("why a path branched is a sentence", () => {
  const path = { path: 1, label: "", num_tokens: 9, num_sampled: 1, num_trained: 1, parent: 0, branches_at: 5, branch_reason: "reasoning_dropped" };
  assert.match(whyItBranched(path), /shares 5 tokens with path 0; then the chat template drops the reasoning/);
  assert.match(whyItBranched({ ...path, parent: null }), /conversation of its own/);
  assert.match(whyItBranched({ ...path, path: 0, parent: null }), /first path/);
  assert.match(whyItBranched({ ...path, branch_reason: null }), /goes on in another way/);
});

test("a weight is a fraction where it is one", () => {
  assert.equal(weightText(1 / 412), "1/412");
  assert.equal(weightText(0.37), "0.37");
  assert.equal(weightText(1), "1");
});

test("a token in quotes shows every character", () => {
  assert.equal(quotedToken(" a\r\n\t"), '"·a‹CR›⏎⇥"');
  assert.equal(quotedToken(null), "no text");
});

test("words are found over the borders of tokens, and the search comes round", () => {
  const tokens = { texts: ["in", "voice", null, " of", " Inv", "oice"], spans: [{ start: 3, exchange_id: "ex" }] };
  assert.equal(findWords(tokens, "invoice", -1), 0);
  assert.equal(findWords(tokens, "invoice", 0), 4);
  assert.equal(findWords(tokens, "invoice", 4), 0);
  assert.equal(findWords(tokens, "nothing", 0), -1);
  assert.equal(firstTokenOf(tokens, "ex"), 3);
  assert.equal(firstTokenOf(tokens, "other"), null);
});
