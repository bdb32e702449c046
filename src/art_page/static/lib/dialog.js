/** Dialogs: one that shows something, and one that asks before it acts. */
import { h, replace } from "./dom.js";

let numDialogs = 0;

/**
 * Show a dialog until it is closed; Escape closes it.
 * @param {string} title
 * @param {...import("./dom.js").Child} content
 */
export function showDialog(title, ...content) {
  numDialogs += 1;
  const id = `dialog-${numDialogs}`;
  const dialog = h("dialog", { "aria-labelledby": id, "on:close": () => dialog.remove() },
    h("form", { method: "dialog", class: "head" }, h("h2", { id }, title), h("button", { class: "quiet" }, "Close")), content);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Ask, then act. The dialog says what happens, shows the error if it fails, and what `act` returns if it works; null closes the dialog.
 * @param {object} options
 * @param {string} options.title
 * @param {import("./dom.js").Child} options.text  what happens
 * @param {string} options.button
 * @param {boolean} [options.isDanger]
 * @param {() => Promise<import("./dom.js").Child>} options.act
 */
export function askBefore({ title, text, button, isDanger = false, act }) {
  const problem = h("p", { class: "bad", role: "alert" });
  const doIt = h("button", { type: "submit", class: isDanger ? "danger" : "primary" }, button);
  const cancel = h("button", { type: "button", "on:click": () => dialog.close() }, "Cancel");
  const body = h("div", { class: "state-hint" }, text, problem, h("div", { class: "row" }, doIt, cancel));
  const form = h("form", { "on:submit": submit }, body);
  const dialog = showDialog(title, form);
  async function submit(/** @type {Event} */ event) {
    event.preventDefault();
    doIt.disabled = true;
    replace(problem);
    try {
      const result = await act();
      if (result === null) dialog.close();
      else replace(body, result);
    } catch (error) {
      replace(problem, error instanceof Error ? error.message : String(error));
      doIt.disabled = false;
    }
  }
  return dialog;
}
