/**
 * Asks the server. Answers are kept with their ETag, so that asking again for what has not changed costs one short answer.
 *
 * @typedef {Record<string, string | number | boolean | null | undefined | (string | number)[]>} Params
 * @typedef {{type: string, data: any, id: string}} StreamEvent
 * @typedef {{key_id: string | null, scopes: string[], project: string | null, has_server: boolean, base_url: string | null, version: string}} Session
 */

import { answerOf, copySession } from "./page_copy.js";

const PAGE_HEADER = { "X-ART-Page": "1" };
const MAX_KEPT = 60;
/** @type {Map<string, {etag: string, answer: any}>} */
const keptAnswers = new Map();
/** @type {Session} */
let session = { key_id: null, scopes: [], project: null, has_server: false, base_url: null, version: "" };

/** What went wrong, in the server's own words. `status` is 0 when the server could not be reached. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

/**
 * Address of an answer: `path` is below view/api, for example "runs/search/agent-001".
 * @param {string} path
 * @param {Params} [params]
 */
export function apiPath(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, String(one));
  }
  const text = query.toString();
  return path.split("/").map(encodeURIComponent).join("/") + (text ? `?${text}` : "");
}

/**
 * Get an answer.
 * @param {string} path
 * @param {Params} [params]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, params, signal) {
  const address = apiPath(path, params);
  if (copySession() !== null) return getFromCopy(path, params ?? {}, address);
  const kept = keptAnswers.get(address);
  const response = await send(viewRoot() + address, { signal, headers: kept ? { "If-None-Match": kept.etag } : {} });
  if (response.status === 304 && kept) return kept.answer;
  const answer = await response.json();
  keep(address, response.headers.get("ETag"), answer);
  return answer;
}

/**
 * @param {string} path
 * @param {Params} params
 * @param {string} address
 */
async function getFromCopy(path, params, address) {
  const answer = path === "session" ? copySession() : await answerOf(path, params, address);
  if (answer === undefined) throw new ApiError(404, "This copy of the page has no answer to this. `art view` of the data directory has all.");
  return answer;
}

/**
 * @param {string} address
 * @param {string | null} etag
 * @param {any} answer
 */
function keep(address, etag, answer) {
  keptAnswers.delete(address);
  if (etag === null) return;
  keptAnswers.set(address, { etag, answer });
  if (keptAnswers.size > MAX_KEPT) keptAnswers.delete(/** @type {string} */ (keptAnswers.keys().next().value));
}

/**
 * @param {string} address
 * @param {RequestInit} options
 */
async function send(address, options) {
  if (copySession() !== null) throw new ApiError(405, "This is a copy of the page: nothing can be changed in it.");
  let response;
  try {
    response = await fetch(address, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (/** @type {Error} */ (error).name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Is it still running?");
  }
  if (response.ok || response.status === 304) return response;
  if (response.status === 401) dispatchEvent(new Event("artlogin"));
  throw new ApiError(response.status, await readMessage(response));
}

/** @param {Response} response */
async function readMessage(response) {
  try {
    const body = await response.json();
    return String(body.error?.message ?? body.detail ?? body.message);
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim();
  }
}

/**
 * Send an action to one of the server's own routes, for example "models/search/agent-001/fork".
 * @param {string} path
 * @param {any} body
 */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json", ...PAGE_HEADER };
  const response = await send(actionPath(path), { method: "POST", headers, body: JSON.stringify(body) });
  return readBody(response);
}

/**
 * Replace labels of a run.
 * @param {string} run  "project/name"
 * @param {{tags?: string[], notes?: string, star?: boolean, archived?: boolean}} changes
 * @returns {Promise<{tags: string[], notes: string, star: boolean, archived: boolean}>}
 */
export async function postLabels(run, changes) {
  const headers = { "Content-Type": "application/json", ...PAGE_HEADER };
  return readBody(await send(viewRoot() + apiPath(`runs/${run}/labels`), { method: "POST", headers, body: JSON.stringify(changes) }));
}

/**
 * Open a session by a key or by a one-time code. The answer sets a cookie that scripts cannot read.
 * @param {{key: string} | {code: string}} body
 */
export async function logIn(body) {
  keptAnswers.clear();
  await sendLogin("view/login", body);
}

/** End the session. */
export async function logOut() {
  keptAnswers.clear();
  await sendLogin("view/logout", {});
}

/**
 * @param {string} path
 * @param {any} body
 */
async function sendLogin(path, body) {
  const headers = { "Content-Type": "application/json", ...PAGE_HEADER };
  const options = /** @type {RequestInit} */ ({ method: "POST", credentials: "same-origin", headers, body: JSON.stringify(body) });
  const response = await fetch(serverRoot() + path, options);
  if (!response.ok) throw new ApiError(response.status, await readMessage(response));
}

/**
 * Get an answer of one of the server's own routes, for example "models/search/agent-001/checkpoints/12/files".
 * @param {string} path
 * @param {AbortSignal} [signal]
 */
export async function getAction(path, signal) {
  return readBody(await send(actionPath(path), { signal, headers: PAGE_HEADER }));
}

/** @param {Response} response */
async function readBody(response) {
  const text = await response.text();
  return text === "" ? null : JSON.parse(text);
}

/**
 * Address of one of the server's own routes, for links that download.
 * @param {string} path
 */
export function actionPath(path) {
  return serverRoot() + "api/" + path.split("/").map(encodeURIComponent).join("/");
}

function viewRoot() {
  return serverRoot() + "view/api/";
}

/** The page lies at the server's root, which a proxy may have put below a prefix. */
function serverRoot() {
  return new URL("./", document.baseURI).pathname;
}

/**
 * Follow a stream of server-sent events; the browser reconnects by itself and resumes by id.
 * @param {string} path
 * @param {(event: StreamEvent) => void} onEvent  also gets {type: "open"} and {type: "lost"} when the connection changes
 * @returns {() => void} stops the stream
 */
export function stream(path, onEvent) {
  if (!session.has_server) return () => {};
  const source = new EventSource(viewRoot() + path);
  const types = ["reset", "request_started", "tokens", "request_ended", "job_progress", "step", "finding"];
  for (const type of types) {
    source.addEventListener(type, (event) => {
      const message = /** @type {MessageEvent} */ (event);
      onEvent({ type, data: JSON.parse(message.data), id: message.lastEventId });
    });
  }
  source.addEventListener("open", () => onEvent({ type: "open", data: null, id: "" }));
  source.addEventListener("error", () => onEvent({ type: "lost", data: null, id: "" }));
  return () => source.close();
}

/** Ask once, at the start, what this key may do. */
export async function openSession() {
  session = await get("session");
  return session;
}

export function getSession() {
  return session;
}

/** Whether this page may change things: a server runs, and the key may train. */
export function canWrite() {
  return session.has_server && canLabel();
}

/** Whether this page may change tags, notes and marks of a run, which needs no server that trains. */
export function canLabel() {
  return session.scopes.includes("train") || session.scopes.includes("admin");
}
