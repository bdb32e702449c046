/** Opens a session: by the one-time code in the address, or by a key that somebody types. */
import { ApiError, logIn } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";

const LOGIN_MARK = "#login=";

/** Whether the address is a login link, which somebody may also open in a tab that shows the page already. */
export function isLoginLink() {
  return location.hash.startsWith(LOGIN_MARK);
}

/**
 * Use the one-time code in the address, if there is one. The address loses it first, so it is in no history.
 * @returns {Promise<string | null>} why the code did not work
 */
export async function useLoginLink() {
  if (!isLoginLink()) return null;
  const code = location.hash.slice(LOGIN_MARK.length);
  history.replaceState(null, "", "#/");
  try {
    await logIn({ code });
    return null;
  } catch (error) {
    if (error instanceof ApiError) return error.message;
    throw error;
  }
}

/**
 * Ask for a key.
 * @param {Element} root
 * @param {string | null} message  why it is asked for
 * @param {() => void} onDone
 */
export function showLogin(root, message, onDone) {
  const input = h("input", { type: "password", id: "login-key", autocomplete: "current-password", required: true, spellcheck: "false" });
  const problem = h("p", { class: "state-text", role: "alert" }, message);
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const key = input.value.trim();
    try {
      await logIn({ key });
    } catch (error) {
      replace(problem, error instanceof Error ? error.message : String(error));
      input.select();
      return;
    }
    input.value = "";
    onDone();
  };
  replace(
    root,
    h("form", { class: "state login", "on:submit": submit },
      h("h1", null, "Log in"),
      problem,
      h("p", null, h("label", { for: "login-key" }, "API key "), input, " ", h("button", { type: "submit" }, "Log in")),
      h("p", { class: "soft" }, "On the machine of the server, ", h("code", null, "art view DIR"),
        " prints a link that opens this page without a key. A key shows what it may read; it is not kept in the browser.")),
  );
  input.focus();
}
