// Addresses of the page.
import assert from "node:assert/strict";
import { test } from "node:test";
import { link, parse } from "../static/lib/router.js";

const route = (hash) => {
  const { view, args, query } = parse(hash);
  return [view, args, query.toString()];
};

test("every address of the page leads to its view", () => {
  assert.deepEqual(route(""), ["runs", [], ""]);
  assert.deepEqual(route("#/"), ["runs", [], ""]);
  assert.deepEqual(route("#/run/P/N"), ["run", ["P", "N"], ""]);
  assert.deepEqual(route("#/run/P/N/rollouts?step=12&sort=reward"), ["rollouts", ["P", "N"], "step=12&sort=reward"]);
  assert.deepEqual(route("#/run/P/N/rollout/train/12/3/0?tab=tokens"), ["rollout", ["P", "N", "train", "12", "3", "0"], "tab=tokens"]);
  assert.deepEqual(route("#/run/P/N/group/val/12/3"), ["group", ["P", "N", "val", "12", "3"], ""]);
  assert.deepEqual(route("#/run/P/N/tree/12"), ["tree", ["P", "N", "12"], ""]);
  assert.deepEqual(route("#/compare?run=P/N&run=P/M"), ["compare", [], "run=P%2FN&run=P%2FM"]);
  for (const view of ["live", "system"]) assert.deepEqual(route(`#/${view}`), [view, [], ""]);
});

test("other addresses lead nowhere, and none throws", () => {
  for (const hash of ["#/nothing", "#/run/P", "#/run/P/N/rollout/train/12", "#/run/P/N/constructor", "#/run/P/N/__proto__", "#/run/%E0%A4%A/N"]) assert.equal(parse(hash).view, "nowhere", hash);
});

test("a link read again is what it was made of", () => {
  const names = ["agent-001", "a b", "ä/ö?#&=%", "<script>", "..", "100%"];
  for (const project of names) {
    for (const name of names) {
      const made = parse(link("rollout", [project, name, "train", 12, 3, 0], { tab: "tokens", text: "a&b=c#d" }));
      assert.deepEqual([made.view, made.args, made.query.get("tab"), made.query.get("text")], ["rollout", [project, name, "train", "12", "3", "0"], "tokens", "a&b=c#d"]);
      assert.deepEqual(parse(link("run", [project, name])).args, [project, name]);
    }
  }
});

test("lists repeat a name; null, empty and false leave it out", () => {
  assert.equal(link("compare", [], { run: ["P/N", "P/M"], metric: null, text: "", log: false }), "#/compare?run=P/N&run=P/M");
  assert.equal(link("runs"), "#/");
});
