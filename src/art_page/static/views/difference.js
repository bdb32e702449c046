// Two rollouts of any run, step or group side by side: their numbers, and where their conversations part.

import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { formatCount, formatNumber, formatSeconds, formatSigned, UNKNOWN } from "../lib/format.js";
import { link } from "../lib/router.js";
import { missing, showWhenLoaded } from "../lib/states.js";
import { visibleText } from "../lib/visible_text.js";
import { readPlace } from "../rollout/marked.js";
import { oneLine } from "../rollout/row_columns.js";
import { sideBySide } from "../rollout/side_by_side.js";

/** @type {import("../lib/context.js").View} */
export const differenceView = {
  title: () => "Difference of two rollouts",
  async show(root, route, ctx) {
    const places = [readPlace(route.query.get("a")), readPlace(route.query.get("b"))];
    if (places.some((place) => place === null)) {
      replace(root, missing("Two rollouts are compared from their own pages: mark the first one there, then open the second."));
      return;
    }
    const known = /** @type {string[][]} */ (places);
    const load = () => Promise.all(known.map(([project, name, ...key]) => get(`runs/${project}/${name}/rollouts/${key.join("/")}`, {}, ctx.signal)));
    await showWhenLoaded(root, ctx.signal, load, (rollouts) => {
      const narrow = matchMedia("(max-width: 720px)");
      const place = h("div", { class: "group-place" });
      const draw = () => replace(place, sideBySide(rollouts.map((rollout, at) => ({ rollout, href: link("rollout", known[at]), label: nameOf(known[at]) })), { isStacked: narrow.matches, base: "the first" }));
      narrow.addEventListener("change", draw, { signal: ctx.signal });
      const [a, b] = known.map((one) => one.join("/"));
      replace(root, h("header", { class: "rollout-head" }, h("h1", null, "Difference of two rollouts"), h("nav", { class: "places" }, h("a", { href: link("difference", [], { a: b, b: a }) }, "the other way round"))), numbers(rollouts, known), place);
      draw();
    });
  },
};

/** @param {string[]} place */
function nameOf([project, name, split, step, group, index]) {
  return visibleText(`${project}/${name}, ${split} step ${step}, ${group}.${index}`);
}

/** The numbers of both, and their difference. @param {any[]} rollouts @param {string[][]} places */
function numbers(rollouts, places) {
  const metrics = [...new Set(rollouts.flatMap((rollout) => Object.keys(rollout.metrics)))];
  /** @type {[string, (rollout: any) => number|null, (value: number|null) => string][]} */
  const rows = [
    ["reward", (rollout) => rollout.reward, formatNumber], ["advantage", (rollout) => rollout.advantage, formatSigned],
    ["policy version", (rollout) => rollout.policy_version, formatCount], ["turns", (rollout) => rollout.num_turns, formatCount],
    ["sampled tokens", (rollout) => rollout.num_tokens, formatCount], ["duration", (rollout) => rollout.duration_s, formatSeconds],
    ...metrics.map((name) => /** @type {[string, (rollout: any) => number|null, (value: number|null) => string]} */ ([name, (rollout) => rollout.metrics[name] ?? null, formatNumber])),
  ];
  const cell = (/** @type {string} */ text) => h("td", { class: "number" }, text);
  return h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "difference-numbers" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, ""), places.map((place) => h("th", { scope: "col", class: "number" }, nameOf(place))), h("th", { scope: "col", class: "number" }, "second minus first"))),
    h("tbody", null,
      h("tr", null, h("th", { scope: "row" }, "scenario"), rollouts.map((rollout) => cell(oneLine(rollout.scenario, 80) || UNKNOWN)), cell(rollouts[0].scenario === rollouts[1].scenario ? "the same" : "another")),
      rows.map(([name, of, format]) => {
        const [a, b] = rollouts.map(of);
        return h("tr", null, h("th", { scope: "row" }, visibleText(name)), cell(format(a)), cell(format(b)), cell(a === null || b === null || a === undefined || b === undefined ? UNKNOWN : formatSigned(b - a)));
      }))));
}
