/**
 * A chart over steps on uPlot: lines with bands and dots, or stacked areas; findings as pins; a cursor that charts share.
 *
 * @typedef {import("../chart/chart_data.js").Line} Line
 * @typedef {{step: number, text: string, at?: number}} Pin  `at`: place on the axis, where it does not count steps
 * @typedef {{first: number, last: number}} Zoom
 *
 * @typedef {object} ChartOptions
 * @property {string} title
 * @property {string | null} [hint]  what the numbers mean
 * @property {string | null} [titleHref]  the title is a link
 * @property {Line[]} lines
 * @property {boolean} [stacked]  areas on top of each other
 * @property {Pin[]} [pins]
 * @property {(pin: Pin) => void} [onPin]
 * @property {number | null} [around]  the axis is symmetric about this value
 * @property {boolean} [log]
 * @property {number} [height]  px of the plot
 * @property {Zoom | null} [zoom]
 * @property {(zoom: Zoom | null) => void} [onZoom]  the reader dragged over steps, or reset the zoom
 * @property {(step: number) => void} [onStep]  the reader clicked on a step
 * @property {string} [cursor]  charts with the same name share a cursor
 * @property {(value: number | null) => string} [format]
 * @property {import("../curves/axes.js").AxisWords} [axis]  what the horizontal axis counts; without it, steps
 * @property {import("./dom.js").Child} [tools]  further controls beside the menu that saves the chart
 *
 * @typedef {{element: HTMLElement, update: (changes: Partial<ChartOptions>) => void, light: (step: number | null) => void, destroy: () => void}} Chart
 */
import { axisRange, extent, isSparse, shownRange, stackLines, steadyRange, unionSteps, valueAt, valuesAt } from "../chart/chart_data.js";
import { drawErrorBars, lineSeries, lineValues, stackedSeries } from "../chart/chart_series.js";
import { h, replace, setStyle } from "./dom.js";
import { formatFixed, formatNumber, UNKNOWN } from "./format.js";
import { drawPins } from "../chart/pins.js";
import { chartCsv, chartSvg, saveMenu } from "../chart/save_chart.js";
import { onThemeChange, themeColour } from "./theme.js";
import { visibleText } from "./visible_text.js";

const AXIS_FONT = "12px system-ui, -apple-system, \"Segoe UI\", Roboto, sans-serif";
const CLICK_PX = 3;

/**
 * @param {ChartOptions} options
 * @returns {Chart}
 */
export function chart(options) {
  const drawn = new StepChart(options);
  return { element: drawn.element, update: (changes) => drawn.update(changes), light: (step) => drawn.light(step), destroy: () => drawn.destroy() };
}

class StepChart {
  /** @param {ChartOptions} options */
  constructor(options) {
    this.options = options;
    this.abort = new AbortController();
    /** @type {[number, number] | null} */
    this.range = null;
    /** @type {UPlot | null} */
    this.plot = null;
    /** @type {number | null} */
    this.litStep = null;
    /** @type {HTMLElement[]} */
    this.values = [];
    this.head = h("div", { class: "chart-title" });
    this.place = h("div", { class: "chart-plot", tabindex: 0, role: "group", "aria-roledescription": "chart", "on:keydown": (/** @type {KeyboardEvent} */ event) => this.onKey(event) });
    setStyle(this.place, { height: `${options.height ?? 176}px` });
    this.reset = h("button", { type: "button", class: "chart-reset", hidden: true, "on:click": () => this.zoomTo(null) }, "Reset zoom");
    const tools = h("div", { class: "chart-tools" }, options.tools, saveMenu({ name: () => this.options.title, picture: () => this.plot && chartSvg(this.plot, this.options), table: () => chartCsv(this.options) }));
    this.element = h("figure", { class: "chart" }, this.head, this.place, this.reset, tools);
    this.resizer = new ResizeObserver(() => this.resize());
    this.resizer.observe(this.place);
    onThemeChange(() => this.plot?.redraw(false), this.abort.signal);
    this.drawHead();
  }

  /** @param {Partial<ChartOptions>} changes */
  update(changes) {
    const before = this.shape();
    if (changes.log !== undefined && changes.log !== this.options.log) this.range = null;
    this.options = { ...this.options, ...changes };
    this.drawHead();
    if (this.plot === null || this.shape() !== before) this.make();
    else this.fill(this.plot);
  }

  /** What uPlot cannot change in place. */
  shape() {
    const { lines, stacked, log, axis } = this.options;
    return JSON.stringify([stacked, log, axis?.word, lines.length > 0, lines.map((line) => [line.label, line.colour, line.dash, Boolean(line.low), Boolean(line.dots), line.steps.length < 2, isSparse(line)])]);
  }

  drawHead() {
    const { title, titleHref, hint, lines } = this.options;
    this.values = lines.map(() => h("b"));
    replace(
      this.head,
      h("h3", { title: hint }, titleHref ? h("a", { href: titleHref }, title) : title),
      h("span", { class: "chart-legend" }, lines.map((line, at) => h("span", null, this.drawKey(line), line.label, " ", this.values[at]))),
    );
    this.showValues(this.plot?.cursor.idx ?? null);
    this.place.setAttribute("aria-label", this.describe());
  }

  /** @param {Line} line */
  drawKey(line) {
    const style = { "border-top-color": line.colour, "border-top-style": line.dash?.length ? "dashed" : "solid" };
    if (isSparse(line)) return h("span", { class: "chart-key is-mark", style: { background: line.colour } });
    return this.options.stacked ? h("span", { class: "chart-key is-area", style: { background: line.colour } }) : h("span", { class: "chart-key", style });
  }

  describe() {
    const { title, lines, format = formatNumber } = this.options;
    const parts = lines.filter((line) => line.steps.length > 0).map((line) => {
      const last = line.steps.length - 1;
      return `${line.label}: ${format(line.mean[0])} at ${this.placeText(line.steps[0])}, ${format(line.mean[last])} at ${this.placeText(line.steps[last])}`;
    });
    return `${title}. ${parts.join(". ") || "No values yet"}. Arrow keys read single steps.`;
  }

  /** A place on the horizontal axis in words: "step 3", "time 2.1 s".
   * @param {number | null} place
   */
  placeText(place) {
    const { axis } = this.options;
    return axis ? `${axis.word} ${axis.format(place)}` : `step ${place}`;
  }

  make() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.options.lines.some((line) => line.steps.length > 0)) {
      replace(this.place, h("p", { class: "chart-empty" }, "No values yet."));
      return;
    }
    replace(this.place);
    const width = Math.max(this.place.clientWidth, 80);
    this.range = steadyRange(this.range, this.wantedRange());
    this.plot = new uPlot(this.plotOptions(width), this.alignedData(), this.place);
    this.fill(this.plot);
  }

  /** @param {UPlot} plot */
  fill(plot) {
    const data = this.alignedData();
    this.range = steadyRange(this.range, this.wantedRange());
    plot.setData(data, false);
    const steps = /** @type {number[]} */ (data[0]);
    const zoom = this.options.zoom ?? null;
    const [first, last] = zoom ? [zoom.first, zoom.last] : [steps[0], steps[steps.length - 1]];
    plot.setScale("x", first === last ? { min: first - 0.5, max: last + 0.5 } : { min: first, max: last });
    this.reset.hidden = zoom === null;
    this.showValues(plot.cursor.idx ?? null);
  }

  /** Range of the values that the zoom shows; the whole curve's when nothing lies in it. */
  wantedRange() {
    const { lines, stacked, zoom, log, around } = this.options;
    if (stacked) return axisRange(...extent([...stackLines(lines).tops, [0]]));
    const values = lines.flatMap((line) => [line.mean, line.dots].map((list) => within(line.steps, list, zoom)));
    const bands = lines.flatMap((line) => [line.low, line.high].map((list) => within(line.steps, list, zoom)));
    const [low, high] = shownRange(values, bands, log);
    return axisRange(low, high, { around, log });
  }

  /** @returns {any} */
  alignedData() {
    const { lines, stacked, log } = this.options;
    if (stacked) {
      const { steps, tops } = stackLines(lines);
      return [steps, ...tops.toReversed()];
    }
    const steps = unionSteps(lines);
    return [steps, ...lineValues(lines, (line, values) => valuesAt(steps, line.steps, log ? onlyPositive(values ?? []) : (values ?? [])))];
  }

  /**
   * @param {number} width
   * @returns {UPlotOptions}
   */
  plotOptions(width) {
    const { lines, stacked, log, cursor, height = 176, format = formatNumber, axis: across } = this.options;
    const axis = { stroke: () => themeColour("--soft"), font: AXIS_FONT, ticks: { show: false }, grid: { stroke: () => themeColour("--line"), width: 1 } };
    const { series, bands } = stacked ? stackedSeries(lines) : lineSeries(lines);
    return {
      width,
      height,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: () => this.range ?? [0, 1] } },
      axes: [
        across ? { ...axis, size: 24, gap: 4, space: 72, grid: { show: false }, values: (_, splits) => splits.map((value) => across.format(value)) } : { ...axis, size: 24, gap: 4, space: 56, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: 52, gap: 4, space: 32, values: (_, splits, __, ___, step) => splits.map((value) => (value === null ? "" : tickText(value, log ? null : step, format))) },
      ],
      series: [{}, ...series],
      bands,
      cursor: {
        y: false,
        points: { size: 7, show: true },
        drag: { x: true, y: false, setScale: false, dist: CLICK_PX },
        sync: cursor ? { key: cursor, scales: ["x", null] } : undefined,
      },
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx ?? null)],
        setSelect: [(plot) => this.onSelect(plot)],
        draw: [(plot) => this.placePins(plot), (plot) => drawErrorBars(plot, this.options.stacked ? [] : this.options.lines)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.onClick(plot)), (plot) => plot.over.addEventListener("dblclick", () => this.zoomTo(null))],
      },
    };
  }

  /** @param {number | null} index  place of the step under the cursor; without one, the newest values that are shown */
  showValues(index) {
    const { lines, zoom, format = formatNumber } = this.options;
    const step = index === null ? null : (this.plot?.data[0][index] ?? null);
    lines.forEach((line, at) => {
      const value = valueAt(line.steps, line.mean, step ?? zoom?.last ?? Infinity);
      this.values[at].textContent = format(value) + (step === null ? "" : ` @ ${this.readPlace(valueAt(line.steps, line.steps, step))}`);
    });
  }

  /** @param {number | null} place */
  readPlace(place) {
    return place === null ? UNKNOWN : (this.options.axis?.format(place) ?? String(place));
  }

  /** @param {UPlot} plot */
  onSelect(plot) {
    const { left, width } = plot.select;
    if (width < CLICK_PX) return;
    const [first, last] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")].map((value) => (this.options.axis ? value : Math.round(value)));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (last > first) this.zoomTo({ first, last });
  }

  /** @param {UPlot} plot */
  onClick(plot) {
    const index = plot.cursor.idx;
    if (index !== null && index !== undefined && plot.select.width < CLICK_PX) this.options.onStep?.(/** @type {number} */ (plot.data[0][index]));
  }

  /** @param {Zoom | null} zoom */
  zoomTo(zoom) {
    this.range = null;
    this.options = { ...this.options, zoom };
    if (this.plot) this.fill(this.plot);
    this.options.onZoom?.(zoom);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const plot = this.plot;
    if (plot === null) return;
    const steps = /** @type {number[]} */ (plot.data[0]);
    const index = plot.cursor.idx ?? (move === 1 ? -1 : steps.length);
    if (event.key === "Enter") this.onClick(plot);
    if (move === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(steps.length - 1, index + move));
    plot.setCursor({ left: plot.valToPos(steps[next], "x"), top: 8 });
    const place = document.getElementById("announcer");
    if (place) place.textContent = visibleText(this.options.lines.map((line) => `${line.label} ${(this.options.format ?? formatNumber)(valueAt(line.steps, line.mean, steps[next]))}`).join(", ")) + ` at ${this.placeText(steps[next])}`;
  }

  /** @param {UPlot} plot */
  placePins(plot) {
    drawPins(plot, this.options.pins ?? [], this.litStep, (pin) => this.options.onPin?.(pin));
  }

  /** @param {number | null} step  light up the pins of this step */
  light(step) {
    this.litStep = step;
    if (this.plot) this.placePins(this.plot);
  }

  resize() {
    if (this.plot === null) this.make();
    else this.plot.setSize({ width: Math.max(this.place.clientWidth, 80), height: this.options.height ?? 176 });
  }

  destroy() {
    this.abort.abort();
    this.resizer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

/**
 * @param {number[]} steps
 * @param {import("../chart/chart_data.js").Values | null | undefined} values
 * @param {Zoom | null | undefined} zoom
 */
function within(steps, values, zoom) {
  if (!zoom || !values) return values;
  return values.filter((_, at) => steps[at] >= zoom.first && steps[at] <= zoom.last);
}

/** @param {import("../chart/chart_data.js").Values} values */
function onlyPositive(values) {
  return values.map((value) => (value !== null && value > 0 ? value : null));
}

/**
 * Numbers on an axis have as many decimals as the distance of its ticks.
 * @param {number} value
 * @param {number | null} step  between ticks
 * @param {(value: number | null) => string} format
 */
function tickText(value, step, format) {
  const decimals = step === null ? -1 : (String(step).split(".")[1] ?? "").length;
  return format === formatNumber && decimals > 0 && decimals < 5 ? formatFixed(value, decimals) : format(value);
}
