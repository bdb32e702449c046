/** The help: `?` shows the keys that work here and the words of the page. */
import { h, replace } from "../lib/dom.js";
import { addKeys, listKeys } from "../lib/keys.js";

const WORDS = /** @type {[string, string][]} */ ([
  ["Rollout", "One act of the agent on one scenario, with a reward."],
  ["Group", "Rollouts of one scenario. The agent learns from how their rewards differ."],
  ["Advantage", "How much better a rollout was than its group; what training multiplies the tokens by."],
  ["Step", "One optimiser step; the number of a checkpoint."],
  ["Band", "95 % interval of the mean. Two bands that overlap may be noise."],
  ["Held-out", "Scenarios that are not trained on, drawn in orange."],
]);

export function addHelp() {
  addKeys([{ key: "?", text: "this help", run: showHelp }]);
}

export function showHelp() {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
  replace(
    dialog,
    h("form", { method: "dialog", class: "head" }, h("h2", { id: "help-title" }, "Help"), h("button", { autofocus: true }, "Close")),
    h("h3", null, "Keys on this view"),
    h("dl", { class: "help-keys" }, listKeys().map((binding) => h("div", null, h("dt", null, keyNames(binding.key)), h("dd", null, binding.text)))),
    h("h3", null, "Words"),
    h("dl", { class: "help-words" }, WORDS.map(([word, meaning]) => h("div", null, h("dt", null, word), h("dd", null, meaning)))),
  );
  dialog.showModal();
}

/** @param {string} keys */
function keyNames(keys) {
  return keys.split(" ").map((key) => h("kbd", null, key));
}
