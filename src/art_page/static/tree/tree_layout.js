/**
 * Places the nodes of a prefix tree: to the right are later tokens, from top to bottom lie the paths. So the width of a node is its number of
 * tokens, and its height the number of paths that share it. A node that was zoomed into is cut short, so that what follows it has room.
 *
 * @typedef {[start: number, end: number, isLearnt: boolean]} TreeRun
 * @typedef {{split: string, step: number, group: number, index: number}} RolloutKey
 * @typedef {object} TreeNode
 * @property {number} id
 * @property {number | null} parent
 * @property {number} start
 * @property {number} num_tokens
 * @property {number} num_paths
 * @property {number} num_learnt
 * @property {number} num_masked
 * @property {number} num_passes
 * @property {"learnt" | "masked" | "context"} kind
 * @property {TreeRun[]} runs
 * @property {number} first_path
 * @property {string | null} text
 * @property {number} num_hidden
 * @property {RolloutKey[]} rollouts
 *
 * @typedef {{node: TreeNode, x: number, y: number, width: number, height: number}} Box  in CSS pixels
 * @typedef {{x: number, y: number, width: number, height: number, node: TreeNode, count: number}} Gap  nodes that are not in the answer
 * @typedef {{boxes: Box[], byId: Map<number, Box>, gaps: Gap[], toX: (place: number) => number}} TreeLayout
 */

const ZOOMED_SHARE = 0.15;
const HIDDEN_WIDTH = 10;

/**
 * @param {TreeNode[]} nodes  parents first
 * @param {number | null} top  the node that was zoomed into
 * @param {number} width
 * @param {number} height
 * @returns {TreeLayout}
 */
export function layOutTree(nodes, top, width, height) {
  const range = pathRange(nodes);
  const rows = Math.max(1, range.end - range.start);
  const toX = makeTreeScale(nodes, top, width);
  /** @type {Box[]} */
  const boxes = nodes.map((node) => {
    const x = toX(node.start);
    const y = ((node.first_path - range.start) / rows) * height;
    return { node, x, y, width: toX(node.start + node.num_tokens) - x, height: (node.num_paths / rows) * height };
  });
  const byId = new Map(boxes.map((box) => [box.node.id, box]));
  return { boxes, byId, gaps: findHidden(boxes, byId, height / rows), toX };
}

/** @param {TreeNode[]} nodes */
function pathRange(nodes) {
  const roots = nodes.filter((node) => node.parent === null);
  const start = Math.min(...roots.map((node) => node.first_path));
  return { start, end: Math.max(...roots.map((node) => node.first_path + node.num_paths)) };
}

/**
 * Where a token lies: evenly from left to right. The node that was zoomed into has at most a seventh of the width.
 * @param {TreeNode[]} nodes
 * @param {number | null} top
 * @param {number} width
 * @returns {(place: number) => number}
 */
function makeTreeScale(nodes, top, width) {
  const first = Math.min(...nodes.map((node) => node.start));
  const last = Math.max(...nodes.map((node) => node.start + node.num_tokens));
  const zoomed = nodes.find((node) => node.id === top);
  const own = zoomed ? zoomed.num_tokens : 0;
  const rest = last - first - own;
  const even = width / Math.max(1, last - first);
  if (!zoomed || rest === 0 || own * even <= ZOOMED_SHARE * width) return (place) => (place - first) * even;
  const inside = (ZOOMED_SHARE * width) / own;
  const after = (width * (1 - ZOOMED_SHARE)) / rest;
  return (place) => (place - first <= own ? (place - first) * inside : ZOOMED_SHARE * width + (place - first - own) * after);
}

/**
 * Paths of a node that go on in nodes which are not in the answer.
 * @param {Box[]} boxes
 * @param {Map<number, Box>} byId
 * @param {number} rowHeight
 * @returns {Gap[]}
 */
function findHidden(boxes, byId, rowHeight) {
  /** @type {Map<number, TreeNode[]>} */
  const children = new Map();
  for (const { node } of boxes) {
    if (node.parent !== null) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  }
  /** @type {Gap[]} */
  const gaps = [];
  for (const box of boxes) {
    const { node } = box;
    if (node.num_hidden === 0) continue;
    const below = children.get(node.id) ?? [];
    // What a child hides is shown at the child.
    const own = node.num_hidden - below.reduce((sum, child) => sum + child.num_hidden, 0);
    if (own <= 0) continue;
    const at = longestHidden(node, below);
    gaps.push({ node, count: own, x: box.x + box.width, y: box.y + (at.start - node.first_path) * rowHeight, width: HIDDEN_WIDTH, height: (at.end - at.start) * rowHeight });
  }
  return gaps;
}

/**
 * The longest run of the node's paths that none of its shown children has.
 * @param {TreeNode} node
 * @param {TreeNode[]} below
 */
function longestHidden(node, below) {
  const sorted = [...below].sort((a, b) => a.first_path - b.first_path);
  let best = { start: node.first_path, end: node.first_path };
  let at = node.first_path;
  for (const next of [...sorted.map((child) => [child.first_path, child.first_path + child.num_paths]), [node.first_path + node.num_paths, 0]]) {
    if (next[0] - at > best.end - best.start) best = { start: at, end: next[0] };
    at = next[1];
  }
  return best;
}

/**
 * The box at a place, or the gap.
 * @param {TreeLayout} layout
 * @param {number} x
 * @param {number} y
 * @returns {{node: TreeNode, isGap: boolean} | null}
 */
export function hitTree(layout, x, y) {
  const inside = (/** @type {{x: number, y: number, width: number, height: number}} */ box) => x >= box.x && x < box.x + Math.max(1, box.width) && y >= box.y && y < box.y + box.height;
  const box = layout.boxes.find(inside);
  if (box) return { node: box.node, isGap: false };
  const gap = layout.gaps.find(inside);
  return gap ? { node: gap.node, isGap: true } : null;
}

/**
 * The node that an arrow key leads to: right to the first child, left to the parent, up and down to the neighbour of the same parent.
 * @param {TreeNode[]} nodes
 * @param {number | null} id
 * @param {string} key
 * @returns {number | null}
 */
export function neighbourOf(nodes, id, key) {
  const node = nodes.find((one) => one.id === id);
  if (!node) return nodes[0]?.id ?? null;
  if (key === "ArrowLeft") return node.parent ?? node.id;
  if (key === "ArrowRight") return nodes.find((one) => one.parent === node.id)?.id ?? node.id;
  const siblings = nodes.filter((one) => one.parent === node.parent);
  const at = siblings.indexOf(node) + (key === "ArrowDown" ? 1 : -1);
  return siblings[Math.max(0, Math.min(siblings.length - 1, at))].id;
}
