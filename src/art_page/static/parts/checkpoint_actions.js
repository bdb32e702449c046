/** What can be done with a checkpoint: promote it, download its files, fork it, delete it. Each asks first and says what happens. */
import { actionPath, getAction, post } from "../lib/api.js";
import { announce } from "../lib/context.js";
import { askBefore, showDialog } from "../lib/dialog.js";
import { h } from "../lib/dom.js";
import { formatBytes } from "../lib/format.js";
import { link } from "../lib/router.js";

const POLL_MS = 700;
const ENDED = ["succeeded", "failed", "cancelled"];

/**
 * @typedef {{step: number, size_bytes: number, is_newest: boolean, is_best: boolean, is_promoted: boolean, metrics: Record<string, number>, parents: string[], created_at: number | null}} CheckpointRow
 * @typedef {{run: string[], signal: AbortSignal, onChange: () => Promise<void>}} ActionContext
 */

/**
 * @param {ActionContext} context
 * @param {CheckpointRow} checkpoint
 */
export async function downloadFiles({ run, signal }, { step }) {
  const path = `models/${run.join("/")}/checkpoints/${step}/files`;
  const answer = await getAction(path, signal);
  const rows = answer.files.map((/** @type {any} */ file) => h("tr", null,
    h("td", null, h("a", { href: actionPath(`${path}/${file.name}`), download: file.name }, file.name)),
    h("td", { class: "number" }, formatBytes(file.size)),
    h("td", { class: "mono", title: file.sha256 }, `${file.sha256.slice(0, 12)}...`)));
  showDialog(`Files of step ${step}`,
    h("p", null, "The folder is a PEFT adapter; with the manifest it is a whole checkpoint. ", h("code", null, `art checkpoints download ${run.join("/")} --step ${step}`), " fetches all of it and checks the hashes."),
    h("div", { class: "scroll", tabindex: 0 }, h("table", null, h("thead", null, h("tr", null, ["File", "Size", "SHA-256"].map((title) => h("th", { scope: "col", class: title === "Size" ? "number" : null }, title)))), h("tbody", null, rows))));
}

/**
 * @param {ActionContext} context
 * @param {CheckpointRow} checkpoint
 * @param {number | null} promoted  the step that is promoted now
 */
export function promoteCheckpoint({ run, onChange }, { step }, promoted) {
  const name = `${run.join("/")}@promoted`;
  const now = promoted === null ? "So far no checkpoint is promoted, and such requests fail." : `So far step ${promoted} answers them; it may be deleted after that.`;
  askBefore({
    title: `Promote step ${step}`,
    text: [
      h("p", null, "Requests to the model ", h("code", null, name), ` are answered by step ${step} from then on, whatever is trained. ${now}`),
      h("p", { class: "soft" }, `The engine loads the weights first. No deletion removes the promoted checkpoint. Requests to ${run.join("/")} still get the newest step.`),
    ],
    button: "Promote",
    act: async () => {
      await post(`models/${run.join("/")}/checkpoints/${step}/promote`, {});
      await onChange();
      announce(`Step ${step} answers requests to ${name}.`);
      return null;
    },
  });
}

/**
 * @param {ActionContext} context
 * @param {CheckpointRow} checkpoint
 */
export function forkCheckpoint({ run, signal, onChange }, { step }) {
  const [project, name] = run;
  const input = h("input", { type: "text", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", maxlength: 120, value: `${name}-${step}`.slice(0, 120), "aria-label": "Name of the new model" });
  askBefore({
    title: `Fork step ${step}`,
    text: [
      h("p", null, `Copies the weights of step ${step}, and the optimiser's state if it is still kept, to another model of the project ${project}. It is the newest checkpoint there; this run stays as it is.`),
      h("label", null, `${project}/`, input),
      h("p", { class: "soft" }, "A script that registers that name with the same base model continues from it, and requests to that name are answered by it."),
    ],
    button: "Fork",
    act: async () => {
      const target = input.value.trim();
      const job = await post(`models/${project}/${target}/fork`, { job_id: randomId(), from_project: project, from_name: name, step });
      await waitForJob(job, signal);
      await onChange();
      return h("p", null, `Step ${step} is in `, h("a", { href: link("checkpoints", [project, target]) }, `${project}/${target}`), ".");
    },
  });
}

/**
 * Delete one checkpoint. The server's call names those that stay, so the list is read just before.
 * @param {ActionContext} context
 * @param {CheckpointRow} checkpoint
 */
export function deleteCheckpoint({ run, signal, onChange }, { step, size_bytes: size }) {
  const path = `models/${run.join("/")}/checkpoints`;
  askBefore({
    title: `Delete step ${step}`,
    text: h("p", null, `Deletes the weights and the optimiser's state of step ${step} of ${run.join("/")} (${formatBytes(size)}) from the server's disk. It cannot be brought back. Rollouts, metrics and other checkpoints stay.`),
    button: "Delete",
    isDanger: true,
    act: async () => {
      const { steps } = await getAction(path, signal);
      const others = steps.filter((/** @type {number} */ one) => one !== step);
      const { deleted_steps: deleted } = await post(`${path}/delete`, { keep_steps: others });
      if (!deleted.includes(step)) throw new Error(`Step ${step} was kept: the newest, the best, the promoted and checkpoints in use are never deleted.`);
      await onChange();
      announce(`Step ${step} is deleted.`);
      return null;
    },
  });
}

/**
 * @param {any} job
 * @param {AbortSignal} signal
 */
async function waitForJob(job, signal) {
  let status = job;
  while (!ENDED.includes(status.state)) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    status = await getAction(`jobs/${job.job_id ?? job.id}`, signal);
  }
  if (status.state !== "succeeded") throw new Error(status.error?.message ?? status.error ?? `The job ended as ${status.state}.`);
}

/** An id that no other job has. `crypto.randomUUID` is missing on pages without https. */
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
