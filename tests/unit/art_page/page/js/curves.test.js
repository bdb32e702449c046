// Search of metrics, lines of panes, settings in the address, settings that differ.
import assert from "node:assert/strict";
import { test } from "node:test";
import { isSparse } from "../static/chart/chart_data.js";
import { lineSeries, lineValues } from "../static/chart/chart_series.js";
import { chartCsv } from "../static/chart/save_chart.js";
import { placesOn } from "../static/curves/axes.js";
import { readSettings } from "../static/curves/curve_settings.js";
import { histogramOf, withHistograms } from "../static/curves/histogram.js";
import { centreOf, coloursOf, formatOf, onAxis, sameOnSplits, toLine } from "../static/curves/lines.js";
import { mainPanes } from "../static/curves/main_panes.js";
import { bySection, nameMatcher } from "../static/curves/metric_search.js";
import { HELD_OUT_COLOUR, TRAIN_COLOUR } from "../static/lib/colours.js";
import { groupFindings, pinsOf } from "../static/parts/findings.js";
import { phaseSeconds } from "../static/parts/step_panel.js";
import { differingSettings, settingsTable } from "../static/parts/settings_table.js";
import { useFakeDom } from "./fake_dom.js";

useFakeDom();

const NAMES = ["train/reward", "val/reward", "loss/kl_to_sampler", "loss/kl_to_base", "offpolicy/ratio_p10", "offpolicy/ratio_p90", "x(y"];
const search = (text) => NAMES.filter(nameMatcher(text));

test("search by words, by a regular expression, and by text that is none", () => {
  assert.deepEqual(search(""), NAMES);
  assert.deepEqual(search("KL loss"), ["loss/kl_to_sampler", "loss/kl_to_base"]);
  assert.deepEqual(search("ratio_p(10|99)"), ["offpolicy/ratio_p10"]);
  assert.deepEqual(search("^val"), ["val/reward"]);
  assert.deepEqual(search("x("), ["x(y"]);
});

test("sections begin with results and end with what is not known", () => {
  const sections = bySection(["zebra/a", "loss/a", "train/b", "val/b", "plain"].map((name) => ({ name })));
  assert.deepEqual(sections.map(([section]) => section), ["val", "train", "loss", "other", "zebra"]);
});

test("held-out is found beside training, and training is blue", () => {
  const known = new Set(NAMES);
  assert.deepEqual(sameOnSplits("train/reward", ["train", "val"], known), ["train/reward", "val/reward"]);
  assert.deepEqual(sameOnSplits("loss/kl_to_base", ["train", "val"], known), ["loss/kl_to_base"]);
  assert.deepEqual(coloursOf(["train/reward", "val/reward"]), [TRAIN_COLOUR, HELD_OUT_COLOUR]);
  assert.deepEqual(coloursOf(["val/reward", "train/reward"]), [HELD_OUT_COLOUR, TRAIN_COLOUR]);
  assert.equal(new Set(coloursOf(["train/reward", "val/reward", "test/reward"])).size, 3);
});

test("values are written in the metric's unit", () => {
  assert.equal(formatOf("time/step_job_s")(2), "2 s");
  assert.equal(formatOf("time/step_s/gpu/rollouts")(2), "2 s");
  assert.equal(formatOf("throughput/train_tokens_per_s")(2000), "2,000");
  assert.equal(formatOf("throughput/peak_memory_bytes")(2e9), "2 GB");
  assert.equal(formatOf("loss/masked_share")(0.25), "25 %");
  assert.equal(formatOf("costs/train")(3), "$3.00");
  assert.equal(formatOf("mine", "s")(3), "3 s");
});

test("only ratios are drawn around 1", () => {
  assert.deepEqual(["offpolicy/ratio_p90", "offpolicy/ratio_mean", "offpolicy/ratio_outside_share", "train/reward"].map(centreOf), [1, 1, null, null]);
});

test("settings of curves come from the address, and nonsense is left out", () => {
  const settings = readSettings(new URLSearchParams("metric=a&metric=b&smooth=0.6&axis=log&bands=off&first=10&last=20"));
  assert.deepEqual(settings, { metrics: ["a", "b"], smoothing: 0.6, bands: false, log: true, heldOut: true, across: "step", zoom: { first: 10, last: 20 } });
  const wrong = readSettings(new URLSearchParams("smooth=7&first=20&last=10&x=toString"));
  assert.deepEqual([wrong.smoothing, wrong.zoom, wrong.across], [0, null, "step"]);
  assert.equal(readSettings(new URLSearchParams("x=tokens")).across, "tokens");
});

test("steps get their place on an axis of time, and a held-out curve is marks with error bars", () => {
  const place = placesOn({ steps: [2, 4, 8], mean: [10, null, 70] });
  assert.deepEqual([0, 2, 5, 8, 9].map(place), [0, 10, 40, 70, 70]);
  const series = { metric: "val/reward", split: "val", steps: [0, 1, 2], mean: [0, 1, 1], low: [0, 0, 0], high: [1, 1, 1], num: null };
  const held = toLine(series, { colour: "#000000", smoothing: 0.9 });
  assert.deepEqual([held.marks, held.dots, isSparse(held)], [true, undefined, true]);
  assert.equal(toLine({ ...series, split: "train" }, { colour: "#000000" }).marks, false);
  assert.deepEqual(onAxis(held, (step) => step * 10).steps, [0, 10, 20]);
});

test("a chart as a table: raw and drawn values, and no formula for a spreadsheet", () => {
  const line = { label: "=cmd()", colour: "#000000", steps: [1, 2], mean: [0.5, 0.75], dots: [0.5, 1], low: null, high: null };
  const other = { label: 'a "b", c', colour: "#000000", steps: [1], mean: [-1], low: [-2], high: [0] };
  assert.equal(chartCsv({ lines: [line, other], axis: { word: "time" } }), "curve,time,value,drawn,low,high\n'=cmd(),1,0.5,0.5,,\n'=cmd(),2,1,0.75,,\n\"a \"\"b\"\", c\",1,-1,-1,-2,0\n");
});

test("the bins of a histogram are one metric", () => {
  const metrics = ["data/reward_hist/0", "data/reward_hist/1", "data/x", "data/hist/0"].map((name) => ({ name }));
  assert.deepEqual(withHistograms(metrics).map(({ name }) => name), ["data/reward_hist", "data/x", "data/hist/0"]);
  const known = new Set(metrics.map(({ name }) => name));
  assert.deepEqual(histogramOf("data/reward_hist", known), ["data/reward_hist/0", "data/reward_hist/1"]);
  assert.deepEqual(histogramOf("data/x", known), []);
});

test("main panes: training is smoothed with dots, the ratio has its percentiles as a band, phases stack", () => {
  const series = (metric, mean) => ({ metric, split: null, steps: mean.map((_, at) => at), mean, low: null, high: null, num: null });
  const panes = new Map(mainPanes(["train", "val"]).map((pane) => [pane.title, pane]));
  const draw = (title, ...found) => panes.get(title).lines(new Map(found.map((one) => [one.metric, one])));
  const [train, val] = draw("Reward", series("train/reward", [0, 1, 0, 1, 0, 1]), series("val/reward", [0.5, 0.6]));
  assert.deepEqual([train.dots, train.colour, val.dots, val.colour], [[0, 1, 0, 1, 0, 1], TRAIN_COLOUR, undefined, HELD_OUT_COLOUR]);
  const [ratio] = draw("Importance ratio", series("offpolicy/ratio_p10", [0.9, 0.8]), series("offpolicy/ratio_p50", [1, 1]), series("offpolicy/ratio_p90", [1.1, 1.2]));
  assert.deepEqual([ratio.low, ratio.mean, ratio.high], [[0.9, 0.8], [1, 1], [1.1, 1.2]]);
  assert.deepEqual(draw("Time of a step", series("time/publish_s", [1])).map((line) => line.label), ["publish"]);
  assert.equal(panes.get("Time of a step").stacked, true);
});

test("settings that differ: nested, missing, of another type", () => {
  const rows = differingSettings([{ rank: 8, trainer: { seed: 1, loss: "ppo" }, list: [1] }, { rank: "8", trainer: { seed: 1, loss: "cispo" }, list: [1], more: null }]);
  assert.deepEqual(rows, [{ name: "more", values: [undefined, "null"] }, { name: "trainer.loss", values: ["ppo", "cispo"] }]);
});

test("settings that nobody recorded are not called the same", () => {
  const text = (settings) => settingsTable(settings, ["a", "b"]).textContent;
  assert.match(text([{}, {}]), /not recorded/);
  assert.match(text([{ program: { art: "1" } }, {}]), /not recorded/);
  assert.match(text([{ program: { art: "1" } }, { program: { art: "1" } }]), /recorded settings are the same/);
});

test("a line of few points far apart is drawn as marks without a band", () => {
  const values = (steps) => ({ label: "test", colour: TRAIN_COLOUR, steps, mean: steps, low: steps, high: steps });
  const [every, some] = [values([0, 1, 2, 3]), values([0, 30])];
  const { series, bands } = lineSeries([every, some]);
  assert.equal(bands.length, 1);
  assert.deepEqual(series.slice(2).map((one) => one.points.show), [false, true]);
  assert.equal(lineValues([every, some], (_, list) => list).length, 4);
});

test("findings that say the same about many steps are one item with one pin", () => {
  const findings = [
    { step: 9, name: null, text: "groups[0], groups[2]: all rewards are equal" },
    { step: 9, name: "entropy_fell", text: "entropy fell to 0.2" },
    { step: 8, name: null, text: "groups[1], groups[3], groups[5]: all rewards are equal" },
    { step: 5, name: "entropy_fell", text: "entropy fell to 0.4" },
    { step: 4, name: null, text: "the engine was restarted" },
    { step: 3, name: null, text: "groups[7]: all rewards are equal" },
  ];
  const groups = groupFindings(findings);
  assert.deepEqual(groups.map(({ text, steps }) => [text, steps]), [[findings[0].text, [9, 8, 3]], [findings[1].text, [9, 5]], [findings[4].text, [4]]]);
  assert.deepEqual(pinsOf(groups, null).map((pin) => pin.step), [3, 5, 4]);
  assert.deepEqual(pinsOf(groups, "entropy_fell").map((pin) => pin.step), [3, 9, 5, 4]);
});

test("times of a step have short names, each once", () => {
  const seconds = { "time/step_s/gpu/trainer": 1, "time/step_s/gpu/rollouts": 2, "time/step_trainer_s": 1, "time/publish_s": 3, "time/step_token_file_s": 4, "gpu/trainer": 1 };
  assert.deepEqual(phaseSeconds(seconds), [["trainer", 1], ["rollouts", 2], ["publish", 3], ["token file", 4]]);
});

test("an address with more metrics than can be drawn, or one twice, keeps the first 24", () => {
  const query = new URLSearchParams(Array.from({ length: 40 }, (_, at) => ["metric", `m${at % 30}`]));
  const { metrics } = readSettings(query);
  assert.deepEqual([metrics.length, metrics[0], metrics[23]], [24, "m0", "m23"]);
});
