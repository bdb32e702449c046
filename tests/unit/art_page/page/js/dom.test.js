// Elements from hostile text, with a document that only records what it is asked to do.
import assert from "node:assert/strict";
import { test } from "node:test";

class FakeNode {}
class FakeElement extends FakeNode {
  constructor(tag) {
    super();
    Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, styles: {} });
    this.style = { setProperty: (name, value) => Object.assign(this.styles, { [name]: value }) };
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
  append(child) {
    this.children.push(child);
  }
}
globalThis.Node = FakeNode;
globalThis.document = { createElement: (tag) => new FakeElement(tag), createElementNS: (_, tag) => new FakeElement(tag), baseURI: "http://127.0.0.1:5000/" };
globalThis.location = { origin: "http://127.0.0.1:5000" };
const { h, svg } = await import("../static/lib/dom.js");

test("strings become text, whatever they hold", () => {
  const hostile = '<img src=x onerror="alert(1)">';
  const element = h("p", { title: hostile, class: "a" }, hostile, null, false, undefined, 0, ["x", [h("b")]]);
  assert.deepEqual(element.children.slice(0, 3), [hostile, "0", "x"]);
  assert.equal(element.children[3].tag, "b");
  assert.deepEqual(element.attributes, { title: hostile, class: "a" });
  assert.equal(svg("text", null, hostile).children[0], hostile);
});

test("hidden characters of texts, titles and spoken names become marks", () => {
  const element = h("p", { title: "\u202eexe", "aria-label": "a\0b", placeholder: "\u2066", "data-id": "\u202e" }, "\u202egnp.exe", ["\x1b[31m"]);
  assert.deepEqual(element.children, ["‹RLO›gnp.exe", "‹ESC›[31m"]);
  assert.deepEqual(element.attributes, { title: "‹RLO›exe", "aria-label": "a‹NUL›b", placeholder: "‹LRI›", "data-id": "\u202e" });
  assert.equal(svg("title", null, "\u202e").children[0], "‹RLO›");
});

test("links stay on the page; downloads stay on the server", () => {
  for (const href of ["javascript:alert(1)", "//evil.example/", "https://evil.example/", "data:text/html,x", " javascript:alert(1)", "/api/models"]) {
    assert.throws(() => h("a", { href }), /must begin with #/, href);
  }
  for (const href of ["javascript:alert(1)", "//evil.example/", "https://evil.example/", "data:text/html,x"]) {
    assert.throws(() => h("a", { href, download: "x" }), /must begin with #/, href);
  }
  for (const name of ["HREF", "xlink:href"]) assert.throws(() => svg("a", { [name]: "javascript:alert(1)" }), /must begin with #/);
  assert.equal(h("a", { href: "#/run/a/b" }).attributes.href, "#/run/a/b");
  assert.equal(h("a", { href: "/api/models/a/b/checkpoints/1/files/x", download: "x" }).attributes.href, "/api/models/a/b/checkpoints/1/files/x");
});

test("listeners are functions, styles go through CSSOM, sources and handlers are refused", () => {
  const onClick = () => {};
  const element = h("button", { "on:click": onClick, style: { color: "red", width: null }, disabled: true, hidden: false, value: "v" });
  assert.equal(element.listeners.click, onClick);
  assert.deepEqual(element.styles, { color: "red", width: "" });
  assert.deepEqual(element.attributes, { disabled: "" });
  assert.equal(element.value, "v");
  for (const name of ["onclick", "onerror", "src", "srcdoc", "SRC", "formaction"]) assert.throws(() => h("div", { [name]: "alert(1)" }), /not allowed/, name);
});
