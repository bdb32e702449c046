/** Prefix tree of a step as it was trained: what was shared, computed once, learnt. */
import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { go, link, setQuery } from "../lib/router.js";
import { missing, showWhenLoaded } from "../lib/states.js";
import { LEARNT_COLOUR, drawTree, passColour, sharedColour } from "../tree/tree_canvas.js";
import { nodeDetails, nodeList, treeSummary } from "../tree/tree_details.js";
import { hitTree, layOutTree, neighbourOf } from "../tree/tree_layout.js";

const MIN_TREE_HEIGHT = 240;
const MAX_TREE_HEIGHT = 720;
const TREE_ROW_HEIGHT = 22;
const TREE_ARROWS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"];

/** @type {import("../lib/context.js").View} */
export const treeView = {
  title: (route) => `Prefix tree of step ${route.args[2]} of ${route.args[0]}/${route.args[1]}`,
  async show(root, route, ctx) {
    const page = new TreePage(root, route, ctx);
    await page.load();
    ctx.keys([
      { key: "[", text: "tree of the step before", run: () => page.goToStep(-1) },
      { key: "]", text: "tree of the next step", run: () => page.goToStep(1) },
      { key: "c", text: "colour by role or by how often it was computed", run: () => page.nextColour() },
      { key: "Escape", text: "zoom out", run: () => page.zoomOut() },
    ]);
    return () => page.observer.disconnect();
  },
};

class TreePage {
  /**
   * @param {HTMLElement} root
   * @param {import("../lib/router.js").Route} route
   * @param {import("../lib/context.js").Context} ctx
   */
  constructor(root, route, ctx) {
    this.root = root;
    this.ctx = ctx;
    this.run = route.args.slice(0, 2);
    this.step = Number(route.args[2]);
    this.zoomed = nodeNumber(route.query.get("node"));
    this.selected = nodeNumber(route.query.get("selected"));
    /** @type {number | null} */
    this.hovered = null;
    /** @type {"role" | "passes"} */
    this.colour = route.query.get("color") === "passes" ? "passes" : "role";
    /** @type {any} */
    this.answer = null;
    /** @type {import("../tree/tree_layout.js").TreeLayout | null} */
    this.layout = null;
    this.canvas = h("canvas", {
      class: "tree-canvas", tabindex: "0", role: "img", "aria-describedby": "tree-help",
      "on:click": (/** @type {MouseEvent} */ event) => this.onClick(event), "on:dblclick": () => this.zoomInto(this.selected),
      "on:pointermove": (/** @type {PointerEvent} */ event) => this.onMove(event), "on:pointerleave": () => this.hover(null),
      "on:keydown": (/** @type {KeyboardEvent} */ event) => this.onKey(event),
    });
    this.details = h("div", { class: "tree-details", "aria-live": "polite" });
    this.legend = h("div", { class: "row tree-legend" });
    this.trail = h("nav", { class: "row", "aria-label": "zoom" });
    this.list = h("details", null, h("summary", null, "The tree as a list"));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  async load() {
    const [project, name] = this.run;
    const ask = () => get(`runs/${project}/${name}/steps/${this.step}/tree`, { node: this.zoomed }, this.ctx.signal);
    await showWhenLoaded(this.root, this.ctx.signal, ask, (answer) => this.show(answer));
  }

  /** @param {any} answer */
  show(answer) {
    this.answer = answer;
    if (answer.nodes.length === 0) {
      replace(this.root, this.header(), missing(answer.missing ?? "This step has no tree."));
      return;
    }
    if (!answer.nodes.some((/** @type {any} */ node) => node.id === this.selected)) this.selected = answer.nodes[0].id;
    replace(this.root, this.header(), treeSummary(answer), this.trail, this.legend,
      h("p", { id: "tree-help", class: "unseen" }, "To the right are later tokens, from top to bottom lie the paths. Arrow keys move, Enter zooms in, Escape zooms out. The same tree follows as a list."),
      h("div", { class: "tree-panes" }, this.canvas, this.details), answer.missing ? missing(answer.missing) : null, this.list);
    replace(this.list, h("summary", null, "The tree as a list"), nodeList(answer.nodes, (id) => this.select(id)));
    this.canvas.setAttribute("aria-label", `Prefix tree of step ${this.step}: ${plural(answer.num_nodes, "node")}`);
    this.canvas.style.setProperty("height", `${this.height()}px`);
    this.drawTrail();
    this.drawLegend();
    this.draw();
    this.drawDetails();
  }

  header() {
    const [project, name] = this.run;
    return h("div", { class: "head" },
      h("h1", null, `Prefix tree of step ${this.step}`),
      h("nav", { class: "row", "aria-label": "steps" },
        this.step > 1 ? h("a", { href: link("tree", [project, name, this.step - 1]) }, "step before") : null,
        h("a", { href: link("tree", [project, name, this.step + 1]) }, "next step"),
        h("a", { href: link("rollouts", [project, name], { step: this.step }) }, "rollouts of this step")));
  }

  height() {
    const paths = this.answer.nodes.filter((/** @type {any} */ node) => node.parent === null).reduce((/** @type {number} */ sum, /** @type {any} */ node) => sum + node.num_paths, 0);
    return Math.max(MIN_TREE_HEIGHT, Math.min(MAX_TREE_HEIGHT, Math.round(innerHeight * 0.65), paths * TREE_ROW_HEIGHT));
  }

  draw() {
    if (!this.answer || this.answer.nodes.length === 0 || !this.canvas.isConnected) return;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (width === 0 || height === 0) return;
    this.layout = layOutTree(this.answer.nodes, this.zoomed, width, height);
    const style = getComputedStyle(this.root);
    drawTree(this.canvas, this.layout, {
      colour: this.colour, numPaths: this.answer.num_paths, mostPasses: this.mostPasses(), selected: this.selected, hovered: this.hovered,
      line: style.getPropertyValue("--paper").trim(), accent: style.getPropertyValue("--text").trim(),
    }, width, height);
  }

  mostPasses() {
    return Math.max(1, ...this.answer.nodes.map((/** @type {any} */ node) => node.num_passes));
  }

  drawLegend() {
    const all = this.answer.num_paths;
    const items = this.colour === "role"
      ? [[LEARNT_COLOUR, "learnt"], ["hatch", "masked, or left out by the loss"], [sharedColour(1, all), "context of one path"], [sharedColour(all, all), `context shared by ${all === 1 ? "one" : `all ${all}`}`]]
      : [[passColour(1, this.mostPasses()), "computed once"], [passColour(this.mostPasses(), this.mostPasses()), `computed ${plural(this.mostPasses(), "time")}`]];
    replace(this.legend, items.map(([colour, text]) => {
      const sample = h("span", { class: colour === "hatch" ? "tree-sample tree-hatch" : "tree-sample" });
      if (colour !== "hatch") sample.style.setProperty("background", colour);
      return h("span", { class: "row small" }, sample, text);
    }), h("button", { type: "button", class: "quiet", "on:click": () => this.nextColour() }, this.colour === "role" ? "Colour by passes" : "Colour by role"));
  }

  drawTrail() {
    this.trail.hidden = this.zoomed === null;
    if (this.zoomed === null) return;
    const above = [null, ...this.answer.above];
    replace(this.trail, above.map((/** @type {number | null} */ id, /** @type {number} */ at) => h("button", { type: "button", class: "quiet", "on:click": () => this.zoomTo(id) }, at === 0 ? "Whole tree" : `level ${at}`)), h("span", { class: "soft" }, `level ${above.length}`));
  }

  drawDetails() {
    const node = this.layout?.byId.get(this.selected ?? -1)?.node;
    if (!node) return;
    replace(this.details, nodeDetails(this.run, node, { isTop: node.id === this.zoomed, zoom: () => this.zoomInto(node.id) }));
  }

  /** @param {number | null} id */
  select(id) {
    this.selected = id;
    setQuery({ selected: id });
    this.draw();
    this.drawDetails();
  }

  /** @param {number | null} id */
  hover(id) {
    if (this.hovered === id) return;
    this.hovered = id;
    this.draw();
  }

  /** @param {number | null} id */
  zoomInto(id) {
    const node = this.answer.nodes.find((/** @type {any} */ one) => one.id === id);
    if (node && node.id !== this.zoomed && (node.num_paths > 1 || node.num_hidden > 0)) this.zoomTo(node.id);
  }

  /** @param {number | null} id */
  async zoomTo(id) {
    const hadFocus = document.activeElement === this.canvas;
    this.zoomed = id;
    setQuery({ node: id });
    await this.load();
    if (hadFocus) this.canvas.focus();
  }

  zoomOut() {
    if (this.zoomed !== null) this.zoomTo(this.answer.above.at(-1) ?? null);
  }

  nextColour() {
    this.colour = this.colour === "role" ? "passes" : "role";
    setQuery({ color: this.colour === "role" ? null : this.colour });
    this.drawLegend();
    this.draw();
  }

  /** @param {number} by */
  goToStep(by) {
    if (this.step + by >= 1) go("tree", [...this.run, this.step + by]);
  }

  /** @param {MouseEvent} event */
  onClick(event) {
    const hit = this.layout && hitTree(this.layout, event.offsetX, event.offsetY);
    if (!hit) return;
    if (hit.isGap) this.zoomInto(hit.node.id);
    else this.select(hit.node.id);
  }

  /** @param {PointerEvent} event */
  onMove(event) {
    const hit = this.layout && hitTree(this.layout, event.offsetX, event.offsetY);
    this.canvas.classList.toggle("is-pointing", hit !== null);
    this.hover(hit?.node.id ?? null);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.key === "Enter") this.zoomInto(this.selected);
    else if (TREE_ARROWS.includes(event.key)) this.select(neighbourOf(this.answer.nodes, this.selected, event.key));
    else return;
    event.preventDefault();
  }
}

/** @param {string | null} text */
function nodeNumber(text) {
  return text !== null && /^\d+$/.test(text) ? Number(text) : null;
}
