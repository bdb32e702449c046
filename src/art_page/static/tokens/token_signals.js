// What the tokens of a path can be coloured by: the values, their scale, and why a value is missing.

import { formatFixed, formatNumber, formatSigned } from "../lib/format.js";

/** @typedef {{ start: number, end: number, role: string, exchange_id: string|null, policy_version: number|null,
 *   sampled: boolean, trained: boolean, reason: string|null }} Span  tokens [start, end) that have one origin */
/** @typedef {(number|null)[]} Values */
/** @typedef {{ path: number, numTokens: number, ids: (number|null)[], texts: (string|null)[], isSpecial: boolean[], spans: Span[],
 *   values: Record<string, Values>, alternatives: Record<number, [number, string|null, number][]>, missing: string|null,
 *   step: number|null, update: number|null, spanOf: number[] }} PathTokens  the tokens that have arrived */
/** @typedef {"sequential"|"diverging"|"category"} Kind */
/** @typedef {{ key: string, label: string, kind: Kind, about: string }} Signal */
/** @typedef {{ kind: Kind, low: number, high: number, ticks: { at: number, text: string }[],
 *   place: (value: number) => number }} Scale  `place` maps a value to 0..1: from light to dark, or with the middle of a diverging scale at 0.5 */
/** @typedef {{ key: string, label: string, count: number, isSampled: boolean }} Category  `isSampled`: whether the policy sampled any of its tokens */

/** @type {Signal[]} */
export const SIGNALS = [
  { key: "sampling_logprob", label: "sampler log-prob", kind: "sequential", about: "How likely the engine found the token when it sampled it; 0 is certain." },
  { key: "policy_logprob", label: "trainer log-prob", kind: "sequential", about: "How likely the trainer's policy found the same token in this step." },
  { key: "importance_ratio", label: "importance ratio", kind: "diverging", about: "Trainer's probability divided by the sampler's. 1 means that both agree; the scale is logarithmic." },
  { key: "entropy", label: "entropy", kind: "sequential", about: "How open the choice was, in nats; 0 means that there was only one choice." },
  { key: "advantage", label: "advantage", kind: "diverging", about: "Positive: the step makes the token more likely. Negative: less likely." },
  { key: "mask", label: "mask", kind: "category", about: "Which tokens the step learnt from, and why it left the others out." },
  { key: "version", label: "policy version", kind: "category", about: "The step whose weights sampled the token." },
];

/** @param {string|undefined} key @returns {Signal} the signal of a key; the first one for an unknown key */
export function signalOf(key) {
  return SIGNALS.find((signal) => signal.key === key || signal.key.startsWith(`${key}_`) || signal.key.endsWith(`_${key}`)) ?? SIGNALS[0];
}

/** @param {string} key @returns {Signal} the signal after `key`, the first one after the last */
export function signalAfter(key) {
  return SIGNALS[(SIGNALS.findIndex((signal) => signal.key === key) + 1) % SIGNALS.length];
}

/** @param {Signal} signal @param {PathTokens} tokens @returns {Values} */
export function valuesOf(signal, tokens) {
  return tokens.values[signal.key] ?? [];
}

/** @param {number[]} sorted @param {number} share @returns {number} */
function quantileOfSorted(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

const RATIO_ENDS = [1.1, 1.25, 1.5, 2, 4, 8, 16];
const LOGPROB_LOW = -6;

/** The smallest of 1, 2, 5 times a power of ten that is at least `value`. @param {number} value @returns {number} */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const factor = [1, 2, 5, 10].find((step) => step * power >= value * 0.999999) ?? 10;
  return Number((factor * power).toPrecision(1));
}

/** @param {number} end a power of ten times 1, 2 or 5 @returns {number} decimals that show it */
function decimalsOf(end) {
  return Math.max(0, -Math.floor(Math.log10(end) + 1e-9));
}

/** @param {number} from @param {number} to @returns {(value: number) => number} maps `from`..`to` to 0..1 */
function clampedPlace(from, to) {
  return (value) => Math.min(1, Math.max(0, (value - from) / (to - from)));
}

/** The scale of a signal for the values at hand. Log-probs always run from -6 to 0, so that rollouts can be compared; the
 * other ends come from the values without their outermost hundredth, and values beyond an end get its colour.
 * @param {Signal} signal @param {Values} values @returns {Scale} */
export function scaleOf(signal, values) {
  const numbers = /** @type {number[]} */ (values.filter((value) => value !== null && Number.isFinite(value)));
  if (signal.key.endsWith("logprob")) {
    const ticks = [0, -2, -4, LOGPROB_LOW].map((at) => ({ at, text: at === LOGPROB_LOW ? "≤ −6" : formatFixed(at, 0) }));
    return { kind: "sequential", low: LOGPROB_LOW, high: 0, ticks, place: clampedPlace(0, LOGPROB_LOW) };
  }
  if (signal.key === "importance_ratio") {
    const far = numbers.map((value) => Math.abs(Math.log(Math.max(value, 1e-9)))).sort((a, b) => a - b);
    const needed = far.length > 0 ? quantileOfSorted(far, 0.99) : 0;
    const end = RATIO_ENDS.find((ratio) => Math.log(ratio) >= needed) ?? RATIO_ENDS[RATIO_ENDS.length - 1];
    const width = Math.log(end);
    const ticks = [1 / end, 1, end].map((at) => ({ at, text: at >= 1 ? String(at) : `1/${end}` }));
    const inLog = clampedPlace(-width, width);
    return { kind: "diverging", low: 1 / end, high: end, ticks, place: (value) => inLog(Math.log(Math.max(value, 1e-9))) };
  }
  const sizes = numbers.map(Math.abs).sort((a, b) => a - b);
  const end = roundUp(sizes.length > 0 ? quantileOfSorted(sizes, 0.99) : 1);
  if (signal.kind === "diverging") {
    const ticks = [-end, 0, end].map((at) => ({ at, text: formatSigned(at, decimalsOf(end)) }));
    return { kind: "diverging", low: -end, high: end, ticks, place: clampedPlace(-end, end) };
  }
  return { kind: "sequential", low: 0, high: end, ticks: [0, end / 2, end].map((at) => ({ at, text: formatNumber(at) })), place: clampedPlace(0, end) };
}

/** @param {Span|undefined} span @returns {string} why a token is learnt from or not */
export function maskOf(span) {
  if (span === undefined) return "not known";
  return span.trained ? "trained" : (span.reason ?? "not trained");
}

/** @param {Signal} signal @param {Span|undefined} span @returns {string} the category of a token for `mask` and `version` */
export function categoryOf(signal, span) {
  if (signal.key === "mask") return maskOf(span);
  return span === undefined || !span.sampled || span.policy_version === null ? "not sampled here" : String(span.policy_version);
}

/** The categories of a path with the number of tokens of each: trained or lower versions first.
 * @param {Signal} signal @param {Span[]} spans @returns {Category[]} */
export function categoriesOf(signal, spans) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  const sampled = new Set();
  for (const span of spans) {
    const key = categoryOf(signal, span);
    counts.set(key, (counts.get(key) ?? 0) + span.end - span.start);
    if (span.sampled) sampled.add(key);
  }
  const isLast = (/** @type {string} */ key) => key === "not sampled here" || key === "not known";
  const order = (/** @type {string} */ a, /** @type {string} */ b) =>
    Number(isLast(a)) - Number(isLast(b)) || Number(b === "trained") - Number(a === "trained")
    || (signal.key === "version" ? Number(a) - Number(b) : (counts.get(b) ?? 0) - (counts.get(a) ?? 0));
  return [...counts.keys()].sort(order).map((key) => {
    const label = signal.key === "version" && !isLast(key) ? `step ${key}` : key;
    return { key, label, count: counts.get(key) ?? 0, isSampled: sampled.has(key) };
  });
}

/** Why a token has no value of a signal, as a whole sentence.
 * @param {Signal} signal @param {PathTokens} tokens @param {number} token @returns {string} */
export function whyMissing(signal, tokens, token) {
  const span = tokens.spans[tokens.spanOf[token]];
  if (span !== undefined && !span.sampled) return `The model read this token and did not sample it${span.reason ? ` (${span.reason})` : ""}.`;
  const isKnownSomewhere = tokens.values[signal.key] !== undefined;
  if (isKnownSomewhere && span !== undefined && !span.trained) return `The step did not learn from this token (${maskOf(span)}).`;
  return tokens.missing ?? (isKnownSomewhere ? "It was not recorded for this token." : "It was not recorded for this rollout.");
}

/** Means and extremes of a signal in equal pieces of the path, for the strip that shows the whole path.
 * @param {Values} values @param {number} numTokens @param {number} numBins
 * @returns {{ low: number, high: number, mean: number, count: number }[]} a bin without values has a count of 0 */
export function binsOf(values, numTokens, numBins) {
  const bins = Array.from({ length: numBins }, () => ({ low: Infinity, high: -Infinity, mean: 0, count: 0 }));
  for (let token = 0; token < Math.min(values.length, numTokens); token += 1) {
    const value = values[token];
    if (value === null || value === undefined || !Number.isFinite(value)) continue;
    const first = Math.floor((token * numBins) / numTokens);
    const last = Math.max(first, Math.ceil(((token + 1) * numBins) / numTokens) - 1);
    for (let bin = first; bin <= last; bin += 1) {
      const into = bins[bin];
      into.low = Math.min(into.low, value);
      into.high = Math.max(into.high, value);
      into.mean += (value - into.mean) / (into.count += 1);
    }
  }
  return bins;
}

/** The tokens of an answer joined to those before it: `first` is where the answer begins in the path.
 * @param {any} answer a `RolloutTokens` @returns {PathTokens} */
export function emptyPath(answer) {
  const about = answer.paths.find((/** @type {any} */ entry) => entry.path === answer.path);
  const numTokens = about?.num_tokens ?? answer.token_ids.length;
  return { path: answer.path, numTokens, ids: [], texts: [], isSpecial: [], spans: [], values: {}, alternatives: {}, missing: answer.missing ?? null, step: answer.step ?? null, update: answer.update ?? null, spanOf: [] };
}

/** Appends one answer of at most 20,000 tokens to a path. Spans of the answer count from the start of the path.
 * @param {PathTokens} tokens @param {any} answer a `RolloutTokens` */
export function appendTokens(tokens, answer) {
  const first = tokens.ids.length;
  for (const [into, from] of [[tokens.ids, answer.token_ids], [tokens.texts, answer.texts], [tokens.isSpecial, answer.is_special]]) {
    for (const value of from) into.push(value);
  }
  for (const [key, added] of Object.entries(answer.values)) {
    const into = (tokens.values[key] ??= new Array(first).fill(null));
    for (const value of /** @type {Values} */ (added)) into.push(value);
  }
  for (const values of Object.values(tokens.values)) while (values.length < tokens.ids.length) values.push(null);
  Object.assign(tokens.alternatives, answer.alternatives);
  for (const span of answer.spans) {
    const last = tokens.spans[tokens.spans.length - 1];
    const isSame = last !== undefined && last.end >= span.start && last.exchange_id === span.exchange_id && last.role === span.role
      && last.sampled === span.sampled && last.trained === span.trained && last.reason === span.reason;
    if (isSame) last.end = Math.max(last.end, span.end);
    else tokens.spans.push({ ...span });
    const index = tokens.spans.length - 1;
    for (let token = Math.max(span.start, first); token < Math.min(span.end, tokens.ids.length); token += 1) tokens.spanOf[token] = index;
  }
}
