// The AI SDK. Its provider for OpenAI speaks the Responses API, and the one for compatible servers chat completions.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateObject, generateText, isStepCount, streamText, tool } from 'ai';
import { BASE, KEY, Key, MODEL, Place, QUESTION, QUESTIONS, lookUp, main, piecesOf } from './common.mjs';

const createProvider = { openai: createOpenAI, 'openai-compatible': createOpenAICompatible }[process.argv[2]];
const provider = createProvider({ name: 'art', baseURL: `${BASE}/v1`, apiKey: KEY, supportsStructuredOutputs: true });
const asked = { model: provider(MODEL), prompt: QUESTION };
const tools = { look_up: tool({ description: 'Find a value by its key.', inputSchema: Key, execute: lookUp }) };
const agent = { ...asked, tools, stopWhen: isStepCount(5) };
const chatter = { model: asked.model, tools, stopWhen: isStepCount(5) };

await main('ai', {
  tools: async () => (await generateText(agent)).text,
  streamed: async () => (await piecesOf(streamText(agent).textStream)).join(''),
  structured: async () => (await generateObject({ ...asked, schema: Place })).object,
  async structured_streamed() {
    const { partialOutputStream } = streamText({ ...asked, output: Output.object({ schema: Place }) });
    return (await piecesOf(partialOutputStream)).at(-1);
  },
  async turns() {
    const messages = [];
    let answer;
    for (const content of QUESTIONS) {
      messages.push({ role: 'user', content });
      answer = await generateText({ ...chatter, messages });
      messages.push(...answer.responseMessages);
    }
    return answer.text;
  },
});
