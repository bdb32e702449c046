// The keys [ and ]: to the step before and after that has rollouts of the same split.

import { get } from "../lib/api.js";
import { go } from "../lib/router.js";

/** The nearest step before or after `step` in a list of ranges; null if there is none.
 * @param {[number, number][]} ranges steps without gaps, in order @param {number} step @param {1|-1} direction
 * @returns {number|null} */
export function nextStep(ranges, step, direction) {
  let nearest = null;
  for (const [first, last] of ranges) {
    const inRange = direction > 0 ? Math.max(first, step + 1) : Math.min(last, step - 1);
    if (inRange < first || inRange > last) continue;
    if (nearest === null || (nearest - inRange) * direction > 0) nearest = inRange;
  }
  return nearest;
}

/** @param {any} run a `RunDetail` @param {string} split @returns {[number, number][]} */
export function rangesOf(run, split) {
  return run.splits.find((/** @type {any} */ entry) => entry.split === split)?.steps ?? [];
}

/** @param {import("../lib/context.js").Context} ctx @param {import("../lib/router.js").Route} route
 * @param {"rollout"|"group"} view @param {() => import("../lib/router.js").Query} [kept] settings of the address that stay */
export function addStepKeys(ctx, route, view, kept = () => ({})) {
  const [project, name, split, step] = route.args;
  const move = async (/** @type {1|-1} */ direction) => {
    const target = nextStep(rangesOf(await get(`runs/${project}/${name}`, {}, ctx.signal), split), Number(step), direction);
    if (target === null) ctx.announce(direction > 0 ? "This is the last step." : "This is the first step.");
    else go(view, [project, name, split, target, ...(view === "rollout" ? [0, 0] : [0])], kept());
  };
  ctx.keys([
    { key: "[", text: "first one of the step before", run: () => void move(-1) },
    { key: "]", text: "first one of the step after", run: () => void move(1) },
  ]);
}
