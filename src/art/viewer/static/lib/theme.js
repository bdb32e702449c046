/** Light and dark: the system's choice, until the reader makes one. */
import { h } from "./dom.js";

const THEMES = ["system", "light", "dark"];
const KEY = "art-theme";

/** @returns {string} */
function readTheme() {
  try {
    const theme = localStorage.getItem(KEY) ?? "system";
    return THEMES.includes(theme) ? theme : "system";
  } catch {
    return "system";
  }
}

/** Put the chosen theme on the page; charts draw again on "art-theme". */
export function applyTheme() {
  const theme = readTheme();
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("art-theme"));
}

/** A button that goes from the system's theme to light to dark. */
export function themeButton() {
  const button = h("button", { type: "button", class: "quiet", "on:click": change }, `Theme: ${readTheme()}`);
  function change() {
    const theme = THEMES[(THEMES.indexOf(readTheme()) + 1) % THEMES.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      document.documentElement.dataset.theme = theme;
    }
    applyTheme();
    button.textContent = `Theme: ${readTheme()}`;
  }
  return button;
}

/** Call when the colours of the page change, by the reader or by the system.
 * @param {() => void} redraw
 * @param {AbortSignal} signal
 */
export function onThemeChange(redraw, signal) {
  document.addEventListener("art-theme", redraw, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw, { signal });
}

/**
 * Value of a colour of the page now, for a canvas.
 * @param {string} name  for example "--line"
 */
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
