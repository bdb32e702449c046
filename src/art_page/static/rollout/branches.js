// The tab "branches": the token paths of a rollout as a small tree, with why each left the path before it.

import { get } from "../lib/api.js";
import { h, replace, svg } from "../lib/dom.js";
import { formatCount, plural } from "../lib/format.js";
import { empty, missing, showWhenLoaded } from "../lib/states.js";
import { saidNodes } from "./said_text.js";

/** @typedef {{ path: number, label: string, num_tokens: number, num_sampled: number, num_trained: number, parent?: number|null,
 *   branches_at?: number|null, branch_reason?: string|null }} TokenPath */

const REASONS = /** @type {Record<string, string>} */ ({
  unknown_history: "an earlier answer of it is not recorded on this server",
  edited_history: "the agent changed the text of an earlier answer",
  tools_changed: "the agent offered other tools",
  history_continues_elsewhere: "it has an answer that was not recorded",
  reasoning_dropped: "the chat template drops the reasoning of earlier turns",
  template_rewrites_history: "the chat template renders earlier turns in another way now",
  template_without_turn_end: "the chat template has no token that ends a turn",
});

/** @param {TokenPath} path @returns {string} why a path begins where it does, as a sentence */
export function whyItBranched(path) {
  if (path.parent === null || path.parent === undefined) return path.path > 0 ? "A conversation of its own." : "The first path.";
  const at = `It shares ${plural(path.branches_at ?? 0, "token")} with path ${path.parent}`;
  const reason = path.branch_reason ? (REASONS[path.branch_reason] ?? path.branch_reason) : null;
  return reason ? `${at}; then ${reason}.` : `${at}; then it goes on in another way.`;
}

/** The rows of the tree: each path after its parent, with its depth.
 * @param {TokenPath[]} paths @returns {{ path: TokenPath, depth: number }[]} */
export function treeRows(paths) {
  /** @type {{ path: TokenPath, depth: number }[]} */
  const rows = [];
  /** @param {number|null} parent @param {number} depth */
  const add = (parent, depth) => {
    for (const path of paths) {
      if ((path.parent ?? null) !== parent || rows.some((row) => row.path === path)) continue;
      rows.push({ path, depth });
      add(path.path, depth + 1);
    }
  };
  add(null, 0);
  for (const path of paths) if (!rows.some((row) => row.path === path)) rows.push({ path, depth: 0 });
  return rows;
}

/** @param {HTMLElement} root @param {AbortSignal} signal
 * @param {{ tokensPath: string, tokensHref: (path: number) => string }} options */
export function showBranches(root, signal, options) {
  return showWhenLoaded(root, signal, () => get(options.tokensPath, { path: 0, first: 0, last: 0 }, signal), (answer) => {
    const paths = /** @type {TokenPath[]} */ (answer.paths);
    if (paths.length === 0) {
      replace(root, answer.missing ? missing(answer.missing) : empty("No tokens are recorded for this rollout."));
      return;
    }
    const longest = Math.max(1, ...paths.map((path) => path.num_tokens));
    replace(root,
      h("p", { class: "soft" }, paths.length === 1 ? "One path: every answer extends the tokens before it." : `${paths.length} paths; what they share was computed once.`),
      h("ol", { class: "branches" }, treeRows(paths).map((row) => branchRow(row, longest, options.tokensHref))));
  });
}

/** @param {{ path: TokenPath, depth: number }} row @param {number} longest @param {(path: number) => string} tokensHref */
function branchRow({ path, depth }, longest, tokensHref) {
  return h("li", { class: "branch", style: { "--depth": Math.min(depth, 8) } },
    h("a", { class: "branch-name", href: tokensHref(path.path) }, `path ${path.path} `, saidNodes(path.label)),
    branchBar(path, longest),
    h("span", { class: "soft" }, `${plural(path.num_tokens, "token")}, ${formatCount(path.num_sampled)} sampled, ${formatCount(path.num_trained)} trained`),
    h("span", { class: "branch-why" }, saidNodes(whyItBranched(path))));
}

/** A bar of the path on the scale of the longest one: what it shares with its parent is hollow.
 * @param {TokenPath} path @param {number} longest */
function branchBar(path, longest) {
  const x = (/** @type {number} */ tokens) => (200 * tokens) / longest;
  const shared = Math.min(path.branches_at ?? 0, path.num_tokens);
  return svg("svg", { class: "branch-bar", viewBox: "0 0 200 12", width: 200, height: 12, preserveAspectRatio: "none", role: "img",
    "aria-label": `${shared} of ${path.num_tokens} tokens shared` },
    shared > 0 ? svg("rect", { x: 0, y: 4, width: x(shared), height: 4, class: "branch-shared" }) : null,
    svg("rect", { x: x(shared), y: 1, width: Math.max(1, x(path.num_tokens - shared)), height: 10, class: "branch-own" }));
}
