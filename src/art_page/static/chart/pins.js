/** Findings on a chart: a mark at the step, with the sentence on hover. */
import { h, setStyle } from "../lib/dom.js";

const MAX_PIN_LINES = 12;

/**
 * Draw the pins that the zoom shows. The lines above them are drawn for a few, and for the lit step.
 * @param {UPlot} plot
 * @param {import("../lib/chart.js").Pin[]} pins
 * @param {number | null} litStep
 * @param {(pin: import("../lib/chart.js").Pin) => void} onPin
 */
export function drawPins(plot, pins, litStep, onPin) {
  plot.over.querySelectorAll(".pin, .pin-line").forEach((element) => element.remove());
  const { min, max } = plot.scales.x;
  const textsOf = textsByStep(pins);
  const places = new Map(pins.map((pin) => [pin.step, pin.at ?? pin.step]));
  for (const [step, texts] of textsOf) {
    const at = places.get(step) ?? step;
    if (at < (min ?? 0) || at > (max ?? 0)) continue;
    const isLit = step === litStep;
    const style = { left: `${plot.valToPos(at, "x")}px` };
    const line = h("span", { class: isLit ? "pin-line is-lit" : "pin-line" });
    const text = `Step ${step}: ${texts.join(" ")}`;
    const pin = h("button", { type: "button", class: isLit ? "pin is-lit" : "pin", title: text, "aria-label": text, "on:click": (/** @type {Event} */ event) => {
      event.stopPropagation();
      onPin({ step, text: texts[0] });
    } });
    setStyle(line, style);
    setStyle(pin, style);
    if (isLit || textsOf.size <= MAX_PIN_LINES) plot.over.append(line);
    plot.over.append(pin);
  }
}

/** @param {import("../lib/chart.js").Pin[]} pins */
function textsByStep(pins) {
  /** @type {Map<number, string[]>} */
  const texts = new Map();
  for (const pin of pins) texts.set(pin.step, [...(texts.get(pin.step) ?? []), pin.text]);
  return texts;
}
