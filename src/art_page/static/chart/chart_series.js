/** What uPlot needs to know about the lines of a chart, in the order in which chart.js gives it their values. */
import { withOpacity } from "../lib/colours.js";
import { isSparse } from "./chart_data.js";

const BAND_OPACITY = 0.18;
const AREA_OPACITY = 0.75;
const DOT_OPACITY = 0.35;

const SPARSE = { width: 1, dash: [2, 4], points: { show: true, size: 7 } };

/** @param {import("./chart_data.js").Line} line */
function hasBand(line) {
  return Boolean(line.low) && !isSparse(line);
}

/**
 * Draw the intervals of lines with few points as error bars.
 * @param {UPlot} plot
 * @param {import("./chart_data.js").Line[]} lines
 */
export function drawErrorBars(plot, lines) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - bbox.width / 50, bbox.top, bbox.width * 1.04, bbox.height);
  ctx.clip();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const line of lines.filter(isSparse)) {
    ctx.strokeStyle = line.colour;
    ctx.beginPath();
    line.steps.forEach((step, at) => {
      const [low, high] = [line.low?.[at] ?? null, line.high?.[at] ?? null];
      if (low === null || high === null) return;
      const x = plot.valToPos(step, "x", true);
      for (const end of [low, high]) {
        ctx.moveTo(x - 4 * devicePixelRatio, plot.valToPos(end, "y", true));
        ctx.lineTo(x + 4 * devicePixelRatio, plot.valToPos(end, "y", true));
      }
      ctx.moveTo(x, plot.valToPos(low, "y", true));
      ctx.lineTo(x, plot.valToPos(high, "y", true));
    });
    ctx.stroke();
  }
  ctx.restore();
}

/**
 * All bands first, then all dots, then all lines, so that no band lies over a line.
 * @param {import("./chart_data.js").Line[]} lines
 * @returns {{series: any[], bands: any[]}}
 */
export function lineSeries(lines) {
  const banded = lines.filter(hasBand);
  const bands = banded.map((line, at) => ({ series: [2 * at + 1, 2 * at + 2], fill: withOpacity(line.colour, BAND_OPACITY), dir: 0 }));
  const series = [
    ...banded.flatMap(() => [boundSeries(), boundSeries()]),
    ...lines.filter((line) => line.dots).map((line) => dotSeries(line.colour)),
    ...lines.map((line) => ({ label: line.label, stroke: line.colour, ...(isSparse(line) ? { ...SPARSE, points: { ...SPARSE.points, fill: line.colour } } : { width: 2, dash: line.dash, points: { show: line.steps.length < 2, size: 5, fill: line.colour } }) })),
  ];
  return { series, bands };
}

/**
 * Lists of values in the order of `lineSeries`.
 * @template Values
 * @param {import("./chart_data.js").Line[]} lines
 * @param {(line: import("./chart_data.js").Line, values: import("./chart_data.js").Values | null | undefined) => Values} convert
 * @returns {Values[]}
 */
export function lineValues(lines, convert) {
  return [
    ...lines.filter(hasBand).flatMap((line) => [convert(line, line.high), convert(line, line.low)]),
    ...lines.filter((line) => line.dots).map((line) => convert(line, line.dots)),
    ...lines.map((line) => convert(line, line.mean)),
  ];
}

/**
 * Areas: the topmost first, each filled down to the next.
 * @param {import("./chart_data.js").Line[]} lines
 * @returns {{series: any[], bands: any[]}}
 */
export function stackedSeries(lines) {
  const series = lines.toReversed().map((line) => ({ label: line.label, stroke: line.colour, width: 1, fill: withOpacity(line.colour, AREA_OPACITY), points: { show: line.steps.length < 2, size: 5, fill: line.colour } }));
  const bands = lines.slice(1).map((_, at) => ({ series: [at + 1, at + 2], dir: 0 }));
  return { series, bands };
}

function boundSeries() {
  return { stroke: "transparent", width: 0, points: { show: false } };
}

/** @param {string} colour */
function dotSeries(colour) {
  return { stroke: "transparent", width: 0, paths: () => null, points: { show: true, size: 4, width: 0, stroke: "transparent", fill: withOpacity(colour, DOT_OPACITY) } };
}
