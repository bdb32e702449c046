/**
 * Colours of data; the same in light and in dark. Lines contrast at least 3:1 with both backgrounds (WCAG 1.4.11), and any two lines differ
 * for eyes without red (protanopia) or green (deuteranopia) cones; tests/js/colours.test.js measures both.
 */

/** Lines: the first is for training, the second for held-out scenarios. */
export const CATEGORIES = ["#2a78d6", "#d9730d", "#18a884", "#cc003c", "#603cfc", "#007890"];
export const TRAIN_COLOUR = CATEGORIES[0];
export const HELD_OUT_COLOUR = CATEGORIES[1];

/** Light to dark in even steps of lightness, yellow to blue. */
const SEQUENTIAL = ["#fdf3b4", "#d5e59a", "#9fd38f", "#66bd90", "#34a394", "#228794", "#2b698d", "#344a7d", "#2f2c5d"];
const DIVERGING = ["#1f5fae", "#5a92d3", "#9dc1ea", "#d6e6f6", "#ffffff", "#fbe3c9", "#f3b878", "#e08a32", "#b45f06"];
const NO_DATA = "#8a8f98";

/**
 * Colour of a category, for example the run number `index` of a comparison.
 * @param {number} index
 */
export function categorical(index) {
  return CATEGORIES[((index % CATEGORIES.length) + CATEGORIES.length) % CATEGORIES.length];
}

/**
 * Dash of a category: lines of a comparison differ by more than colour.
 * @param {number} index
 * @returns {number[]}
 */
export function dashOf(index) {
  return [[], [7, 3], [2, 2], [9, 3, 2, 3], [5, 2, 1, 2, 1, 2], [12, 4]][index % 6];
}

/**
 * Colour and dash of a line of a comparison. Where colours begin again, the dashes are others.
 * @param {number} index
 */
export function lookOf(index) {
  return { colour: categorical(index), dash: dashOf(index + Math.floor(index / CATEGORIES.length)) };
}

/** @param {string | null} split */
export function splitColour(split) {
  return split === null || split === "train" ? TRAIN_COLOUR : HELD_OUT_COLOUR;
}

/**
 * Light to dark, for entropy and log-probs.
 * @param {number | null} share from 0 to 1
 */
export function sequential(share) {
  return share === null || !Number.isFinite(share) ? NO_DATA : mix(SEQUENTIAL, share);
}

/**
 * Blue, white, orange: for advantages, with white at 0.
 * @param {number | null} value from -1 to 1
 */
export function diverging(value) {
  return value === null || !Number.isFinite(value) ? NO_DATA : mix(DIVERGING, (value + 1) / 2);
}

/**
 * Black or white, whichever can be read on a background.
 * @param {string} background "#rrggbb"
 */
export function textOn(background) {
  return luminance(background) > 0.18 ? "#000000" : "#ffffff";
}

/**
 * Relative luminance of WCAG, from 0 to 1.
 * @param {string} colour "#rrggbb"
 */
export function luminance(colour) {
  const [red, green, blue] = channels(colour).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/**
 * A colour with an opacity, for a canvas.
 * @param {string} colour "#rrggbb"
 * @param {number} opacity
 */
export function withOpacity(colour, opacity) {
  return `rgba(${channels(colour).join(", ")}, ${opacity})`;
}

/** @param {string} colour */
function channels(colour) {
  return [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
}

/**
 * @param {string[]} stops
 * @param {number} share
 */
function mix(stops, share) {
  const place = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const at = Math.min(Math.floor(place), stops.length - 2);
  const [from, to] = [channels(stops[at]), channels(stops[at + 1])];
  const mixed = from.map((value, index) => Math.round(value + (to[index] - value) * (place - at)));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}
