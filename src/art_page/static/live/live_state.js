/**
 * What the live view knows: requests, jobs and news, made from the server's events one after the other. No drawing here.
 *
 * @typedef {object} LiveRequest
 * @property {string} id  of the exchange
 * @property {string} project
 * @property {string} name  of the model
 * @property {number} policy_version
 * @property {string | null} rollout_id
 * @property {string | null} scenario
 * @property {number} turn  number of the answer in its conversation, from 1
 * @property {string | null} last_role
 * @property {string} last_text
 * @property {number} num_prompt_tokens
 * @property {number} max_tokens
 * @property {number} started_at
 * @property {boolean} is_text_known
 * @property {string} text  what was sampled, at most MAX_TEXT characters of its end
 * @property {number} numCut  characters that were cut from its beginning
 * @property {number} num_tokens
 * @property {number | null} firstAt  when its first token came here, Unix seconds
 * @property {EndedRequest | null} ended
 *
 * @typedef {object} EndedRequest  the wire type RequestEnded
 * @property {string} id
 * @property {string} project
 * @property {string} name
 * @property {number} policy_version
 * @property {string | null} rollout_id
 * @property {"stop" | "length" | "tool_calls" | "cancelled" | "failed"} outcome
 * @property {string | null} error
 * @property {number} num_prompt_tokens
 * @property {number} num_cached_tokens
 * @property {number} num_tokens
 * @property {number} started_at
 * @property {number} total_s
 * @property {number | null} queue_s
 * @property {number | null} prefill_s
 * @property {number | null} decode_s
 *
 * @typedef {{job_id: string, job_kind: string, project: string, name: string, state: string, phase: string | null, done: number | null, total: number | null, error: string | null}} LiveJob
 * @typedef {{at: number, type: string, model: string | null, step: number | null, text: string, isBad: boolean}} LiveNews
 * @typedef {object} LiveFacts
 * @property {Map<string, LiveRequest>} requests  those that run, and those that ended a moment ago
 * @property {EndedRequest[]} ended  newest last
 * @property {Map<string, LiveJob>} jobs  those that have not ended
 * @property {LiveNews[]} news  newest last
 * @property {{at: number, num: number}[]} rate  tokens that came in the last seconds
 */
import { formatNumber, formatSeconds } from "../lib/format.js";

const MAX_TEXT = 20000;
const MAX_ENDED = 200;
const MAX_NEWS = 100;
const RATE_S = 5;
/** How long a request that has ended keeps its place on the page. */
export const LINGER_S = 8;

/** @returns {LiveFacts} */
export function makeLiveFacts() {
  return { requests: new Map(), ended: [], jobs: new Map(), news: [], rate: [] };
}

/**
 * Take in one event of the server.
 * @param {LiveFacts} facts
 * @param {{type: string, data: any}} event
 * @param {number} now  Unix seconds
 */
export function takeLiveEvent(facts, { type, data }, now) {
  if (type === "reset") {
    facts.requests.clear();
    facts.jobs.clear();
    facts.ended = [];
  } else if (type === "request_started") {
    facts.requests.set(data.id, { ...data, numCut: 0, firstAt: data.num_tokens > 0 ? now : null, ended: null });
  } else if (type === "tokens") {
    for (const piece of data.pieces) addPiece(facts, piece, now);
  } else if (type === "request_ended") {
    endRequest(facts, data);
  } else if (type === "job_progress") {
    moveJob(facts, data, now);
  } else if (type === "step" || type === "finding") {
    addNews(facts, { at: now, type, ...newsOf(type, data) });
  }
}

/**
 * @param {LiveFacts} facts
 * @param {{id: string, text: string, num_tokens: number}} piece
 * @param {number} now
 */
function addPiece(facts, piece, now) {
  const last = facts.rate.at(-1);
  if (last && now - last.at < 0.25) last.num += piece.num_tokens;
  else facts.rate.push({ at: now, num: piece.num_tokens });
  const request = facts.requests.get(piece.id);
  if (!request) return;
  request.firstAt ??= now;
  request.num_tokens += piece.num_tokens;
  request.text += piece.text;
  if (request.text.length > 2 * MAX_TEXT) {
    request.numCut += request.text.length - MAX_TEXT;
    request.text = request.text.slice(-MAX_TEXT);
  }
}

/**
 * @param {LiveFacts} facts
 * @param {EndedRequest} data
 */
function endRequest(facts, data) {
  const request = facts.requests.get(data.id);
  if (request) request.ended = data;
  facts.ended.push(data);
  if (facts.ended.length > MAX_ENDED) facts.ended.shift();
}

/**
 * @param {LiveFacts} facts
 * @param {LiveJob} job
 * @param {number} now
 */
function moveJob(facts, job, now) {
  if (job.state === "queued" || job.state === "running" || job.state === "cancelling") {
    facts.jobs.set(job.job_id, job);
    return;
  }
  facts.jobs.delete(job.job_id);
  if (job.state === "succeeded") return;
  const text = job.state === "failed" ? `failed: ${job.error ?? "no reason is known"}` : "was cancelled";
  addNews(facts, { at: now, type: "job", model: `${job.project}/${job.name}`, step: null, text: `A job (${job.job_kind}) ${text}`, isBad: job.state === "failed" });
}

/**
 * @param {string} type
 * @param {any} data
 */
function newsOf(type, data) {
  const model = `${data.project}/${data.name}`;
  if (type === "finding") return { model, step: data.step, text: data.text, isBad: false };
  return { model, step: data.step, text: data.trained ? stepText(data.metrics) : "was not trained: nothing to learn", isBad: false };
}

/** @param {Record<string, number | null>} metrics */
function stepText(metrics) {
  /** @type {[string, string, (value: number | null) => string][]} */
  const shown = [
    ["reward", "data/reward_mean", formatNumber], ["entropy", "loss/entropy", formatNumber], ["KL to the sampler", "loss/kl_to_sampler", formatNumber],
    ["trained tokens", "ledger/trained_tokens", formatNumber], ["train", "time/step_trainer_s", formatSeconds], ["publish", "time/publish_s", formatSeconds],
  ];
  const parts = shown.filter(([, name]) => metrics[name] !== undefined).map(([word, name, format]) => `${word} ${format(metrics[name])}`);
  return parts.join(", ") || "is done";
}

/**
 * @param {LiveFacts} facts
 * @param {LiveNews} news
 */
function addNews(facts, news) {
  facts.news.push(news);
  if (facts.news.length > MAX_NEWS) facts.news.shift();
}

/**
 * Forget requests that ended a while ago. Returns whether one was forgotten.
 * @param {LiveFacts} facts
 * @param {number} now
 */
export function forgetEnded(facts, now) {
  let isChanged = false;
  for (const [id, request] of facts.requests) {
    if (request.ended && now - request.ended.started_at - request.ended.total_s > LINGER_S) {
      facts.requests.delete(id);
      isChanged = true;
    }
  }
  return isChanged;
}

/**
 * Tokens per second over the last seconds.
 * @param {LiveFacts} facts
 * @param {number} now
 */
export function tokenRate(facts, now) {
  while (facts.rate.length > 0 && now - facts.rate[0].at > RATE_S) facts.rate.shift();
  return facts.rate.reduce((sum, one) => sum + one.num, 0) / RATE_S;
}

/**
 * The running request that takes longest, if it takes much longer than others did: twice the 95th percentile.
 * @param {LiveRequest[]} running
 * @param {EndedRequest[]} ended
 * @param {number} now
 * @returns {{request: LiveRequest, age: number, median: number} | null}
 */
export function findStraggler(running, ended, now) {
  const totals = ended.filter((one) => one.outcome !== "cancelled" && one.outcome !== "failed").map((one) => one.total_s);
  if (totals.length < 10) return null;
  const oldest = running.reduce((/** @type {LiveRequest | null} */ first, one) => (first === null || one.started_at < first.started_at ? one : first), null);
  if (oldest === null) return null;
  const age = now - oldest.started_at;
  return age > 2 * quantile(totals, 0.95) ? { request: oldest, age, median: quantile(totals, 0.5) } : null;
}

/**
 * @param {number[]} values
 * @param {number} share  from 0 to 1
 */
export function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  if (sorted.length === 0) return NaN;
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  const high = Math.min(sorted.length - 1, low + 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}
