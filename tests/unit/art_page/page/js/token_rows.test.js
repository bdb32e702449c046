// Rows of tokens, and moving among them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { TokenRows, drawnLines, numColumns, rowsInView } from "../static/tokens/token_rows.js";

function layOut(texts, columns, { whitespace = false, starts = [] } = {}) {
  const rows = new TokenRows(columns, whitespace);
  rows.add({ texts, ids: texts.map((_, index) => index), starts: new Set(starts) }, 0);
  return rows;
}
const lines = (rows) => Array.from({ length: rows.numRows }, (_, row) => rows.segments(row).map((segment) => segment.text).join(""));

test("what a token looks like", () => {
  assert.deepEqual(drawnLines(" a", 1, false), [" a"]);
  assert.deepEqual(drawnLines(" a\n", 1, true), ["·a⏎", ""]);
  assert.deepEqual(drawnLines("\t", 1, true), ["⇥   "]);
  assert.deepEqual(drawnLines("\r\n", 1, true), ["‹CR›⏎", ""]);
  assert.deepEqual(drawnLines("\x1b", 1, false), ["‹ESC›"]);
  assert.deepEqual(drawnLines(null, 151643, false), ["‹151643›"]);
  assert.deepEqual(drawnLines(null, null, false), ["‹?›"]);
  assert.deepEqual(drawnLines("", 1, false), ["▫"]);
});

test("columns of wide and combining characters", () => {
  assert.equal(numColumns("abc"), 3);
  assert.equal(numColumns("日本"), 4);
  assert.equal(numColumns("e\u0301"), 1);
});

test("rows break where the next token does not fit, and at line ends", () => {
  assert.deepEqual(lines(layOut(["aaaa", "bbbb", "cc"], 10)), ["aaaabbbbcc"]);
  assert.deepEqual(lines(layOut(["aaaa", "bbbb", "ccc"], 10)), ["aaaabbbb", "ccc"]);
  assert.deepEqual(lines(layOut(["a", "\n\n", "b"], 10, { whitespace: true })), ["a⏎", "⏎", "b"]);
});

test("a token wider than a row is cut into rows and stays one token", () => {
  const rows = layOut(["x".repeat(20), "y"], 8);
  assert.deepEqual(lines(rows), ["xxxxxxxx", "xxxxxxxx", "xxxxy"]);
  assert.deepEqual(rows.segments(1), [{ token: 0, text: "xxxxxxxx", continues: true }]);
  assert.deepEqual([rows.rowOf(0), rows.rowOf(1)], [0, 2]);
});

test("another speaker begins a row of its own", () => {
  assert.deepEqual(lines(layOut(["a", "b", "c"], 10, { starts: [2] })), ["ab", "c"]);
});

test("every token is on a row, whatever arrives when", () => {
  const texts = Array.from({ length: 500 }, (_, index) => ["a", " bb\n", "\n", "ccccccccccccccccc", "日", "", null][(index * 7) % 7 === 0 ? index % 7 : (index * 3) % 7]);
  const ids = texts.map((_, index) => index);
  const whole = layOut(texts, 12);
  const pieces = new TokenRows(12, false);
  for (let end = 100; end <= 500; end += 100) pieces.add({ texts: texts.slice(0, end), ids: ids.slice(0, end), starts: new Set() }, end - 100);
  assert.deepEqual(lines(pieces), lines(whole));
  for (const token of ids) assert.ok(whole.segments(whole.rowOf(token)).some((segment) => segment.token === token));
  for (let row = 0; row < whole.numRows; row += 1) assert.ok(whole.segments(row).length > 0);
});

test("moving up and down keeps the column", () => {
  const rows = layOut(["aaaa", "bbbb", "\n", "cc", "dd", "ee"], 10);
  assert.equal(rows.columnOf(1), 4);
  assert.equal(rows.tokenAt(1, rows.columnOf(1)), 5);
  assert.equal(rows.tokenAt(0, 99), 2);
  assert.equal(rows.tokenAt(99, 0), 3);
});

test("only the rows in view and some more are drawn", () => {
  assert.deepEqual(rowsInView({ top: 0, height: 100, rowHeight: 20, numRows: 1000, spare: 2 }), { first: 0, end: 7 });
  assert.deepEqual(rowsInView({ top: 2000, height: 100, rowHeight: 20, numRows: 1000, spare: 2 }), { first: 98, end: 107 });
  assert.deepEqual(rowsInView({ top: 19990, height: 100, rowHeight: 20, numRows: 1000, spare: 2 }), { first: 997, end: 1000 });
});
