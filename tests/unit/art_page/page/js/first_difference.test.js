// Where two conversations part.
import assert from "node:assert/strict";
import { test } from "node:test";
import { aroundDifference, firstCharDifference, firstDifference, numAlikeItems, partsOf } from "../static/rollout/first_difference.js";

const item = (text, more = {}) => ({ role: "assistant", text, ...more });
const call = (name, args) => ({ id: null, name, arguments: args });

test("the first character that differs", () => {
  assert.equal(firstCharDifference("abc", "abc"), null);
  assert.equal(firstCharDifference("abc", "abd"), 2);
  assert.equal(firstCharDifference("abc", "ab"), 2);
  assert.equal(firstCharDifference("", "a"), 0);
});

test("a difference never lies inside a surrogate pair", () => {
  assert.equal(firstCharDifference("a🙂", "a🙃"), 1);
});

test("two conversations part in the first item, part and character that differ", () => {
  const base = [item("same"), item("the total is 41.20")];
  assert.equal(firstDifference(base, structuredClone(base)), null);
  assert.deepEqual(firstDifference(base, [item("same"), item("the total is 42.10")]), { item: 1, part: "text", char: 14 });
  assert.deepEqual(firstDifference(base, [item("same")]), { item: 1, part: "role", char: 0 });
  assert.deepEqual(firstDifference([item("same")], base), { item: 1, part: "role", char: 0 });
});

test("reasoning, tool calls and roles count", () => {
  assert.deepEqual(firstDifference([item("x", { reasoning: "ab" })], [item("x", { reasoning: "ac" })]), { item: 0, part: "reasoning", char: 1 });
  assert.deepEqual(firstDifference([item("x")], [item("x", { reasoning: "ac" })]), { item: 0, part: "reasoning", char: 0 });
  assert.deepEqual(firstDifference([item("x", { role: "user" })], [item("x")]), { item: 0, part: "role", char: 0 });
  assert.deepEqual(firstDifference([item("", { tool_calls: [call("f", "{}")] })], [item("", { tool_calls: [call("g", "{}")] })]), { item: 0, part: "call 0 name", char: 0 });
});

test("an item that ends earlier differs at the end of its last part", () => {
  const longer = item("x", { tool_calls: [call("f", "{}")] });
  assert.deepEqual(firstDifference([longer], [item("x")]), { item: 0, part: "text", char: 1 });
});

test("arguments are compared as they are shown: spaces between them say nothing", () => {
  const [a, b, c] = ['{"q":"one"}', '{ "q": "one" }', '{"q":"two"}'].map((args) => [item("", { tool_calls: [call("f", args)] })]);
  assert.equal(firstDifference(a, b), null);
  const difference = firstDifference(a, c);
  assert.equal(difference.part, "call 0 arguments");
  assert.equal(partsOf(c[0]).find((part) => part.key === difference.part).text.slice(difference.char), 'two"\n}');
});

test("the messages that all have alike", () => {
  const [a, b, c] = [item("a"), item("b"), item("c")];
  assert.equal(numAlikeItems([[a, b, c], [a, b], [a, b, a]]), 2);
  assert.equal(numAlikeItems([[a, b]]), 2);
  assert.equal(numAlikeItems([[a], [b]]), 0);
  assert.equal(numAlikeItems([]), 0);
});

test("the words around a difference", () => {
  assert.deepEqual(aroundDifference("0123456789", 5, 2), { before: "…34", after: "56…" });
  assert.deepEqual(aroundDifference("01", 1, 5), { before: "0", after: "1" });
});
