/** Layouts of curves that the reader has named: which charts, in which order, drawn how. They are kept in this browser. */
import { h, replace } from "../lib/dom.js";

/** @typedef {import("./curve_settings.js").CurveSettings} CurveSettings */

const KEY = "art-curve-layouts";
const LONGEST_NAME = 60;
const KEPT = /** @type {const} */ (["metrics", "smoothing", "bands", "log", "heldOut", "across"]);

/** @returns {Record<string, Partial<CurveSettings>>} */
function readLayouts() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    return Object.fromEntries(Object.entries(kept).filter(([, layout]) => Array.isArray(/** @type {any} */ (layout).metrics)));
  } catch {
    return {}; // no storage, or what another program left there
  }
}

/** @param {Record<string, Partial<CurveSettings>>} layouts */
function keep(layouts) {
  try {
    localStorage.setItem(KEY, JSON.stringify(layouts));
    return true;
  } catch {
    return false;
  }
}

/**
 * A menu that shows, saves and deletes layouts.
 * @param {() => CurveSettings} current
 * @param {(layout: Partial<CurveSettings>) => void} onChoose
 */
export function layoutMenu(current, onChoose) {
  const choice = h("select", { "aria-label": "Layout", "on:change": () => {
    const layout = readLayouts()[choice.value];
    remove.hidden = layout === undefined;
    if (layout !== undefined) onChoose({ ...layout, zoom: null });
  } });
  const name = h("input", { type: "text", placeholder: "name of this layout", "aria-label": "Name of this layout", maxlength: LONGEST_NAME, hidden: true });
  const save = h("button", { type: "button", title: "Keep which charts are shown, their order and their settings in this browser" }, "Save layout");
  const remove = h("button", { type: "button", hidden: true, "on:click": () => {
    const { [choice.value]: _, ...others } = readLayouts();
    keep(others);
    draw("");
  } }, "Delete layout");
  const onSave = () => {
    if (name.hidden) {
      name.hidden = false;
      name.value = choice.value;
      name.focus();
      return;
    }
    if (name.value.trim() === "") return;
    const settings = current();
    const layout = Object.fromEntries(KEPT.map((key) => [key, settings[key]]));
    const isKept = keep({ ...readLayouts(), [name.value.trim()]: layout });
    name.hidden = isKept;
    save.textContent = isKept ? "Save layout" : "This browser keeps nothing";
    draw(name.value.trim());
  };
  save.addEventListener("click", onSave);
  name.addEventListener("keydown", (event) => {
    if (event.key === "Enter") onSave();
    if (event.key === "Escape") name.hidden = true;
  });
  /** @param {string} chosen */
  function draw(chosen) {
    const names = Object.keys(readLayouts()).sort();
    replace(choice, h("option", { value: "" }, "Layout ..."), names.map((one) => h("option", { value: one }, one)));
    choice.value = names.includes(chosen) ? chosen : "";
    choice.hidden = names.length === 0;
    remove.hidden = choice.value === "";
  }
  draw("");
  return h("div", { class: "row" }, choice, name, save, remove);
}
