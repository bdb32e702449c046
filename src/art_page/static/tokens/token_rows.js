// Lays the tokens of a path out in rows of a monospaced font, so that only the rows in view have to exist on the page.

import { visibleText } from "../lib/visible_text.js";

/** @typedef {{ texts: (string|null)[], ids: (number|null)[], starts: Set<number> }} RowTokens
 *   `starts`: tokens that begin a new row because the speaker changes */
/** @typedef {{ token: number, text: string, continues: boolean }} Segment  a token, or a part of one, in a row */

const NO_TEXT = "▫";
const PLAIN = /^[\x20-\x7e]+$/;

/** The text of a token as it is drawn. ▫ is a token that has only a part of the bytes of the next character. Special tokens and tokens without text are never empty.
 * @param {string|null} text @param {number|null} id @param {boolean} whitespace whether spaces and line ends are marks
 * @returns {string[]} lines: all but the last end with a line end of the token */
export function drawnLines(text, id, whitespace) {
  if (text === null) return [`‹${id ?? "?"}›`];
  if (text === "") return [NO_TEXT];
  if (PLAIN.test(text)) return [whitespace ? text.replaceAll(" ", "·") : text];
  const lines = (whitespace ? text : text.replace(/\r\n/g, "\n")).split("\n");
  return lines.map((line, index) => {
    let drawn = visibleText(line.replace(/\r$/, "‹CR›"));
    drawn = whitespace ? drawn.replace(/ /g, "·").replace(/\t/g, "⇥   ") : drawn.replace(/\t/g, "    ");
    if (index < lines.length - 1) return drawn + (whitespace ? "⏎" : " ");
    return drawn;
  });
}

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u;

/** The columns that a text takes in a monospaced font: two for a wide character, none for a combining one.
 * @param {string} text @returns {number} */
export function numColumns(text) {
  if (PLAIN.test(text)) return text.length;
  let columns = 0;
  for (const character of text) columns += WIDE.test(character) ? 2 : /\p{Mark}/u.test(character) ? 0 : 1;
  return columns;
}

/** The rows of a path, each by the place of its first segment; segments lie in parallel arrays.
 * A token moves to the next row if it does not fit, and is cut if it is wider than a row. */
export class TokenRows {
  /** @param {number} columns width of a row @param {boolean} whitespace */
  constructor(columns, whitespace) {
    this.columns = Math.max(8, columns);
    this.whitespace = whitespace;
    /** @type {number[]} */ this.rowSegments = [0];
    /** @type {number[]} */ this.segmentTokens = [];
    /** @type {string[]} */ this.segmentTexts = [];
    /** @type {number[]} */ this.tokenRow = [];
    this.used = 0;
  }

  get numRows() {
    return this.rowSegments.length - (this.segmentTokens.length === this.rowSegments[this.rowSegments.length - 1] ? 1 : 0);
  }

  /** Adds the tokens from `first` on. @param {RowTokens} tokens @param {number} first */
  add(tokens, first) {
    for (let token = first; token < tokens.ids.length; token += 1) {
      if (tokens.starts.has(token)) this.#endRow();
      const lines = drawnLines(tokens.texts[token], tokens.ids[token], this.whitespace);
      lines.forEach((line, index) => {
        if (line !== "" || lines.length === 1) this.#place(token, line);
        if (index < lines.length - 1) this.#endRow();
      });
    }
  }

  #endRow() {
    if (this.rowSegments[this.rowSegments.length - 1] < this.segmentTokens.length) this.rowSegments.push(this.segmentTokens.length);
    this.used = 0;
  }

  /** @param {number} token @param {string} text */
  #place(token, text) {
    const width = numColumns(text);
    if (this.used > 0 && this.used + width > this.columns) this.#endRow();
    if (width <= this.columns) {
      this.#push(token, text, width);
      return;
    }
    const characters = [...text];
    for (let start = 0; start < characters.length; ) {
      let end = start;
      let columns = 0;
      while (end < characters.length && (end === start || columns + numColumns(characters[end]) <= this.columns)) {
        columns += numColumns(characters[end]);
        end += 1;
      }
      if (start > 0) this.#endRow();
      this.#push(token, characters.slice(start, end).join(""), columns);
      start = end;
    }
  }

  /** @param {number} token @param {string} text @param {number} width */
  #push(token, text, width) {
    if (this.tokenRow[token] === undefined) this.tokenRow[token] = this.rowSegments.length - 1;
    this.segmentTokens.push(token);
    this.segmentTexts.push(text);
    this.used += width;
  }

  /** @param {number} row @returns {Segment[]} */
  segments(row) {
    const end = this.rowSegments[row + 1] ?? this.segmentTokens.length;
    const segments = [];
    for (let index = this.rowSegments[row]; index < end; index += 1) {
      const token = this.segmentTokens[index];
      segments.push({ token, text: this.segmentTexts[index], continues: index > 0 && this.segmentTokens[index - 1] === token });
    }
    return segments;
  }

  /** @param {number} token @returns {number} the row in which a token begins */
  rowOf(token) {
    return this.tokenRow[token] ?? 0;
  }

  /** The token in `row` that lies at or before a column, for moving up and down.
   * @param {number} row @param {number} column @returns {number} */
  tokenAt(row, column) {
    const segments = this.segments(Math.min(Math.max(row, 0), this.numRows - 1));
    let used = 0;
    let token = segments[0].token;
    for (const segment of segments) {
      if (used > column) break;
      token = segment.token;
      used += numColumns(segment.text);
    }
    return token;
  }

  /** @param {number} token @returns {number} the column at which a token begins in its row */
  columnOf(token) {
    let used = 0;
    for (const segment of this.segments(this.rowOf(token))) {
      if (segment.token === token) return used;
      used += numColumns(segment.text);
    }
    return used;
  }
}

/** The rows to keep on the page: those in view and `spare` more on each side.
 * @param {{ top: number, height: number, rowHeight: number, numRows: number, spare: number }} view pixels
 * @returns {{ first: number, end: number }} */
export function rowsInView({ top, height, rowHeight, numRows, spare }) {
  const first = Math.max(0, Math.floor(top / rowHeight) - spare);
  const end = Math.min(numRows, Math.ceil((top + height) / rowHeight) + spare);
  return { first: Math.min(first, Math.max(0, numRows)), end: Math.max(end, 0) };
}
