/**
 * Answers of a copy of the page on the disk (art_page/export.py). A file of answers is a script that is loaded when a view first needs it;
 * the whole table of rollouts is one answer, which is filtered and sorted here.
 *
 * @typedef {import("./api.js").Params} Params
 */

/** @type {Map<string, any>} answers by address */
const known = new Map();
/** @type {Map<string, Promise<boolean>>} whether a file is there, by its name */
const files = new Map();

/** The session of a copy; null for a page that a server sends.
 * @returns {import("./api.js").Session | null}
 */
export function copySession() {
  return /** @type {any} */ (globalThis).artCopySession ?? null;
}

/**
 * Answer a request from the files of the copy; undefined if it has no such answer.
 * @param {string} path
 * @param {Params} params
 * @param {string} address  path and parameters
 */
export async function answerOf(path, params, address) {
  if (!(await load(fileOf(path)))) return undefined;
  if (/^runs\/[^/]+\/[^/]+\/rollouts$/.test(path)) return tableOf(known.get(path), params);
  if (path.endsWith("/series")) return seriesOf(path, params);
  return known.get(address);
}

/** Name of the file that has the answers below a path. @param {string} path */
export function fileOf(path) {
  const [first, project, name, kind, ...rest] = path.split("/");
  if (first !== "runs" || name === undefined) return "all";
  const run = `${project}/${name}`;
  if (kind === "steps") return `${run}/step-${rest[0]}`;
  if (kind === "rollouts" && rest.length === 0) return `${run}/rollouts`;
  return kind === "rollouts" || kind === "groups" ? `${run}/${rest.slice(0, 3).join("-")}` : `${run}/run`;
}

/** @param {string} file @returns {Promise<boolean>} */
function load(file) {
  /** @type {any} */ (globalThis).artCopy ??= { take: (/** @type {string} */ text) => Object.entries(JSON.parse(text)).forEach(([address, answer]) => known.set(address, answer)) };
  const loading = files.get(file) ?? new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = `answers/${file.split("/").map(encodeURIComponent).join("/")}.js`;
    script.onload = () => resolve(true);
    script.onerror = () => resolve(false);
    document.head.append(script);
  });
  files.set(file, loading);
  return loading;
}

/** @param {string} path @param {Params} params */
function seriesOf(path, params) {
  const wanted = /** @type {string[]} */ ([params.metric].flat());
  const all = new Map();
  for (let part = 0; known.has(`${path}?part=${part}`); part += 1) for (const series of known.get(`${path}?part=${part}`).series) all.set(series.metric, series);
  return { series: wanted.flatMap((metric) => all.get(metric) ?? []) };
}

const FIELDS = /** @type {Record<string, string>} */ ({ tokens: "num_tokens", turns: "num_turns", duration: "duration_s" });

/**
 * The part of the whole table that a query asks for, as the server answers it. A search in the texts finds words of scenarios only.
 * @param {any} table
 * @param {Params} params
 */
export function tableOf(table, params) {
  const bound = (/** @type {unknown} */ value) => (value === null || value === undefined || value === "" ? null : Number(value));
  const isIn = (/** @type {number | null | undefined} */ value, /** @type {unknown} */ least, /** @type {unknown} */ most) => {
    const [low, high] = [bound(least), bound(most)];
    return (low === null && high === null) || (typeof value === "number" && (low === null || value >= low) && (high === null || value <= high));
  };
  const equal = (/** @type {unknown} */ value, /** @type {unknown} */ asked) => asked === null || asked === undefined || asked === "" || String(value) === String(asked);
  const words = String(params.text ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const rows = table.rows.filter((/** @type {any} */ row) =>
    ["split", "step", "group", "outcome", "stop", "scenario"].every((name) => equal(row[name], params[name]))
    && (params.dropped === "any" ? row.dropped_because !== null : params.dropped === "none" ? row.advantage !== null && row.dropped_because === null : equal(row.dropped_because, params.dropped))
    && isIn(row.reward, params.min_reward, params.max_reward)
    && (!params.metric || isIn(row.metrics[String(params.metric)], params.min_metric, params.max_metric))
    && words.every((word) => (row.scenario ?? "").toLowerCase().includes(word)));
  const sort = String(params.sort ?? "step");
  const valueOf = (/** @type {any} */ row) => (sort === "metric" ? row.metrics[String(params.sort_metric)] : row[FIELDS[sort] ?? sort]) ?? null;
  const sign = String(params.descending ?? true) === "true" ? -1 : 1;
  const places = new Map(rows.map((/** @type {any} */ row, /** @type {number} */ at) => [row, at]));
  rows.sort((/** @type {any} */ one, /** @type {any} */ other) => {
    const [a, b] = [valueOf(one), valueOf(other)];
    if (a === null || b === null) return (a === null ? 1 : 0) - (b === null ? 1 : 0) || places.get(one) - places.get(other);
    return sign * (a - b) || places.get(one) - places.get(other);
  });
  const offset = Number(params.offset ?? 0);
  return { ...table, rows: rows.slice(offset, offset + Number(params.limit ?? 100)), total: rows.length };
}
