// What of a rollout can be taken elsewhere: its messages as OpenAI's API has them, and a request that gives an answer again.

import { get, getSession } from "../lib/api.js";

/** @typedef {import("./first_difference.js").Item} Item */

/** The messages of a conversation as JSON of the chat completions API. @param {Item[]} items @returns {string} */
export function messagesText(items) {
  return JSON.stringify(items.map((item) => ({
    role: item.role, content: item.text ?? "",
    ...(item.reasoning ? { reasoning_content: item.reasoning } : {}),
    ...(item.tool_calls?.length ? { tool_calls: item.tool_calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) } : {}),
    ...(item.tool_call_id ? { tool_call_id: item.tool_call_id } : {}),
  })), null, 2);
}

/** A command line that asks for an answer again.
 * @param {string} path address of the rollout's answer @param {string} exchange @returns {Promise<string>} */
export async function requestText(path, exchange) {
  const { body, notes } = await get(`${path}/request`, { exchange });
  return curlText(getSession().base_url ?? "$ART_SERVER_URL/v1", body, notes);
}

/** @param {string} base @param {any} body @param {string[]} notes @returns {string} */
export function curlText(base, body, notes) {
  const quoted = `'${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;
  const lines = [`curl "${base}/chat/completions" \\`, '  -H "Authorization: Bearer $ART_API_KEY" -H "Content-Type: application/json" \\', `  -d ${quoted}`];
  const always = "Not recorded, so add it if your agent sends it: stop, top_k, chat_template_kwargs.";
  return [...[...notes, always].map((note) => `# ${note}`), ...lines].join("\n");
}
