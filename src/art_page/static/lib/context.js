/**
 * What a view gets beside its root and its route. All of it ends when the view goes.
 *
 * @typedef {object} Context
 * @property {AbortSignal} signal  aborted when another view is shown; pass it to `get`
 * @property {(seconds: number, refresh: () => Promise<void> | void) => void} refreshEvery
 *   call again and again while the page can be seen; a call that fails is tried again more slowly
 * @property {(onEvent: (event: import("./api.js").StreamEvent) => void) => void} live  get every event of the server's stream
 * @property {(bindings: import("./keys.js").KeyBinding[]) => void} keys  add keys for this view
 * @property {(text: string) => void} announce  say it to screen readers, politely
 * @property {boolean} canWrite  whether this page may change things
 *
 * @typedef {object} View
 * @property {(route: import("./router.js").Route) => string} title
 * @property {(root: HTMLElement, route: import("./router.js").Route, ctx: Context) => Promise<(() => void) | void>} show
 *   draws the view and returns what cleans up after it, if something must
 */
import { canWrite, stream } from "./api.js";
import { formatTime } from "./format.js";
import { addKeys } from "./keys.js";
import { visibleText } from "./visible_text.js";

const MAX_DELAY_FACTOR = 16;
/** @type {Set<(event: import("./api.js").StreamEvent) => void>} */
const listeners = new Set();
/** @type {(() => void) | null} */
let stopStream = null;

/**
 * @param {AbortSignal} signal
 * @returns {Context}
 */
export function makeContext(signal) {
  return {
    signal,
    canWrite: canWrite(),
    announce,
    refreshEvery: (seconds, refresh) => refreshEvery(seconds, refresh, signal),
    live: (onEvent) => listen(onEvent, signal),
    keys: (added) => signal.addEventListener("abort", addKeys(added), { once: true }),
  };
}

/** @param {string} text */
export function announce(text) {
  const place = document.getElementById("announcer");
  if (place) place.textContent = visibleText(text);
}

/**
 * @param {number} seconds
 * @param {() => Promise<void> | void} refresh
 * @param {AbortSignal} signal
 */
function refreshEvery(seconds, refresh, signal) {
  let factor = 1;
  const tick = async () => {
    if (signal.aborted) return;
    if (!document.hidden) {
      try {
        await refresh();
        factor = 1;
        if (!signal.aborted) showStale(null);
      } catch (error) {
        factor = Math.min(factor * 2, MAX_DELAY_FACTOR);
        if (!signal.aborted) showStale(error);
      }
    }
    if (!signal.aborted) setTimeout(tick, seconds * 1000 * factor);
  };
  setTimeout(tick, seconds * 1000);
}

let freshAt = Date.now() / 1000;

/**
 * Say that what is shown is old, since refreshing fails.
 * @param {unknown} error  null when it works again
 */
function showStale(error) {
  const place = document.getElementById("stale");
  if (error === null) freshAt = Date.now() / 1000;
  const text = error === null ? "" : `${error instanceof Error ? error.message : error} This is what was known at ${formatTime(freshAt)}.`;
  if (place && place.textContent !== text) place.textContent = text;
}

/**
 * One stream serves all listeners; it is open only while there is one.
 * @param {(event: import("./api.js").StreamEvent) => void} onEvent
 * @param {AbortSignal} signal
 */
function listen(onEvent, signal) {
  listeners.add(onEvent);
  stopStream ??= stream("live", (event) => listeners.forEach((listener) => listener(event)));
  signal.addEventListener("abort", () => {
    listeners.delete(onEvent);
    if (listeners.size > 0) return;
    stopStream?.();
    stopStream = null;
  });
}
