// Where the nodes of a prefix tree lie, and which one the keyboard leads to.
import assert from "node:assert/strict";
import { test } from "node:test";
import { sharedColour } from "../static/tree/tree_canvas.js";
import { hitTree, layOutTree, neighbourOf } from "../static/tree/tree_layout.js";

const node = (id, parent, start, tokens, first, paths, hidden = 0) => ({
  id, parent, start, num_tokens: tokens, num_paths: paths, first_path: first, num_hidden: hidden,
  num_learnt: 0, num_masked: 0, num_passes: 1, kind: "context", runs: [], text: null, rollouts: [],
});
// A prompt of 100 tokens, that 4 paths share; two go on together, and of the other two one is not shown.
const TREE = [node(0, null, 0, 100, 0, 4, 1), node(1, 0, 100, 20, 0, 2), node(2, 1, 120, 80, 0, 1), node(3, 1, 120, 30, 1, 1), node(4, 0, 100, 50, 2, 1)];

test("width is tokens, height is paths", () => {
  const { byId, gaps } = layOutTree(TREE, null, 400, 80);
  const place = (id) => { const { x, y, width, height } = byId.get(id); return [x, y, width, height]; };
  assert.deepEqual(place(0), [0, 0, 200, 80]);
  assert.deepEqual(place(1), [200, 0, 40, 40]);
  assert.deepEqual(place(2), [240, 0, 160, 20]);
  assert.deepEqual(place(4), [200, 40, 100, 20]);
  assert.deepEqual(gaps.map((gap) => [gap.node.id, gap.count, gap.x, gap.y, gap.height]), [[0, 1, 200, 60, 20]]);
});

test("a node that was zoomed into leaves room for what follows it", () => {
  const { byId, toX } = layOutTree(TREE, 0, 400, 80);
  assert.equal(byId.get(0).width, 60);
  assert.equal(byId.get(1).x, 60);
  assert.equal(toX(200), 400);
  const part = layOutTree(TREE.slice(1, 4).map((one) => (one.id === 1 ? { ...one, parent: null } : one)), 1, 400, 80);
  assert.deepEqual([part.byId.get(1).x, part.byId.get(1).height, part.byId.get(3).y], [0, 80, 40]);
});

test("a click finds a node or what is hidden", () => {
  const layout = layOutTree(TREE, null, 400, 80);
  assert.equal(hitTree(layout, 10, 79).node.id, 0);
  assert.equal(hitTree(layout, 399, 5).node.id, 2);
  assert.deepEqual([hitTree(layout, 203, 70).node.id, hitTree(layout, 203, 70).isGap], [0, true]);
  assert.equal(hitTree(layout, 399, 75), null);
});

test("arrow keys move in the tree and stay in it", () => {
  assert.equal(neighbourOf(TREE, null, "ArrowRight"), 0);
  assert.equal(neighbourOf(TREE, 0, "ArrowRight"), 1);
  assert.equal(neighbourOf(TREE, 1, "ArrowDown"), 4);
  assert.equal(neighbourOf(TREE, 4, "ArrowDown"), 4);
  assert.equal(neighbourOf(TREE, 4, "ArrowUp"), 1);
  assert.equal(neighbourOf(TREE, 3, "ArrowLeft"), 1);
  assert.equal(neighbourOf(TREE, 0, "ArrowLeft"), 0);
  assert.equal(neighbourOf(TREE, 3, "ArrowRight"), 3);
});

test("what more paths share is darker", () => {
  const greys = [1, 2, 8, 64].map((count) => Number.parseInt(sharedColour(count, 64).slice(1, 3), 16));
  assert.deepEqual(greys, [...greys].sort((a, b) => b - a));
  assert.equal(new Set(greys).size, 4);
  assert.equal(sharedColour(1, 1), sharedColour(1, 64));
});
