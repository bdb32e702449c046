/** The settings of a run, and those in which runs differ. */
import { h } from "../lib/dom.js";
import { UNKNOWN } from "../lib/format.js";

const MAX_JOINED = 80;
const NOT_RECORDED = "The settings were not recorded.";

/**
 * Settings as flat names: {trainer: {seed: 1}} is {"trainer.seed": "1"}.
 * @param {any} settings
 * @param {string} [prefix]
 * @returns {Record<string, string>}
 */
export function flatSettings(settings, prefix = "") {
  /** @type {Record<string, string>} */
  const flat = {};
  for (const [name, value] of Object.entries(settings ?? {})) {
    if (value === undefined) continue;
    const isGroup = value !== null && typeof value === "object" && !Array.isArray(value);
    if (isGroup) Object.assign(flat, flatSettings(value, `${prefix}${name}.`));
    else flat[prefix + name] = typeof value === "string" ? value : JSON.stringify(value);
  }
  return flat;
}

/**
 * Names whose value is not the same in all runs, each with the value of every run.
 * @param {any[]} settings  of each run
 * @returns {{name: string, values: (string | undefined)[]}[]}
 */
export function differingSettings(settings) {
  const flat = settings.map((one) => flatSettings(one));
  const names = [...new Set(flat.flatMap((one) => Object.keys(one)))].sort();
  return names.map((name) => ({ name, values: flat.map((one) => one[name]) })).filter(({ values }) => values.some((value) => value !== values[0]));
}

/**
 * The settings of several runs as those of one: where they differ, all of their values.
 * @param {any[]} settings  of each run
 * @returns {any}
 */
export function joinSettings(settings) {
  const [first, ...others] = settings;
  if (others.length === 0) return first;
  const flat = settings.map((one) => flatSettings(one));
  const names = [...new Set(flat.flatMap((one) => Object.keys(one)))];
  const joined = Object.fromEntries(names.map((name) => {
    const values = [...new Set(flat.map((one) => one[name] ?? UNKNOWN))];
    const text = values.join(", ");
    return [name, text.length > MAX_JOINED && values.length > 1 ? `${values[0]} and ${values.length - 1} more` : text];
  }));
  return settings.every((one) => one?.program === undefined) ? joined : { ...joined, program: {} };
}

/** @param {any} settings  of one run */
export function settingsList(settings) {
  const rows = Object.entries(flatSettings(settings));
  if (rows.length === 0) return h("p", { class: "soft" }, NOT_RECORDED);
  return h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "settings-table" }, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "mono" }, value))))));
}

/**
 * @param {any[]} settings  of each run
 * @param {import("../lib/dom.js").Child[]} heads  one for each run
 */
export function settingsTable(settings, heads) {
  const rows = differingSettings(settings);
  const missing = settings.filter((one) => one?.program === undefined).length;
  if (rows.length === 0) return h("p", { class: "soft" }, missing > 0 ? NOT_RECORDED : "The recorded settings are the same.");
  return h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "compare-table" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", null, rows.map(({ name, values }) => h("tr", null, h("th", { scope: "row" }, name), values.map((value, at) => h("td", { class: "mono" }, value ?? h("span", { class: "soft" }, settings[at]?.program === undefined ? "not recorded" : UNKNOWN))))))));
}
