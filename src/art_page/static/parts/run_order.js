/** Which runs the list shows, and in which order: filters, sorting, and runs that differ in the seed alone as one line. */

/**
 * @typedef {import("./run_summary.js").RunSummary} RunSummary
 * @typedef {{text: string, project: string, tag: string, state: string, archived: boolean, starred: boolean}} RunFilter
 * @typedef {{key: string, name: string, runs: RunSummary[], group: any | null}} Line  one line of the list: a run, or several that differ in the seed alone
 */

/** @param {RunSummary} run */
export function keyOf(run) {
  return `${run.project}/${run.name}`;
}

/**
 * @param {RunSummary} run
 * @param {RunFilter} filter
 */
export function isShown(run, { text, project, tag, state, archived, starred }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const said = `${keyOf(run)} ${run.base_model ?? ""} ${run.state} ${run.labels.tags.join(" ")} ${run.labels.notes}`.toLowerCase();
  return words.every((word) => said.includes(word)) && (!project || run.project === project) && (!tag || run.labels.tags.includes(tag)) &&
    (!state || run.state === state) && (archived || !run.labels.archived) && (!starred || run.labels.star);
}

/** Values by which lines can be sorted; those that are not known come last. @type {Record<string, (run: RunSummary) => string | number | null>} */
export const SORTS = {
  name: (run) => keyOf(run),
  state: (run) => run.state,
  step: (run) => run.step,
  before: (run) => run.headline?.before?.mean ?? null,
  heldout: (run) => run.headline?.after?.mean ?? null,
  gain: (run) => (run.headline && run.headline.a !== run.headline.b ? run.headline.difference?.mean ?? null : null),
  reward: (run) => run.training_reward?.mean ?? run.reward?.mean ?? null,
  time: (run) => run.seconds ?? null,
  cost: (run) => run.costs_usd,
  updated: (run) => run.updated_at,
};

/**
 * The lines of the list. Without an order, starred runs come first, then the newest.
 * @param {RunSummary[]} runs  in the order of the server
 * @param {any[]} groups  the wire type SeedGroup of art_page/run_answers.py
 * @param {{filter: RunFilter, joinsSeeds: boolean, sort: string | null, descending: boolean}} options
 * @returns {Line[]}
 */
export function linesOf(runs, groups, { filter, joinsSeeds, sort, descending }) {
  const shown = new Map(runs.filter((run) => isShown(run, filter)).map((run) => [keyOf(run), run]));
  /** @type {Map<string, Line>} line of each run that is one of several */
  const joined = new Map();
  for (const group of joinsSeeds ? groups : []) {
    const members = group.runs.map((/** @type {string} */ name) => `${group.project}/${name}`).filter((/** @type {string} */ key) => shown.has(key));
    if (members.length < 2) continue;
    const isWhole = members.length === group.runs.length;
    const line = { key: `${group.project}/${members.map((/** @type {string} */ key) => key.split("/")[1]).join(",")}`, name: `${group.project}/${group.name}`, runs: members.map((/** @type {string} */ key) => shown.get(key)), group: isWhole ? group : null };
    for (const key of members) joined.set(key, line);
  }
  /** @type {Set<Line>} */
  const lines = new Set();
  for (const [key, run] of shown) lines.add(joined.get(key) ?? { key, name: key, runs: [run], group: null });
  const value = sort === null ? null : SORTS[sort];
  if (!value) return [...lines].sort((a, b) => Number(isStarred(b)) - Number(isStarred(a)));
  return [...lines].map((line) => ({ line, by: meanOf(line.runs.map(value)) })).sort((a, b) => compare(a.by, b.by, descending)).map(({ line }) => line);
}

/** @param {Line} line */
function isStarred(line) {
  return line.runs.some((run) => run.labels.star);
}

/**
 * @param {(string | number | null)[]} values  of the runs of a line
 * @returns {string | number | null}
 */
function meanOf(values) {
  if (typeof values[0] === "string") return values[0];
  const known = /** @type {number[]} */ (values.filter((value) => typeof value === "number"));
  return known.length > 0 ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
}

/**
 * @param {string | number | null} a
 * @param {string | number | null} b
 * @param {boolean} descending
 */
function compare(a, b, descending) {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  const order = typeof a === "string" ? a.localeCompare(String(b)) : a - Number(b);
  return descending ? -order : order;
}
