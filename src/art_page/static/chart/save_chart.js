/** Saves a chart as a picture (SVG, PNG) or as a table (CSV). A picture has white paper, since it goes into other documents. */
import { withOpacity } from "../lib/colours.js";
import { h, svg } from "../lib/dom.js";
import { isSparse, stackLines } from "./chart_data.js";

const INK = "#1a1d21";
const SOFT = "#59616d";
const GRID = "#dfe2e6";
const FONT = "system-ui, sans-serif";
const HEAD_PX = 44;
const PNG_SCALE = 2;
/** Marks of the first and the last step reach over the edge. */
const EDGE_PX = 6;

/**
 * A button that opens the three forms.
 * @param {{name: () => string, picture: () => SVGSVGElement | null, table: () => string}} chart  the picture is null while there are no values
 */
export function saveMenu({ name, picture, table }) {
  const menu = h("details", { class: "chart-save" }, h("summary", { title: "Save this chart" }, "Save"));
  /** @param {string} form @param {(file: string) => void} save */
  const item = (form, save) => h("button", { type: "button", "on:click": () => {
    save(`${name().replace(/[^\w.-]+/g, "-") || "chart"}.${form.toLowerCase()}`);
    menu.open = false;
  } }, form);
  const drawn = (/** @type {(picture: SVGSVGElement) => void} */ use) => {
    const made = picture();
    if (made) use(made);
  };
  menu.append(h("div", { class: "row" },
    item("PNG", (file) => drawn((made) => void savePng(made, file))),
    item("SVG", (file) => drawn((made) => saveFile(new Blob([svgText(made)], { type: "image/svg+xml" }), file))),
    item("CSV", (file) => saveFile(new Blob([table()], { type: "text/csv" }), file))));
  return menu;
}

/**
 * One row for each point of each line.
 * @param {{lines: import("./chart_data.js").Line[], axis?: {word: string}}} options
 */
export function chartCsv({ lines, axis }) {
  const rows = lines.flatMap((line) => line.steps.map((step, at) => [line.label, step, line.dots?.[at] ?? line.mean[at], line.mean[at], line.low?.[at], line.high?.[at]]));
  return [["curve", axis?.word ?? "step", "value", "drawn", "low", "high"], ...rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
}

/** @param {string | number | null | undefined} value */
function csvCell(value) {
  const text = String(value ?? "");
  const plain = typeof value === "string" && /^[=+\-@\t]/.test(text) ? `'${text}` : text; // no formula in a spreadsheet
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll("\"", "\"\"")}"` : plain;
}

/**
 * @param {UPlot} plot
 * @param {import("../lib/chart.js").ChartOptions} options
 */
export function chartSvg(plot, options) {
  const { title, lines, axis, stacked } = options;
  const ratio = devicePixelRatio;
  const [left, top, width, height] = [plot.bbox.left / ratio, HEAD_PX + plot.bbox.top / ratio, plot.bbox.width / ratio, plot.bbox.height / ratio];
  const x = (/** @type {number} */ value) => left + plot.valToPos(value, "x");
  const y = (/** @type {number} */ value) => top + plot.valToPos(value, "y");
  const [across, up] = /** @type {any} */ (plot).axes;
  /** @param {any} one an axis, with the ticks that uPlot drew last @returns {[number, string][]} */
  const ticks = (one) => (one._splits ?? []).map((/** @type {number} */ value, /** @type {number} */ at) => [value, one._values?.[at]]).filter((/** @type {any[]} */ [value, text]) => value !== null && text !== null && text !== "");
  let place = left;
  const keys = lines.map((line) => {
    const key = svg("g", null, svg("line", { x1: place, x2: place + 16, y1: 30, y2: 30, stroke: line.colour, "stroke-width": stacked ? 8 : 2, "stroke-dasharray": line.dash?.join(" ") || null }), svg("text", { x: place + 20, y: 34, "font-size": 11, fill: SOFT }, line.label));
    place += 36 + line.label.length * 6.2;
    return key;
  });
  return svg("svg", { xmlns: "http://www.w3.org/2000/svg", width: plot.width, height: HEAD_PX + plot.height + 16, "font-family": FONT },
    svg("rect", { width: "100%", height: "100%", fill: "#ffffff" }),
    svg("text", { x: left, y: 16, "font-size": 13, "font-weight": 600, fill: INK }, title), keys,
    ticks(up).map(([value, text]) => svg("g", null, svg("line", { x1: left, x2: left + width, y1: y(value), y2: y(value), stroke: GRID }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", "font-size": 11, fill: SOFT }, text))),
    ticks(across).map(([value, text]) => svg("text", { x: x(value), y: top + height + 18, "text-anchor": "middle", "font-size": 11, fill: SOFT }, text)),
    svg("text", { x: left + width, y: top + height + 32, "text-anchor": "end", "font-size": 11, fill: SOFT }, axis?.word ?? "step"),
    svg("svg", { x: left - EDGE_PX, y: top, width: width + 2 * EDGE_PX, height, viewBox: `${left - EDGE_PX} ${top} ${width + 2 * EDGE_PX} ${height}`, overflow: "hidden" }, stacked ? areas(lines, x, y) : lines.flatMap((line) => curve(line, x, y))));
}

/** @param {import("./chart_data.js").Line[]} lines @param {(value: number) => number} x @param {(value: number) => number} y */
function areas(lines, x, y) {
  const { steps, tops } = stackLines(lines);
  return lines.map((line, at) => {
    const below = at === 0 ? steps.map(() => 0) : tops[at - 1];
    const edge = [...steps.map((step, place) => [step, tops[at][place]]), ...steps.map((step, place) => [step, below[place]]).reverse()];
    return svg("polygon", { points: edge.map(([step, value]) => `${x(step)},${y(value)}`).join(" "), fill: withOpacity(line.colour, 0.75) });
  });
}

/** @param {import("./chart_data.js").Line} line @param {(value: number) => number} x @param {(value: number) => number} y */
function curve(line, x, y) {
  const known = line.steps.map((_, at) => at).filter((at) => line.mean[at] !== null);
  const at = (/** @type {number} */ place, /** @type {number | null | undefined} */ value) => `${x(line.steps[place])},${y(/** @type {number} */ (value))}`;
  const banded = known.filter((place) => typeof line.low?.[place] === "number" && typeof line.high?.[place] === "number");
  const sparse = isSparse(line);
  const interval = sparse
    ? banded.map((place) => svg("line", { x1: x(line.steps[place]), x2: x(line.steps[place]), y1: y(/** @type {any} */ (line.low)[place]), y2: y(/** @type {any} */ (line.high)[place]), stroke: line.colour, "stroke-width": 1.5 }))
    : [svg("polygon", { points: [...banded.map((place) => at(place, line.low?.[place])), ...banded.map((place) => at(place, line.high?.[place])).reverse()].join(" "), fill: withOpacity(line.colour, 0.18) })];
  return [
    ...interval,
    ...(line.dots ?? []).flatMap((value, place) => (value === null ? [] : [svg("circle", { cx: x(line.steps[place]), cy: y(value), r: 2, fill: withOpacity(line.colour, 0.35) })])),
    svg("polyline", { points: known.map((place) => at(place, line.mean[place])).join(" "), fill: "none", stroke: line.colour, "stroke-width": sparse ? 1 : 2, "stroke-dasharray": (sparse ? [2, 4] : (line.dash ?? [])).join(" ") || null }),
    ...(sparse || known.length < 2 ? known.map((place) => svg("circle", { cx: x(line.steps[place]), cy: y(/** @type {number} */ (line.mean[place])), r: 3.5, fill: line.colour })) : []),
  ];
}

/** @param {SVGElement} picture */
function svgText(picture) {
  return new XMLSerializer().serializeToString(picture);
}

/**
 * @param {SVGSVGElement} picture
 * @param {string} name
 */
async function savePng(picture, name) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(picture))}`;
  await image.decode();
  const canvas = h("canvas", { width: image.width * PNG_SCALE, height: image.height * PNG_SCALE });
  /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")).drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => blob && saveFile(blob, name), "image/png");
}

/**
 * @param {Blob} content
 * @param {string} name
 */
function saveFile(content, name) {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(content);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
