/** Numbers, durations, money and times as text. What is not known is an en dash. */

export const UNKNOWN = "–";

/**
 * A number with about three significant digits: 0.0123, 1.23, 12.3, 1,230, 12.3 M.
 * @param {number | null | undefined} value
 */
export function formatNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return formatCount(value);
  if (size < 1e-3) return minus(value.toExponential(1).replace(".0e", "e"));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en-US"));
  return minus(String(Number(value.toPrecision(3))));
}

/**
 * A number with a fixed number of decimals, for columns.
 * @param {number | null | undefined} value
 * @param {number} [decimals]
 */
export function formatFixed(value, decimals = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  return minus(value.toFixed(decimals).replace(/^-(0\.?0*)$/, "$1"));
}

/**
 * A number with its sign: +0.31, −0.20.
 * @param {number | null | undefined} value
 * @param {number} [decimals]
 */
export function formatSigned(value, decimals = 2) {
  const text = formatFixed(value, decimals);
  return text === UNKNOWN || text.startsWith("−") || !/[1-9]/.test(text) ? text : `+${text}`;
}

/**
 * How many: 412, 41,200, 4.12 M, 1.2 G.
 * @param {number | null | undefined} value
 */
export function formatCount(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  for (const [unit, size] of /** @type {[string, number][]} */ ([["T", 1e12], ["G", 1e9], ["M", 1e6]])) {
    if (Math.abs(value) >= size) return minus(`${Number((value / size).toPrecision(3))} ${unit}`);
  }
  return minus(Math.round(value).toLocaleString("en-US"));
}

/** @param {number | null | undefined} share from 0 to 1 */
export function formatPercent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return UNKNOWN;
  const percent = share * 100;
  return minus(`${Math.abs(percent) < 10 && percent !== 0 ? Number(percent.toPrecision(2)) : Math.round(percent)} %`);
}

/**
 * @param {number | null | undefined} seconds
 * @returns {string}
 */
export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds < 0) return minus(`-${formatSeconds(-seconds)}`);
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return "< 1 ms";
  if (seconds < 0.9995) return `${Number((seconds * 1000).toPrecision(seconds < 0.01 ? 2 : 3))} ms`;
  if (seconds < 99.5) return `${seconds < 9.95 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  const hours = Math.round(minutes / 60);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** @param {number | null | undefined} usd */
export function formatUsd(usd) {
  if (usd === null || usd === undefined || !Number.isFinite(usd)) return UNKNOWN;
  if (usd === 0) return "$0";
  if (Math.abs(usd) < 0.01) return minus(`$${usd.toFixed(4)}`).replace("$−", "−$").replace("$-", "−$");
  return `${usd < 0 ? "−" : ""}$${Math.abs(usd).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
}

/** @param {number | null | undefined} size */
export function formatBytes(size) {
  if (size === null || size === undefined || !Number.isFinite(size)) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let rest = size;
  while (Math.abs(rest) >= 999.5 && at < units.length - 1) {
    rest /= 1000;
    at += 1;
  }
  return `${at === 0 || rest >= 99.5 ? Math.round(rest) : Number(rest.toPrecision(3))} ${units[at]}`;
}

/**
 * How long ago: "just now", "20 s ago", "3 h ago".
 * @param {number | null | undefined} time  Unix seconds
 * @param {number} [now]  Unix seconds
 */
export function formatAge(time, now = Date.now() / 1000) {
  if (time === null || time === undefined || !Number.isFinite(time)) return UNKNOWN;
  const age = now - time;
  if (age < 5) return "just now";
  if (age < 100) return `${Math.round(age)} s ago`;
  if (age < 100 * 60) return `${Math.round(age / 60)} min ago`;
  if (age < 48 * 3600) return `${Math.round(age / 3600)} h ago`;
  return `${Math.round(age / 86400)} d ago`;
}

/** @param {number | null | undefined} time  Unix seconds; shown in the reader's time zone */
export function formatTime(time) {
  if (time === null || time === undefined || !Number.isFinite(time)) return UNKNOWN;
  const date = new Date(time * 1000);
  /** @param {number} value */
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/**
 * A mean with its 95 % interval: "0.71 [0.66, 0.75]".
 * @param {{mean: number | null, low?: number | null, high?: number | null} | null | undefined} estimate
 * @param {number} [decimals]
 */
export function formatInterval(estimate, decimals = 2) {
  if (!estimate) return UNKNOWN;
  const mean = formatFixed(estimate.mean, decimals);
  const bounds = estimate.low === null || estimate.low === undefined ? "" : ` ${formatBounds(estimate.low, estimate.high, decimals)}`;
  return mean + bounds;
}

/**
 * @param {number | null | undefined} low
 * @param {number | null | undefined} high
 * @param {number} [decimals]
 */
export function formatBounds(low, high, decimals = 2) {
  return `[${formatFixed(low, decimals)}, ${formatFixed(high, decimals)}]`;
}

/**
 * "1 rollout", "12 rollouts".
 * @param {number} count
 * @param {string} word
 * @param {string} [words]
 */
export function plural(count, word, words = `${word}s`) {
  return `${formatCount(count)} ${count === 1 ? word : words}`;
}

/** @param {string} text */
function minus(text) {
  return text.replace(/^-/, "−");
}
