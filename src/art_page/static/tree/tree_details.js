/** What a prefix tree says in words: its sums, the chosen node, and the tree as a list for those who cannot see the picture. */
import { h } from "../lib/dom.js";
import { formatCount, formatPercent, plural } from "../lib/format.js";
import { link } from "../lib/router.js";

const MAX_LISTED_NODES = 300;
const NODE_INDENT_PX = 12;
const MAX_NODE_INDENT = 12;

/** @param {any} answer  TreeAnswer */
export function treeSummary(answer) {
  const saved = answer.num_path_tokens > 0 ? 1 - answer.num_computed / answer.num_path_tokens : 0;
  return h("p", { class: "tree-summary" },
    `${plural(answer.num_paths, "path")} of ${formatCount(answer.num_path_tokens)} tokens are ${plural(answer.num_tokens, "token")} in the tree. `,
    `The step computed ${formatCount(answer.num_computed)}: sharing saved ${formatPercent(saved)}. Of the paths' tokens, ${formatCount(answer.num_trained)} were learnt.`);
}

/**
 * @param {string[]} run  project and name
 * @param {import("./tree_layout.js").TreeNode} node
 * @param {{zoom: () => void, isTop: boolean}} actions
 */
export function nodeDetails(run, node, actions) {
  const canZoom = !actions.isTop && (node.num_paths > 1 || node.num_hidden > 0);
  return h("div", { class: "tree-node" },
    h("dl", { class: "tree-facts" },
      nodeFact("tokens", `${formatCount(node.num_tokens)} (${formatCount(node.start)} to ${formatCount(node.start + node.num_tokens - 1)})`),
      nodeFact("shared by", plural(node.num_paths, "path")),
      nodeFact("computed", node.num_passes === 1 ? "once" : `${formatCount(node.num_passes)} times`),
      nodeFact("learnt", plural(node.num_learnt, "token")),
      node.num_masked > 0 ? nodeFact("masked or left out by the loss", plural(node.num_masked, "token")) : null,
      node.num_hidden > 0 ? nodeFact("not shown below it", plural(node.num_hidden, "node")) : null),
    node.text === null ? h("p", { class: "soft" }, "The text of this node is not known here.") : h("pre", { class: "tree-text" }, node.text + (node.text.length >= 200 ? " ..." : "")),
    canZoom ? h("button", { type: "button", "on:click": actions.zoom }, "Zoom into this node") : null,
    nodeRolloutLinks(run, node));
}

/**
 * @param {string[]} run
 * @param {import("./tree_layout.js").TreeNode} node
 */
function nodeRolloutLinks(run, node) {
  if (node.rollouts.length === 0) return h("p", { class: "soft" }, "No logged rollout is known to go through here.");
  const more = node.num_paths - node.rollouts.length;
  return h("div", null,
    h("h3", null, "Rollouts through here"),
    h("ul", { class: "tree-rollouts" }, node.rollouts.map((key) => h("li", null,
      h("a", { href: link("rollout", [...run, key.split, key.step, key.group, key.index], { tab: "tokens" }) }, `${key.split} step ${key.step}, group ${key.group}, rollout ${key.index}`)))),
    more > 0 ? h("p", { class: "soft" }, `and ${plural(more, "more path")}`) : null);
}

/**
 * @param {string} name
 * @param {string} value
 */
function nodeFact(name, value) {
  return h("div", null, h("dt", null, name), h("dd", null, value));
}

/**
 * The tree as a list, the deepest indented most.
 * @param {import("./tree_layout.js").TreeNode[]} nodes
 * @param {(id: number) => void} choose
 */
export function nodeList(nodes, choose) {
  /** @type {Map<number, number>} */
  const depths = new Map();
  const rows = nodes.slice(0, MAX_LISTED_NODES).map((node) => {
    const depth = node.parent === null ? 0 : (depths.get(node.parent) ?? 0) + 1;
    depths.set(node.id, depth);
    const button = h("button", { type: "button", class: "quiet tree-row", "on:click": () => choose(node.id) }, (node.text ?? "text not known").replace(/\s+/g, " ").slice(0, 80) || "(white space)");
    button.style.setProperty("margin-left", `${Math.min(depth, MAX_NODE_INDENT) * NODE_INDENT_PX}px`);
    return h("tr", null, h("td", null, button),
      [depth + 1, node.num_tokens, node.num_paths, node.num_learnt].map((value) => h("td", { class: "number" }, formatCount(value))));
  });
  const more = nodes.length - rows.length;
  return h("div", { class: "tree-list" },
    h("table", null,
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Text"), ["Level", "Tokens", "Paths", "Learnt"].map((title) => h("th", { scope: "col", class: "number" }, title)))),
      h("tbody", null, rows)),
    more > 0 ? h("p", { class: "soft" }, `and ${plural(more, "more node")}: zoom into one to list what is below it`) : null);
}
