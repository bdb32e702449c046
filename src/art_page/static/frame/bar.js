/** The bar at the top: where the reader is, and where they can go from there. */
import { getSession, logOut } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { showHelp } from "./help.js";
import { link } from "../lib/router.js";
import { themeButton } from "../lib/theme.js";

const TOP = /** @type {[string, string][]} */ ([["runs", "Runs"], ["comparisons", "Models compared"], ["live", "Live"], ["system", "System"]]);
const OF_RUN = /** @type {[string, string][]} */ ([
  ["run", "Overview"], ["curves", "Curves"], ["rollouts", "Rollouts"], ["ledger", "Ledger"], ["checkpoints", "Checkpoints"], ["costs", "Costs"], ["settings", "Settings"],
]);
const NEEDS_SERVER = ["live", "system"];
/** Views that are reached through another one. */
const PARENT = /** @type {Record<string, string>} */ ({ rollout: "rollouts", group: "rollouts", tree: "ledger" });

/** @param {import("../lib/router.js").Route} route */
export function drawBar(route) {
  const bar = /** @type {HTMLElement} */ (document.getElementById("bar"));
  const [project, name] = route.args;
  const isRun = project !== undefined && name !== undefined && !["compare", "comparisons", "live", "system", "nowhere"].includes(route.view);
  const here = PARENT[route.view] ?? route.view;
  const top = TOP.filter(([view]) => !NEEDS_SERVER.includes(view) || getSession().has_server);
  replace(
    bar,
    h("nav", { class: "bar-top", "aria-label": "Page" },
      h("a", { class: "brand", href: "#/" }, "ART"),
      top.map(([view, text]) => tab(text, link(view), view === route.view)),
      h("span", { class: "space" }),
      themeButton(),
      getSession().key_id ? h("button", { type: "button", class: "quiet", "on:click": endSession }, "Log out") : null,
      h("button", { type: "button", class: "quiet", "on:click": showHelp, "aria-keyshortcuts": "?" }, "Help")),
    isRun ? h("nav", { class: "bar-run", "aria-label": "Run" },
      h("a", { class: "run-name", href: link("run", [project, name]) }, h("span", { class: "soft" }, `${project}/`), name),
      h("span", { class: "tabs" }, OF_RUN.map(([view, text]) => tab(text, link(view, [project, name]), view === here)))) : null,
  );
  bar.querySelector(".bar-run [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
}

async function endSession() {
  await logOut();
  location.reload();
}

/**
 * @param {string} text
 * @param {string} href
 * @param {boolean} isHere
 */
function tab(text, href, isHere) {
  return h("a", { class: "tab", href, "aria-current": isHere ? "page" : null }, text);
}
