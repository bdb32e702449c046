/**
 * A table of any length: only the rows that can be seen are loaded and drawn.
 *
 * @typedef {object} Column
 * @property {string} key
 * @property {string} title
 * @property {(row: any) => import("./dom.js").Child} cell
 * @property {string} [sort]  what `load` gets to sort by this column; a column without it cannot be sorted
 * @property {boolean} [number]  aligned to the right; its first sort is descending
 * @property {number} [width]  px; columns without a width share what is left
 * @property {string} [hint]  what the column means
 * @property {(row: any) => string | null} [cellHint]  the full text of a cell that may be cut
 *
 * @typedef {{sort: string | null, descending: boolean}} Order
 *
 * @typedef {object} TableOptions
 * @property {string} label  what the table holds, for screen readers
 * @property {Column[]} columns
 * @property {(offset: number, limit: number, order: Order) => Promise<{rows: any[], total: number}>} load
 * @property {(row: any) => string | null} [rowHref]  address that the row opens
 * @property {Order} [order]
 * @property {(order: Order) => void} [onOrder]  the reader chose another order, for example to keep it in the address
 * @property {(total: number) => void} [onTotal]
 * @property {() => import("./dom.js").Child} [whenEmpty]
 * @property {number} [maxHeight]  px; the table scrolls within it. The height of the window by default.
 * @property {AbortSignal} signal
 *
 * @typedef {{element: HTMLElement, reload: () => Promise<void>, refresh: () => Promise<void>, move: (rows: number) => void, selected: () => any}} Table
 */
import { h, replace, setStyle } from "./dom.js";
import { failed } from "./states.js";

const ROW_PX = 28;
const PAGE_ROWS = 100;
const SPARE_ROWS = 8;
const MAX_PAGES = 12;

/**
 * @param {TableOptions} options
 * @returns {Table}
 */
export function makeTable(options) {
  const table = new RowTable(options);
  return {
    element: table.element,
    reload: () => table.reload(),
    refresh: () => table.refresh(),
    move: (rows) => table.move(rows),
    selected: () => table.rowAt(table.selectedIndex),
  };
}

class RowTable {
  /** @param {TableOptions} options */
  constructor(options) {
    this.options = options;
    this.order = options.order ?? { sort: null, descending: false };
    /** @type {Map<number, any[]>} rows by number of the page */
    this.pages = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
    this.version = 0;
    this.total = 0;
    this.selectedIndex = -1;
    this.waitsForFocus = false;
    this.heads = options.columns.map((column) => this.makeHead(column));
    this.body = h("tbody");
    this.grid = h("table", { role: "grid", "aria-label": options.label, "aria-readonly": true },
      h("colgroup", null, options.columns.map((column) => h("col", { style: { width: column.width ? `${column.width}px` : null } }))),
      h("thead", null, h("tr", { "aria-rowindex": 1 }, this.heads)), this.body);
    setStyle(this.grid, { "min-width": `${options.columns.reduce((sum, column) => sum + (column.width ?? 160), 0)}px` });
    this.element = h("div", { class: "table", "on:scroll": () => this.draw(), tabindex: 0, role: "region", "aria-label": options.label }, this.grid);
    setStyle(this.element, { "max-height": options.maxHeight ? `${options.maxHeight}px` : "calc(100vh - 168px)" });
    this.body.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.showOrder();
  }

  /** @param {Column} column */
  makeHead(column) {
    const title = column.sort === undefined ? column.title : h("button", { type: "button", "on:click": () => this.sortBy(column) }, column.title, h("span", { class: "arrow", "aria-hidden": true }));
    return h("th", { scope: "col", class: column.number ? "number" : null, title: column.hint }, title);
  }

  /** @param {Column} column */
  sortBy(column) {
    const isSame = this.order.sort === column.sort;
    this.order = { sort: column.sort ?? null, descending: isSame ? !this.order.descending : column.number === true };
    this.showOrder();
    this.options.onOrder?.(this.order);
    this.reload();
  }

  showOrder() {
    this.options.columns.forEach((column, at) => {
      const isSorted = column.sort !== undefined && column.sort === this.order.sort;
      const arrow = this.heads[at].querySelector(".arrow");
      if (arrow) arrow.textContent = isSorted ? (this.order.descending ? " ↓" : " ↑") : "";
      if (isSorted) this.heads[at].setAttribute("aria-sort", this.order.descending ? "descending" : "ascending");
      else this.heads[at].removeAttribute("aria-sort");
    });
  }

  /** Forget all rows and start at the top: the order or a filter has changed. */
  async reload() {
    this.selectedIndex = -1;
    this.element.scrollTop = 0;
    await this.refresh();
  }

  /** Load what can be seen once more, in place: the data has grown. */
  async refresh() {
    this.version += 1;
    this.asked.clear();
    const first = this.firstRow();
    const [from, to] = [Math.floor(first / PAGE_ROWS), Math.floor((first + this.numShown()) / PAGE_ROWS)];
    const wanted = from === to ? [from] : [from, to];
    await Promise.all(wanted.map((page) => this.loadPage(page)));
  }

  /** @param {number} page */
  async loadPage(page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const version = this.version;
    try {
      const answer = await this.options.load(page * PAGE_ROWS, PAGE_ROWS, this.order);
      if (this.options.signal.aborted || version !== this.version) return;
      for (const kept of this.pages.keys()) if (!this.asked.has(kept) || this.pages.size > MAX_PAGES) this.pages.delete(kept);
      this.pages.set(page, answer.rows);
      this.setTotal(answer.total);
      this.draw();
    } catch (error) {
      if (this.options.signal.aborted || version !== this.version) return;
      this.asked.delete(page);
      if (this.pages.size > 0) throw error;
      replace(this.body, h("tr", { class: "filler" }, h("td", { colspan: this.options.columns.length }, failed(error, () => this.reload()))));
    }
  }

  /** @param {number} total */
  setTotal(total) {
    this.total = total;
    this.grid.setAttribute("aria-rowcount", String(total + 1));
    this.options.onTotal?.(total);
  }

  firstRow() {
    return Math.max(0, Math.floor(this.element.scrollTop / ROW_PX) - SPARE_ROWS);
  }

  numShown() {
    return Math.ceil((this.element.clientHeight || innerHeight) / ROW_PX) + 2 * SPARE_ROWS;
  }

  /** @param {number} index */
  rowAt(index) {
    return this.pages.get(Math.floor(index / PAGE_ROWS))?.[index % PAGE_ROWS];
  }

  draw() {
    if (this.total === 0) {
      if (this.asked.size > 0) replace(this.body, h("tr", { class: "filler" }, h("td", { colspan: this.options.columns.length }, this.options.whenEmpty?.() ?? null)));
      return;
    }
    const first = Math.min(this.firstRow(), Math.max(0, this.total - 1));
    const last = Math.min(this.total, first + this.numShown());
    const focused = this.body.contains(document.activeElement);
    const rows = [];
    for (let index = first; index < last; index++) rows.push(this.drawRow(index));
    replace(this.body, filler(first, this.options.columns.length), rows, filler(this.total - last, this.options.columns.length));
    if (focused || this.waitsForFocus) this.focusSelected();
  }

  /** @param {number} index */
  drawRow(index) {
    const row = this.rowAt(index);
    const { columns, rowHref } = this.options;
    if (row === undefined) {
      this.loadPage(Math.floor(index / PAGE_ROWS));
      return h("tr", { "aria-rowindex": index + 2 }, columns.map((_, at) => h("td", { class: "soft" }, at === 0 ? "..." : null)));
    }
    const href = rowHref?.(row) ?? null;
    const isSelected = index === this.selectedIndex;
    const cells = columns.map((column, at) => {
      const content = column.cell(row);
      const held = at === 0 && href ? h("a", { href, tabindex: isSelected ? 0 : -1 }, content) : content;
      return h("td", { class: column.number ? "number" : null, title: column.cellHint?.(row) }, held);
    });
    return h("tr", { "aria-rowindex": index + 2, "aria-selected": isSelected ? "true" : null, "data-index": index, "data-href": href, class: href ? "has-link" : null, tabindex: isSelected ? 0 : -1 }, cells);
  }

  /** @param {Event} event */
  onClick(event) {
    const target = /** @type {Element} */ (event.target);
    const row = /** @type {HTMLElement | null} */ (target.closest("tr[data-index]"));
    if (row === null || target.closest("a, button, input") !== null || String(getSelection()) !== "") return;
    if (row.dataset.href) location.hash = row.dataset.href;
  }

  /**
   * Select the row this many rows further down, and bring it into sight.
   * @param {number} rows
   */
  move(rows) {
    if (this.total === 0) return;
    this.selectedIndex = Math.max(0, Math.min(this.total - 1, this.selectedIndex < 0 ? 0 : this.selectedIndex + rows));
    const top = this.selectedIndex * ROW_PX;
    const seen = this.element.clientHeight - 2 * ROW_PX;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top > this.element.scrollTop + seen) this.element.scrollTop = top - seen;
    this.draw();
    this.focusSelected();
  }

  /** A row that is not loaded yet gets the focus when it is. */
  focusSelected() {
    const row = /** @type {HTMLElement | null} */ (this.body.querySelector("[aria-selected=true]"));
    this.waitsForFocus = row === null;
    (row?.querySelector("a") ?? row)?.focus({ preventScroll: true });
  }
}

/**
 * @param {number} rows
 * @param {number} columns
 */
function filler(rows, columns) {
  return rows <= 0 ? null : h("tr", { class: "filler", "aria-hidden": true }, h("td", { colspan: columns, style: { height: `${rows * ROW_PX}px` } }));
}
