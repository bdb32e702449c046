/**
 * Every state of the page is in the URL: "#/run/P/N/rollouts?step=12" is the view `rollouts` with args [P, N] and a query.
 *
 * @typedef {{view: string, args: string[], query: URLSearchParams}} Route
 * @typedef {Record<string, string | number | boolean | null | undefined | (string | number)[]>} Query
 */

/** Views below "#/run/PROJECT/NAME/", each with the number of further parts that its address has at least. */
const RUN_VIEWS = /** @type {Record<string, number>} */ ({ curves: 0, rollouts: 0, rollout: 4, group: 3, tree: 1, ledger: 0, checkpoints: 0, costs: 0, settings: 0 });
const TOP_VIEWS = ["compare", "comparisons", "difference", "live", "system"];

/**
 * Read an address. What is not an address of the page gets the view "nowhere".
 * @param {string} hash
 * @returns {Route}
 */
export function parse(hash) {
  const [path, text] = splitOnce(hash.replace(/^#?\/?/, ""), "?");
  const query = new URLSearchParams(text);
  /** @type {string[]} */
  let parts;
  try {
    parts = path.split("/").filter((part) => part !== "").map(decodeURIComponent);
  } catch {
    return { view: "nowhere", args: [], query };
  }
  const [first, project, name, view, ...rest] = parts;
  if (first === undefined) return { view: "runs", args: [], query };
  if (TOP_VIEWS.includes(first)) return { view: first, args: parts.slice(1), query };
  if (first !== "run" || name === undefined) return { view: "nowhere", args: parts, query };
  if (view === undefined) return { view: "run", args: [project, name], query };
  const isKnown = Object.hasOwn(RUN_VIEWS, view) && rest.length >= RUN_VIEWS[view];
  return { view: isKnown ? view : "nowhere", args: [project, name, ...rest], query };
}

/**
 * Address of a view, for an `href`: link("rollouts", [project, name], {step: 12}) is "#/run/PROJECT/NAME/rollouts?step=12".
 * @param {string} view
 * @param {(string | number)[]} [args]
 * @param {Query} [query]
 */
export function link(view, args = [], query = {}) {
  const [project, name, ...rest] = args.map((arg) => encodeURIComponent(String(arg)));
  let path = "#/";
  if (view === "run") path += `run/${project}/${name}`;
  else if (Object.hasOwn(RUN_VIEWS, view)) path += ["run", project, name, view, ...rest].join("/");
  else if (view !== "runs") path += [view, ...args.map((arg) => encodeURIComponent(String(arg)))].join("/");
  return path + queryText(changeQuery(new URLSearchParams(), query));
}

/**
 * Change some settings of the address without a new entry in the history; null removes one. The view is not shown again.
 * @param {Query} changes
 */
export function setQuery(changes) {
  const [path, text] = splitOnce(location.hash || "#/", "?");
  const query = changeQuery(new URLSearchParams(text), changes);
  history.replaceState(history.state, "", path + queryText(query));
}

/**
 * Show another view, with a new entry in the history.
 * @param {string} view
 * @param {(string | number)[]} [args]
 * @param {Query} [query]
 */
export function go(view, args, query) {
  location.hash = link(view, args, query);
}

/**
 * @param {URLSearchParams} query
 * @param {Query} changes
 */
function changeQuery(query, changes) {
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, String(one));
  }
  return query;
}

/** @param {URLSearchParams} query */
function queryText(query) {
  const text = query.toString().replaceAll("%2F", "/");
  return text ? `?${text}` : "";
}

/**
 * @param {string} text
 * @param {string} mark
 */
function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}
