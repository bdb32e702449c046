/** How curves are drawn: smoothing, bands, axes, held-out, steps. All of it is in the address. */
import { h } from "../lib/dom.js";
import { setQuery } from "../lib/router.js";
import { AXES, axisName } from "./axes.js";

/**
 * @typedef {object} CurveSettings
 * @property {string[]} metrics  one pane each
 * @property {number} smoothing  from 0 to 0.98
 * @property {boolean} bands
 * @property {boolean} log
 * @property {boolean} heldOut  draw the same metric of the other splits beside it
 * @property {import("./axes.js").AxisName} across  what the horizontal axis counts
 * @property {import("../lib/chart.js").Zoom | null} zoom  steps; an axis of something else has a zoom that the address does not keep
 */

/** Most metrics that are drawn at once. */
export const MAX_PANES = 24;
const MAX_SMOOTHING = 0.98;

/**
 * @param {URLSearchParams} query
 * @returns {CurveSettings}
 */
export function readSettings(query) {
  const smoothing = Number(query.get("smooth") ?? 0);
  const [first, last] = [readStep(query.get("first")), readStep(query.get("last"))];
  return {
    metrics: [...new Set(query.getAll("metric"))].slice(0, MAX_PANES),
    smoothing: smoothing >= 0 && smoothing <= MAX_SMOOTHING ? smoothing : 0,
    bands: query.get("bands") !== "off",
    log: query.get("axis") === "log",
    heldOut: query.get("held-out") !== "off",
    across: axisName(query.get("x")),
    zoom: first !== null && last !== null && last > first ? { first, last } : null,
  };
}

/** @param {CurveSettings} settings */
export function writeSettings(settings) {
  setQuery({
    metric: settings.metrics,
    smooth: settings.smoothing || null,
    bands: settings.bands ? null : "off",
    axis: settings.log ? "log" : null,
    "held-out": settings.heldOut ? null : "off",
    x: settings.across === "step" ? null : settings.across,
    first: settings.zoom?.first ?? null,
    last: settings.zoom?.last ?? null,
  });
}

/**
 * A step in an address.
 * @param {string | null} text
 */
export function readStep(text) {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

/**
 * The controls. `onChange` gets what has changed.
 * @param {CurveSettings} settings
 * @param {(changes: Partial<CurveSettings>) => void} onChange
 * @returns {{element: HTMLElement, showZoom: (zoom: import("../lib/chart.js").Zoom | null) => void}}
 */
export function settingControls(settings, onChange) {
  const shown = h("output", { class: "small soft" }, smoothingText(settings.smoothing));
  const slider = h("input", { type: "range", min: 0, max: MAX_SMOOTHING, step: 0.02, value: String(settings.smoothing), "aria-label": "Smoothing", "on:input": () => {
    shown.textContent = smoothingText(Number(slider.value));
    onChange({ smoothing: Number(slider.value) });
  } });
  const first = h("input", { type: "number", min: 0, placeholder: "first", "aria-label": "First step", value: settings.zoom?.first ?? "" });
  const last = h("input", { type: "number", min: 0, placeholder: "last", "aria-label": "Last step", value: settings.zoom?.last ?? "" });
  const onSteps = () => {
    const [from, to] = [readStep(first.value), readStep(last.value)];
    onChange({ zoom: from !== null && to !== null && to > from ? { first: from, last: to } : null });
  };
  for (const input of [first, last]) input.addEventListener("change", onSteps);
  const across = h("select", { "aria-label": "Horizontal axis", "on:change": () => onChange({ across: axisName(across.value), zoom: null }) },
    Object.entries(AXES).map(([name, { word, meaning }]) => h("option", { value: name, title: meaning }, word)));
  across.value = settings.across;
  const element = h("div", { class: "row curve-settings" },
    h("label", null, "Over ", across),
    h("label", { title: "Exponential moving average over steps; the raw values stay as dots" }, "Smoothing ", slider, shown),
    tickBox("95 % bands", settings.bands, (bands) => onChange({ bands })),
    tickBox("Held-out", settings.heldOut, (heldOut) => onChange({ heldOut })),
    tickBox("Log axis", settings.log, (log) => onChange({ log })),
    h("span", { class: "row steps" }, "Steps ", first, " to ", last));
  return { element, showZoom: (zoom) => {
    if (zoom === null && (first.value === "") !== (last.value === "")) return; // the reader is still typing the other one
    first.value = zoom ? String(zoom.first) : "";
    last.value = zoom ? String(zoom.last) : "";
  } };
}

/** @param {number} smoothing */
function smoothingText(smoothing) {
  return smoothing === 0 ? "off" : `about ${Math.round(1 / (1 - smoothing))} steps`;
}

/**
 * @param {string} text
 * @param {boolean} isOn
 * @param {(isOn: boolean) => void} onChange
 */
function tickBox(text, isOn, onChange) {
  return h("label", null, h("input", { type: "checkbox", checked: isOn, "on:change": (/** @type {Event} */ event) => onChange(/** @type {HTMLInputElement} */ (event.target).checked) }), text);
}
