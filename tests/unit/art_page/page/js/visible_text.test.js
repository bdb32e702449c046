// Hidden characters, arguments of tool calls, beginnings of long texts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { beginningOf, markOf, prettyArguments, sizeOfText, visiblePieces, visibleText } from "../static/lib/visible_text.js";

test("controls, ANSI codes and characters that turn text around become marks", () => {
  assert.equal(visibleText("\x1b[31mred\x1b[0m"), "‹ESC›[31mred‹ESC›[0m");
  assert.equal(visibleText("a\0b"), "a‹NUL›b");
  assert.equal(visibleText("\u202egnp.exe\u202c"), "‹RLO›gnp.exe‹PDF›");
  assert.equal(visibleText("a\u2066b\u2069"), "a‹LRI›b‹PDI›");
});

test("broken surrogates and invisible tags become marks, whole emoji stay", () => {
  assert.equal(visibleText("x\ud800y"), "x‹U+D800›y");
  assert.equal(visibleText("\udc00"), "‹U+DC00›");
  assert.equal(visibleText("🙂"), "🙂");
  assert.equal(visibleText("\u{e0041}"), "‹U+E0041›");
});

test("no character of the output is one of those that are marked", () => {
  let every = "";
  for (let code = 0; code < 0x2100; code += 1) every += String.fromCharCode(code);
  assert.equal(visibleText(visibleText(every)), visibleText(every));
  assert.doesNotMatch(visibleText(every), /[\0-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e]/);
});

test("line ends and tabs stay; line ends of Windows become plain ones, a lone CR a mark", () => {
  assert.equal(visibleText("a\r\nb\n\tc\rd"), "a\nb\n\tc‹CR›d");
});

test("pieces join to the visible text, and neighbouring marks are one piece", () => {
  const text = "a\0\0b\u202e🙂";
  const pieces = visiblePieces(text);
  assert.equal(pieces.map((piece) => piece.text).join(""), visibleText(text));
  assert.deepEqual(pieces.map((piece) => piece.isMark), [false, true, false, true, false]);
  assert.deepEqual(visiblePieces(""), []);
});

test("every mark names its character", () => {
  assert.equal(markOf("\x07"), "‹BEL›");
  assert.equal(markOf("\u180e"), "‹U+180E›");
});

test("arguments are indented where they are JSON, and never changed", () => {
  assert.deepEqual(prettyArguments('{"a":[1]}'), { text: '{\n  "a": [\n    1\n  ]\n}', isJson: true });
  assert.deepEqual(prettyArguments('{"a": '), { text: '{"a": ', isJson: false });
  for (const text of ['{"id": 12345678901234567890}', '{"x": 1e2}', '{"a": 1, "a": 2}']) assert.deepEqual(prettyArguments(text), { text, isJson: true });
  assert.equal(prettyArguments('{"a": "\\u00e9"}').text, '{\n  "a": "é"\n}');
});

test("the size of a text", () => {
  assert.equal(sizeOfText("a"), "1 character");
  assert.equal(sizeOfText("a\nb"), "3 characters, 2 lines");
});

test("the beginning of a text ends at a line end or between characters", () => {
  assert.equal(beginningOf("short", 10), "short");
  assert.equal(beginningOf("0123456\n89abc", 10), "0123456");
  assert.equal(beginningOf("ab🙂cd", 3), "ab");
});
