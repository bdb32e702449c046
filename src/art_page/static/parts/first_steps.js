/** What brings the first run here: a base URL and eight lines of code. */
import { getSession } from "../lib/api.js";
import { copyButton } from "../lib/copy.js";
import { h } from "../lib/dom.js";
import { empty } from "../lib/states.js";

/** @param {string} root  address of the server, without /v1 */
export function firstCode(root) {
  return `import asyncio, art

async def main():
    model = art.TrainableModel(name="agent-001", project="first", base_model="./tiny")
    await model.register(art.RemoteBackend("${root}"))
    messages = [{"role": "user", "content": "respond with yes or no"}]
    answer = await model.openai_client().chat.completions.create(model=model.get_inference_name(), messages=messages)
    await model.log([art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=1.0)], split="train")

asyncio.run(main())`;
}

/** The empty list of runs. */
export function firstSteps() {
  const { base_url: address, has_server: hasServer } = getSession();
  if (!hasServer || !address) return empty("No run in this folder.", h("p", null, "A data directory holds one folder for each project. ", h("code", null, "art demo"), " trains a small agent and leaves one."));
  const code = firstCode(address.replace(/\/v1\/?$/, ""));
  return empty("No run yet: the agent's first rollout appears here.", [
    h("p", null, "Point an OpenAI client at this server:"),
    h("div", { class: "row" }, h("code", null, address), copyButton(address)),
    h("p", null, "Or log a first rollout with this, after ", h("code", null, "art tiny-model ./tiny --task yes_no_maybe"), ". Its key comes from the variable ", h("code", null, "ART_API_KEY"), "."),
    h("pre", null, code),
    copyButton(code, "Copy the code"),
  ]);
}
