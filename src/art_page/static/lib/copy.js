/** A button that copies a text. */
import { announce } from "./context.js";
import { h } from "./dom.js";

/**
 * @param {string | (() => string | Promise<string>)} text  a function makes a long text only when it is copied
 * @param {string} [label]
 */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", "on:click": copy }, label);
  async function copy() {
    try {
      button.textContent = (await copyText(typeof text === "string" ? text : await text())) ? "Copied" : "Press Ctrl+C";
    } catch (error) {
      button.textContent = "Not copied";
      button.title = error instanceof Error ? error.message : String(error);
    }
    announce(button.textContent);
    setTimeout(() => {
      button.textContent = label;
    }, 1500);
  }
  return button;
}

/**
 * Browsers give the clipboard only to pages of https and of this machine; elsewhere the text is left selected.
 * @param {string} text
 */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "unseen", value: text });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
