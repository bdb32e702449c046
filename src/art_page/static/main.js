/** Starts the page: the bar, the keyboard, and the view that the address names. */
import { ApiError, openSession } from "./lib/api.js";
import { announce, makeContext } from "./lib/context.js";
import { drawBar } from "./frame/bar.js";
import { h, replace } from "./lib/dom.js";
import { addHelp } from "./frame/help.js";
import { addKeys, startKeys } from "./lib/keys.js";
import { isLoginLink, showLogin, useLoginLink } from "./frame/login.js";
import { go, parse } from "./lib/router.js";
import { failed, loading, missing } from "./lib/states.js";
import { applyTheme } from "./lib/theme.js";
import { checkpointsView } from "./views/checkpoints.js";
import { compareView } from "./views/compare.js";
import { comparisonsView } from "./views/comparisons.js";
import { costsView } from "./views/costs.js";
import { curvesView } from "./views/curves.js";
import { differenceView } from "./views/difference.js";
import { groupView } from "./views/group.js";
import { ledgerView } from "./views/ledger.js";
import { liveView } from "./views/live.js";
import { rolloutView } from "./views/rollout.js";
import { rolloutsView } from "./views/rollouts.js";
import { runView } from "./views/run.js";
import { runsView } from "./views/runs.js";
import { settingsView } from "./views/settings.js";
import { systemView } from "./views/system.js";
import { treeView } from "./views/tree.js";
import { visibleText } from "./lib/visible_text.js";

/** @type {import("./lib/context.js").View} */
const nowhereView = {
  title: () => "Not found",
  async show(root) {
    replace(root, missing("There is no such page here. "), h("p", null, h("a", { href: "#/" }, "All runs")));
  },
};

/** @type {Record<string, import("./lib/context.js").View>} */
const VIEWS = {
  runs: runsView,
  run: runView,
  curves: curvesView,
  rollouts: rolloutsView,
  rollout: rolloutView,
  group: groupView,
  tree: treeView,
  ledger: ledgerView,
  checkpoints: checkpointsView,
  costs: costsView,
  settings: settingsView,
  compare: compareView,
  comparisons: comparisonsView,
  difference: differenceView,
  live: liveView,
  system: systemView,
  nowhere: nowhereView,
};

let leave = () => {};

async function showRoute() {
  if (isLoginLink()) {
    await startSession();
    return;
  }
  leave();
  const route = parse(location.hash);
  const view = VIEWS[route.view] ?? nowhereView;
  const abort = new AbortController();
  const root = h("div", { class: `view view-${route.view}` });
  /** @type {(() => void) | void} */
  let cleanup = undefined;
  leave = () => {
    abort.abort();
    cleanup?.();
  };
  drawBar(route);
  document.title = visibleText(`${view.title(route)} - ART`);
  replace(mainElement(), root);
  scrollTo(0, 0);
  try {
    cleanup = await view.show(root, route, makeContext(abort.signal));
    if (abort.signal.aborted) cleanup?.();
    else {
      announce(view.title(route));
      if (document.activeElement === document.body) mainElement().focus({ preventScroll: true });
    }
  } catch (error) {
    if (!abort.signal.aborted) replace(root, failed(error, showRoute));
  }
}

function mainElement() {
  return /** @type {HTMLElement} */ (document.getElementById("main"));
}

async function startSession() {
  const timer = setTimeout(() => replace(mainElement(), loading()), 150);
  let problem = null;
  try {
    problem = await useLoginLink();
    await openSession();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      askForLogin(problem);
      return;
    }
    replace(mainElement(), failed(error, startSession));
    return;
  } finally {
    clearTimeout(timer);
  }
  removeEventListener("hashchange", startSession);
  addEventListener("hashchange", showRoute);
  addEventListener("artlogin", loseSession);
  await showRoute();
}

/** The session has ended while the page was open. */
function loseSession() {
  askForLogin("The session has ended.");
}

/** @param {string | null} message */
function askForLogin(message) {
  removeEventListener("artlogin", loseSession);
  removeEventListener("hashchange", showRoute);
  addEventListener("hashchange", startSession, { once: true });
  leave();
  leave = () => {};
  document.title = "Log in - ART";
  showLogin(mainElement(), message, startSession);
}

function start() {
  applyTheme();
  startKeys();
  addHelp();
  addKeys([
    { key: "g r", text: "go to the runs", run: () => go("runs") },
    { key: "g m", text: "go to the comparisons of models", run: () => go("comparisons") },
    { key: "g l", text: "go to what is sampled now", run: () => go("live") },
    { key: "g s", text: "go to the system", run: () => go("system") },
  ]);
  document.getElementById("skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    mainElement().focus();
  });
  startSession();
}

start();
