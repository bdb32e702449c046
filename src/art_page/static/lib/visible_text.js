// Makes every character of a hostile text harmless and visible: controls, ANSI codes, marks that change the direction
// of text, invisible characters and broken surrogates become short marks. What is left can be a text node.

/** @typedef {{ text: string, isMark: boolean }} Piece  a run of ordinary text, or one mark */

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff"
  + "\\ufff9-\\ufffb]|[\\u{e0000}-\\u{e007f}]|\\p{Surrogate}",
  "gu",
);
const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const NAMES = new Map([
  [0x7f, "‹DEL›"], [0x85, "‹NEL›"], [0xad, "‹SHY›"], [0x61c, "‹ALM›"], [0x200b, "‹ZWSP›"], [0x200e, "‹LRM›"], [0x200f, "‹RLM›"],
  [0x2028, "‹LS›"], [0x2029, "‹PS›"], [0x202a, "‹LRE›"], [0x202b, "‹RLE›"], [0x202c, "‹PDF›"], [0x202d, "‹LRO›"],
  [0x202e, "‹RLO›"], [0x2060, "‹WJ›"], [0x2066, "‹LRI›"], [0x2067, "‹RLI›"], [0x2068, "‹FSI›"], [0x2069, "‹PDI›"],
  [0xfeff, "‹BOM›"],
]);

/** @param {string} character @returns {string} the mark of one hidden character: ‹ESC›, ‹RLO›, ‹U+D800› */
export function markOf(character) {
  const code = character.codePointAt(0) ?? 0;
  if (code < CONTROLS.length) return `‹${CONTROLS[code]}›`;
  return NAMES.get(code) ?? `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/** Replaces each hidden character by its mark. Line ends of Windows become plain ones.
 * @param {string} text @returns {string} */
export function visibleText(text) {
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, markOf);
}

/** Splits a text into ordinary runs and marks, so that marks can be drawn in another colour.
 * @param {string} text @returns {Piece[]} */
export function visiblePieces(text) {
  const source = text.replace(/\r\n/g, "\n");
  /** @type {Piece[]} */
  const pieces = [];
  let end = 0;
  for (const match of source.matchAll(HIDDEN)) {
    if (match.index > end) pieces.push({ text: source.slice(end, match.index), isMark: false });
    const last = pieces[pieces.length - 1];
    if (last !== undefined && last.isMark && match.index === end) last.text += markOf(match[0]);
    else pieces.push({ text: markOf(match[0]), isMark: true });
    end = match.index + match[0].length;
  }
  if (end < source.length) pieces.push({ text: source.slice(end), isMark: false });
  return pieces;
}

/** The arguments of a tool call as a person reads them: JSON with two spaces of indent where it parses, else as they are.
 * Numbers that JavaScript would change (too long, or with an exponent) keep the text as it is.
 * @param {string} text @returns {{ text: string, isJson: boolean }} */
export function prettyArguments(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return { text, isJson: false };
  }
  const pretty = JSON.stringify(value, null, 2);
  const bare = (/** @type {string} */ json) => json.replace(/\s+/g, "");
  const isSame = /\\u|\\\//i.test(text) || bare(JSON.stringify(value)) === bare(text);
  return { text: isSame ? pretty : text, isJson: true };
}

/** The size of a text in words: "412 characters, 12 lines".
 * @param {string} text @returns {string} */
export function sizeOfText(text) {
  const lines = text.split("\n").length;
  const characters = `${text.length.toLocaleString("en-US")} character${text.length === 1 ? "" : "s"}`;
  return lines > 1 ? `${characters}, ${lines.toLocaleString("en-US")} lines` : characters;
}

/** The first part of a long text, cut at a line end where one is near, and never inside a surrogate pair.
 * @param {string} text @param {number} limit characters @returns {string} */
export function beginningOf(text, limit) {
  if (text.length <= limit) return text;
  const line = text.lastIndexOf("\n", limit);
  const end = line > limit / 2 ? line : limit;
  const code = text.charCodeAt(end - 1);
  return text.slice(0, code >= 0xd800 && code < 0xdc00 ? end - 1 : end);
}
