/** The states that a view can be in when it has nothing to show: loading, empty, failed, missing. */
import { h, replace } from "./dom.js";

const LOADING_AFTER_MS = 150;

/**
 * There is nothing yet. `hint` says what brings the first thing here.
 * @param {string} text
 * @param {import("./dom.js").Child} [hint]
 */
export function empty(text, hint) {
  return h("div", { class: "state state-empty" }, h("p", { class: "state-text" }, text), hint ? h("div", { class: "state-hint" }, hint) : null);
}

export function loading() {
  return h("div", { class: "state state-loading", role: "status" }, h("p", { class: "state-text" }, "Loading ..."));
}

/**
 * A request failed.
 * @param {unknown} error
 * @param {() => void} [retry]
 */
export function failed(error, retry) {
  const text = error instanceof Error ? error.message : String(error);
  const button = retry ? h("button", { type: "button", "on:click": retry }, "Try again") : null;
  return h("div", { class: "state state-failed", role: "alert" }, h("p", { class: "state-text" }, text), button);
}

/**
 * What is asked for was not recorded, or has been removed by retention: that is a state, not an error.
 * @param {string} text
 */
export function missing(text) {
  return h("p", { class: "state state-missing" }, text);
}

/**
 * Load, then draw; show "loading" only when it takes more than 150 ms, and the error with a button when it fails.
 * @template Answer
 * @param {Element} root
 * @param {AbortSignal} signal
 * @param {() => Promise<Answer>} load
 * @param {(answer: Answer) => import("./dom.js").Child | void} draw  returns what `root` should hold, or nothing when it drew by itself
 */
export async function showWhenLoaded(root, signal, load, draw) {
  const timer = setTimeout(() => replace(root, loading()), LOADING_AFTER_MS);
  try {
    const answer = await load();
    clearTimeout(timer);
    if (signal.aborted) return;
    const drawn = draw(answer);
    if (drawn !== undefined) replace(root, drawn);
  } catch (error) {
    clearTimeout(timer);
    if (signal.aborted) return;
    replace(root, failed(error, () => showWhenLoaded(root, signal, load, draw)));
  }
}

/**
 * Act, and show the error with a button if it fails. Nothing is shown when the view has gone.
 * @param {Element} root
 * @param {AbortSignal} signal
 * @param {() => Promise<void>} act
 */
export async function orShowFailure(root, signal, act) {
  try {
    await act();
  } catch (error) {
    if (!signal.aborted) replace(root, failed(error, () => orShowFailure(root, signal, act)));
  }
}
