/**
 * The keyboard. A view adds its keys with `ctx.keys`; they go when the view goes. Two keys after one another are written "g r".
 *
 * @typedef {{key: string, text: string, run: (event: KeyboardEvent) => void}} KeyBinding  `text` is what the help says about it
 */

const SECOND_KEY_WITHIN_MS = 1500;
/** @type {KeyBinding[]} */
const bindings = [];
let firstKey = "";
let firstKeyAt = 0;

/**
 * Add keys; a later one goes before an earlier one for the same key.
 * @param {KeyBinding[]} added
 * @returns {() => void} removes them
 */
export function addKeys(added) {
  bindings.push(...added);
  return () => {
    for (const binding of added) bindings.splice(bindings.indexOf(binding), 1);
  };
}

/** Every key that does something now, newest meaning only, in the order in which they were added. */
export function listKeys() {
  return bindings.filter((binding, at) => bindings.findLastIndex((other) => other.key === binding.key) === at);
}

export function startKeys() {
  document.addEventListener("keydown", onKey);
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (document.querySelector("dialog[open]") !== null) return;
  const isSecond = firstKey !== "" && event.timeStamp - firstKeyAt < SECOND_KEY_WITHIN_MS;
  const pair = isSecond ? find(`${firstKey} ${event.key}`) : undefined;
  const binding = pair ?? find(event.key);
  const starts = bindings.some((one) => one.key.startsWith(`${event.key} `));
  firstKey = starts && pair === undefined ? event.key : "";
  firstKeyAt = event.timeStamp;
  if (binding === undefined) return;
  event.preventDefault();
  binding.run(event);
}

/** @param {string} key */
function find(key) {
  return bindings.findLast((binding) => binding.key === key);
}

/** @param {EventTarget | null} target */
function isTyping(target) {
  if (!(target instanceof HTMLElement)) return false;
  if (target instanceof HTMLInputElement) return !["checkbox", "radio", "button", "range"].includes(target.type);
  return target.isContentEditable || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
}
