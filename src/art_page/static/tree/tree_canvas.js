/** Draws a prefix tree on a canvas. Thousands of nodes stay fluent: what is smaller than a pixel is drawn with its neighbours' colour only. */
import { sequential, textOn } from "../lib/colours.js";

/** Blue for what was learnt; greys for context, darker the more paths share it. Told apart by lightness too. */
export const LEARNT_COLOUR = "#2a78d6";
const UNLEARNT_COLOUR = "#e0a458";
const UNSHARED_GREY = 222;
const SHARED_GREY = 96;
const MIN_NODE_TEXT_WIDTH = 28;
const MIN_NODE_TEXT_HEIGHT = 13;
const NODE_FONT_SIZE = 11;

/**
 * Grey of context that `count` of `all` paths share, on a log scale.
 * @param {number} count
 * @param {number} all
 */
export function sharedColour(count, all) {
  const share = all > 1 ? Math.log(count) / Math.log(all) : 0;
  const level = Math.round(UNSHARED_GREY + (SHARED_GREY - UNSHARED_GREY) * Math.max(0, Math.min(1, share)));
  const part = level.toString(16).padStart(2, "0");
  return `#${part}${part}${part}`;
}

/**
 * Colour of what several forward passes computed: light for once, dark for as often as any node of the tree.
 * @param {number} passes
 * @param {number} most
 */
export function passColour(passes, most) {
  return sequential(most > 1 ? Math.log(passes) / Math.log(most) : 0);
}

/**
 * @typedef {object} Look
 * @property {"role" | "passes"} colour
 * @property {number} numPaths  of the whole tree
 * @property {number} mostPasses
 * @property {number | null} selected
 * @property {number | null} hovered
 * @property {string} line  colour of borders
 * @property {string} accent  colour of the selection
 */

/**
 * @param {HTMLCanvasElement} canvas
 * @param {import("./tree_layout.js").TreeLayout} layout
 * @param {Look} look
 * @param {number} width
 * @param {number} height
 */
export function drawTree(canvas, layout, look, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  if (!context) return;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `${NODE_FONT_SIZE}px ui-monospace, Menlo, Consolas, monospace`;
  context.textBaseline = "middle";
  for (const box of layout.boxes) drawNode(context, layout, box, look);
  for (const gap of layout.gaps) drawHiddenNodes(context, gap, look);
  for (const [id, weight] of /** @type {[number | null, number][]} */ ([[look.hovered, 1], [look.selected, 2]])) {
    const box = id === null ? undefined : layout.byId.get(id);
    if (!box) continue;
    context.strokeStyle = look.accent;
    context.lineWidth = weight;
    context.strokeRect(box.x + weight / 2, box.y + weight / 2, Math.max(1, box.width - weight), Math.max(1, box.height - weight));
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {import("./tree_layout.js").TreeLayout} layout
 * @param {import("./tree_layout.js").Box} box
 * @param {Look} look
 */
function drawNode(context, layout, box, look) {
  const { node } = box;
  const gap = box.height > 4 ? 1 : 0;
  const height = Math.max(box.height - gap, 0.5);
  const fill = look.colour === "passes" ? passColour(node.num_passes, look.mostPasses) : sharedColour(node.num_paths, look.numPaths);
  context.fillStyle = fill;
  context.fillRect(box.x, box.y, Math.max(box.width, 0.5), height);
  let text = fill;
  for (const [start, end, isLearnt] of look.colour === "role" ? node.runs : []) {
    const x = layout.toX(start);
    const width = Math.max(layout.toX(end) - x, 0.75);
    if (isLearnt) {
      context.fillStyle = LEARNT_COLOUR;
      context.fillRect(x, box.y, width, height);
    } else hatchArea(context, x, box.y, width, height, UNLEARNT_COLOUR);
    if (start === node.start && width > box.width / 2) text = isLearnt ? LEARNT_COLOUR : UNLEARNT_COLOUR;
  }
  if (box.width > 3) {
    context.fillStyle = look.line;
    context.fillRect(box.x, box.y, 1, height);
  }
  if (box.width >= MIN_NODE_TEXT_WIDTH && box.height >= MIN_NODE_TEXT_HEIGHT) drawNodeText(context, box, textOn(text), node.text ?? `${node.num_tokens} tokens`);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {import("./tree_layout.js").Box} box
 * @param {string} colour
 * @param {string} text
 */
function drawNodeText(context, box, colour, text) {
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.width - 4, box.height);
  context.clip();
  context.fillStyle = colour;
  context.fillText(text.replace(/\s+/g, " ").slice(0, Math.ceil(box.width / 5)), box.x + 5, box.y + Math.min(box.height / 2, 12));
  context.restore();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {import("./tree_layout.js").Gap} gap
 * @param {Look} look
 */
function drawHiddenNodes(context, gap, look) {
  if (gap.height <= 0) return;
  hatchArea(context, gap.x, gap.y, gap.width, gap.height, look.line);
}

/**
 * Diagonal lines, for what is left out.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @param {string} colour
 */
function hatchArea(context, x, y, width, height, colour) {
  if (width < 3 || height < 3) {
    context.fillStyle = colour;
    context.fillRect(x, y, width, height);
    return;
  }
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
