/** What a run was started with: the settings that matter first, then all that was recorded, by section. */
import { get } from "../lib/api.js";
import { copyButton } from "../lib/copy.js";
import { h } from "../lib/dom.js";
import { UNKNOWN } from "../lib/format.js";
import { showWhenLoaded } from "../lib/states.js";
import { flatSettings, settingsList } from "../parts/settings_table.js";

/** Sections in the order in which people read them; others follow. */
const SECTIONS = ["task", "recipe", "training", "sft", "pipeline", "program", "machine"];

/** @type {import("../lib/context.js").View} */
export const settingsView = {
  title: (route) => `Settings of ${route.args.join("/")}`,
  async show(root, route, ctx) {
    await showWhenLoaded(root, ctx.signal, () => get(`runs/${route.args.slice(0, 2).join("/")}`, {}, ctx.signal), drawSettings);
  },
};

/** @param {any} detail */
function drawSettings({ project, name, settings, base_model: baseModel, seed }) {
  const { program = {}, machine = {}, task = {}, training = {} } = settings;
  const rate = training.learning_rate ?? settings.sft?.learning_rate;
  /** @type {[string, import("../lib/dom.js").Child][]} */
  const facts = [
    ["task", task.name ? [task.name, h("span", { class: "soft" }, optionText(task.options))] : UNKNOWN],
    ["loss", training.loss?.type ?? UNKNOWN],
    ["learning rate", rate === undefined ? UNKNOWN : typeof rate === "object" ? `${rate.peak} ${rate.type}` : String(rate)],
    ["seed", seed ?? UNKNOWN],
    ["base model", baseModel ?? UNKNOWN],
    ["git commit", program.git_commit ? h("span", { title: program.git_commit }, program.git_commit.replace(/^([0-9a-f]{12})[0-9a-f]+/, "$1")) : UNKNOWN],
    ["versions", ["art", "torch", "transformers", "vllm", "python"].filter((one) => program[one]).map((one) => `${one} ${program[one]}`).join(", ") || UNKNOWN],
    ["machine", machine.host ? [machine.host, h("span", { class: "soft" }, ` ${machineText(machine)}`)] : UNKNOWN],
  ];
  const names = [...SECTIONS.filter((one) => settings[one] !== undefined), ...Object.keys(settings).filter((one) => !SECTIONS.includes(one)).sort()];
  const whole = names.filter((one) => typeof settings[one] === "object" && settings[one] !== null);
  const single = Object.fromEntries(names.filter((one) => !whole.includes(one)).map((one) => [one, settings[one]]));
  return [
    h("h1", { class: "unseen" }, `Settings of ${project}/${name}`),
    h("dl", { class: "figures settings-head" }, facts.map(([title, value]) => h("div", null, h("dt", null, title), h("dd", null, value)))),
    program.command ? h("div", { class: "command" }, h("h2", null, "Command"), h("pre", null, program.command), copyButton(program.command, "Copy the command")) : null,
    names.length === 0 ? settingsList(settings) : null,
    h("div", { class: "settings-sections" }, whole.map((one) => section(one, one === "program" ? { ...program, command: undefined } : settings[one])), Object.keys(single).length > 0 ? section("other", single) : null),
  ];
}

/**
 * @param {string} title
 * @param {any} settings
 */
function section(title, settings) {
  return Object.keys(flatSettings(settings)).length > 0 ? h("section", { "aria-label": `Section ${title}` }, h("h2", null, title), settingsList(settings)) : null;
}

/** @param {Record<string, any> | undefined} options */
function optionText(options) {
  return Object.entries(flatSettings(options)).map(([name, value]) => ` ${name}=${value}`).join("");
}

/** @param {any} machine */
function machineText({ system, cores, memory_gb: memory, gpus }) {
  const devices = (gpus ?? []).length > 0 ? gpus.join(", ") : "no GPU";
  return [system, cores ? `${cores} cores` : null, memory ? `${memory} GB` : null, devices].filter(Boolean).join(", ");
}
