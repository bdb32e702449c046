/** What people say about a run: star, tags, notes and the archive mark, and how they change it. */
import { canLabel, postLabels } from "../lib/api.js";
import { announce } from "../lib/context.js";
import { askBefore } from "../lib/dialog.js";
import { h } from "../lib/dom.js";

/** @typedef {{tags: string[], notes: string, star: boolean, archived: boolean}} Labels  the wire type RunLabels of art/storage/labels.py */

/**
 * A star that can be set, or only seen where the page may not change it.
 * @param {string} run  "project/name"
 * @param {Labels} labels
 * @param {() => Promise<void>} onChange
 */
export function starButton(run, labels, onChange) {
  const mark = labels.star ? "★" : "☆";
  if (!canLabel()) return labels.star ? h("span", { class: "star", role: "img", "aria-label": "starred" }, mark) : null;
  return h("button", { type: "button", class: "star quiet", "aria-label": `Star ${run}`, "aria-pressed": String(labels.star), title: labels.star ? "Remove the star" : "Give it a star", "on:click": async () => {
    await postLabels(run, { star: !labels.star });
    announce(labels.star ? `${run} has no star any more` : `${run} has a star`);
    await onChange();
  } }, mark);
}

/** @param {Labels} labels */
export function tagChips(labels) {
  return [labels.tags.map((tag) => h("span", { class: "chip tag" }, tag)), labels.archived ? h("span", { class: "chip" }, "archived") : null];
}

/**
 * Tags, notes and marks of one run, with buttons to change them.
 * @param {string} run  "project/name"
 * @param {Labels} labels
 * @param {() => Promise<void>} onChange
 */
export function labelLine(run, labels, onChange) {
  const edit = canLabel() ? h("button", { type: "button", class: "quiet", "on:click": () => editLabels(run, labels, onChange) }, labels.tags.length > 0 || labels.notes ? "Edit tags and notes" : "Add tags or notes") : null;
  const archive = canLabel() ? h("button", { type: "button", class: "quiet", "on:click": async () => {
    await postLabels(run, { archived: !labels.archived });
    await onChange();
  } }, labels.archived ? "Take out of the archive" : "Archive") : null;
  return h("div", { class: "run-labels" },
    h("div", { class: "row" }, starButton(run, labels, onChange), tagChips(labels), edit, archive),
    labels.notes ? h("p", { class: "notes" }, labels.notes) : null);
}

/**
 * @param {string} run
 * @param {Labels} labels
 * @param {() => Promise<void>} onChange
 */
function editLabels(run, labels, onChange) {
  const tags = h("input", { type: "text", value: labels.tags.join(", "), "aria-label": "Tags", placeholder: "baseline, long run" });
  const notes = h("textarea", { rows: 6, maxlength: 10000, "aria-label": "Notes", value: labels.notes });
  askBefore({
    title: `Labels of ${run}`,
    text: [h("label", { class: "field" }, "Tags, with commas between them", tags), h("label", { class: "field" }, "Notes", notes)],
    button: "Save",
    act: async () => {
      await postLabels(run, { tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), notes: notes.value });
      await onChange();
      return null;
    },
  });
}
