// LangChain for node: a chat model with a bound tool, with and without a stream, and structured answers.
import { HumanMessage, ToolMessage } from '@langchain/core/messages';
import { tool } from '@langchain/core/tools';
import { ChatOpenAI } from '@langchain/openai';
import { BASE, KEY, Key, MODEL, Place, QUESTION, QUESTIONS, lookUp, main, piecesOf } from './common.mjs';

const model = new ChatOpenAI({ model: MODEL, apiKey: KEY, configuration: { baseURL: `${BASE}/v1` } });
const find = tool(lookUp, { name: 'look_up', description: 'Find a value by its key.', schema: Key });
const agent = model.bindTools([find]);

/** Run a call, and make a message of its result or of its error. */
const run = (call) => find.invoke(call).catch(
  (error) => new ToolMessage({ content: `Error: ${error.message}`, tool_call_id: call.id, status: 'error' }),
);

/** Answer the calls of `ask`, a function from messages to an answer, until one calls no tool. */
async function loop(ask, messages = [new HumanMessage(QUESTION)]) {
  for (;;) {
    const answer = await ask(messages);
    messages.push(answer);
    if (answer.tool_calls.length === 0) return answer.text;
    messages.push(...(await Promise.all(answer.tool_calls.map(run))));
  }
}

await main('@langchain/openai', {
  tools: () => loop((messages) => agent.invoke(messages)),
  streamed: () => loop(async (messages) => {
    const chunks = await piecesOf(await agent.stream(messages));
    return chunks.reduce((answer, chunk) => answer.concat(chunk));
  }),
  async turns() {
    const messages = [];
    let answer;
    for (const question of QUESTIONS) {
      messages.push(new HumanMessage(question));
      answer = await loop((asked) => agent.invoke(asked), messages);
    }
    return answer;
  },
  structured: () => model.withStructuredOutput(Place, { name: 'place' }).invoke(QUESTION),
  structured_streamed: "a stream of `withStructuredOutput` has one part, the whole answer",
});
