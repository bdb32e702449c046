/** What uPlot needs to know about the lines of a chart, in the order in which chart.js gives it their values. */
import { withOpacity } from "../lib/colours.js";

const BAND_OPACITY = 0.18;
const AREA_OPACITY = 0.75;
const DOT_OPACITY = 0.35;

/**
 * Each line: its band (high, low), its dots, its mean.
 * @param {import("./chart_data.js").Line[]} lines
 * @returns {{series: any[], bands: any[]}}
 */
export function lineSeries(lines) {
  /** @type {any[]} */
  const series = [];
  /** @type {any[]} */
  const bands = [];
  for (const line of lines) {
    if (line.low) {
      series.push(boundSeries(), boundSeries());
      bands.push({ series: [series.length - 1, series.length], fill: withOpacity(line.colour, BAND_OPACITY), dir: 0 });
    }
    if (line.dots) series.push(dotSeries(line.colour));
    const hasFew = line.steps.length < 2;
    series.push({ label: line.label, stroke: line.colour, width: 2, dash: line.dash, points: { show: hasFew, size: 5, fill: line.colour } });
  }
  return { series, bands };
}

/**
 * Areas: the topmost first, each filled down to the next.
 * @param {import("./chart_data.js").Line[]} lines
 * @returns {{series: any[], bands: any[]}}
 */
export function stackedSeries(lines) {
  const series = lines.toReversed().map((line) => ({ label: line.label, stroke: line.colour, width: 1, fill: withOpacity(line.colour, AREA_OPACITY), points: { show: line.steps.length < 2, size: 5 } }));
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
