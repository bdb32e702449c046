/** Light and dark: the system's choice, until the reader makes one. */
import { h, replace } from "./dom.js";

const THEMES = ["auto", "light", "dark"];
const KEY = "art-theme";

/** @returns {string} */
function readTheme() {
  try {
    const theme = localStorage.getItem(KEY) ?? "auto";
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

/** Put the chosen theme on the page; charts draw again on "art-theme". */
export function applyTheme() {
  const theme = readTheme();
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("art-theme"));
}

/** A button that goes from the system's colours to light to dark. */
export function themeButton() {
  const button = h("button", { type: "button", class: "quiet", "on:click": change });
  function label() {
    const theme = readTheme();
    replace(button, h("span", { class: "wide" }, "Colours: "), theme);
    button.setAttribute("aria-label", `Colours: ${theme}`);
    button.title = "Colours: auto follows your system; press for light, then dark";
  }
  function change() {
    const theme = THEMES[(THEMES.indexOf(readTheme()) + 1) % THEMES.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      document.documentElement.dataset.theme = theme;
    }
    applyTheme();
    label();
  }
  label();
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
