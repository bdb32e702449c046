// The rollout that the reader marked to compare others with. It is kept while the tab of the browser is open.

import { h, replace } from "../lib/dom.js";
import { link } from "../lib/router.js";
import { visibleText } from "../lib/visible_text.js";

const KEY = "art-marked-rollout";

/** Project, name, split, step, group and index; null for a text that is no place. @param {string|null} text @returns {string[]|null} */
export function readPlace(text) {
  const parts = (text ?? "").split("/");
  return parts.length === 6 && parts.every(Boolean) ? parts : null;
}

/** @returns {string|null} */
function marked() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** A link to the difference from the marked rollout, and a button that marks this one.
 * @param {string[]} place of the rollout that is shown */
export function differenceTools(place) {
  const own = place.join("/");
  const tools = h("span", { class: "row" });
  const draw = () => {
    const other = marked();
    const known = readPlace(other);
    replace(tools,
      known !== null && other !== own ? h("a", { href: link("difference", [], { a: other, b: own }) }, visibleText(`difference from ${known[0] === place[0] && known[1] === place[1] ? "" : `${known[0]}/${known[1]} `}${known.slice(2).join("/")}`)) : null,
      other === own ? h("span", { class: "soft" }, "marked: open another rollout to see the difference") : h("button", { type: "button", class: "as-link", title: "then open another rollout, of any step, run or group", "on:click": mark }, "mark to compare"));
  };
  const mark = () => {
    try {
      sessionStorage.setItem(KEY, own);
    } catch {
      return;
    }
    draw();
  };
  draw();
  return tools;
}
