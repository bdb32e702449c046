// What classic scripts put into the page before its modules run.
import type uPlotClass from "uplot";

declare global {
  /** vendor/uPlot.iife.min.js */
  const uPlot: typeof uPlotClass;
  type UPlot = uPlotClass;
  type UPlotOptions = uPlotClass.Options;
}
