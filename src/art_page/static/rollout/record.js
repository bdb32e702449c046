// The tab "record": metrics, metadata, logs and the error of a rollout, and all of it as JSON to copy.

import { copyButton } from "../lib/copy.js";
import { h, replace } from "../lib/dom.js";
import { formatNumber, formatSeconds, formatTime } from "../lib/format.js";
import { saidNodes, saidText } from "./said_text.js";

/** @param {HTMLElement} root @param {any} rollout a `RolloutDetail` */
export function showRecord(root, rollout) {
  const json = () => JSON.stringify(rollout, null, 2);
  replace(root,
    h("p", { class: "record-actions" }, copyButton(json, "copy as JSON")),
    rollout.error ? section("error", saidText(rollout.error, { mono: true })) : null,
    section("facts", valuesTable([
      ["started", formatTime(rollout.started_at)], ["duration", formatSeconds(rollout.duration_s)],
      ["policy version of the first answer", rollout.policy_version], ["stop", rollout.stop], ["outcome", rollout.outcome],
    ])),
    section("metrics", valuesTable(Object.entries(rollout.metrics))),
    section("metadata", valuesTable(Object.entries(rollout.metadata))),
    section("logs", rollout.logs.length > 0 ? h("ol", { class: "logs" }, rollout.logs.slice(0, 2000).map((/** @type {string} */ line) => h("li", null, saidText(line, { mono: true, limit: 2000 })))) : null),
    rollout.logs.length > 2000 ? h("p", { class: "soft" }, `The first 2,000 of ${rollout.logs.length} lines; the JSON has all.`) : null,
    jsonView(json));
}

/** The JSON, made when it is opened. @param {() => string} json */
function jsonView(json) {
  const body = h("div", null);
  const details = h("details", { class: "json" }, h("summary", null, "JSON"), body);
  details.addEventListener("toggle", () => {
    if (details.open) replace(body, saidText(json(), { mono: true, limit: 20000 }));
  });
  return details;
}

/** @param {string} title @param {HTMLElement|null} content */
function section(title, content) {
  return h("section", null, h("h3", null, title), content ?? h("p", { class: "soft" }, "none"));
}

/** @param {[string, any][]} entries */
function valuesTable(entries) {
  const known = entries.filter(([, value]) => value !== null && value !== undefined);
  if (known.length === 0) return null;
  return h("table", { class: "values" }, h("tbody", null, known.map(([name, value]) => h("tr", null,
    h("th", { scope: "row" }, saidNodes(name)),
    h("td", null, typeof value === "number" ? formatNumber(value) : saidText(String(value), { limit: 1000 }))))));
}
