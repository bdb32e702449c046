// openai for node: the tool runner of chat completions, and parsed answers.
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
import { BASE, KEY, Key, MODEL, Place, QUESTION, QUESTIONS, lookUp, lookUpOrError, main, piecesOf } from './common.mjs';

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY });
const asked = { model: MODEL, messages: [{ role: 'user', content: QUESTION }] };
const tools = [zodFunction({ name: 'look_up', parameters: Key, function: lookUp })];
const parsed = { ...asked, response_format: zodResponseFormat(Place, 'place') };

await main('openai', {
  tools: () => client.chat.completions.runTools({ ...asked, tools }).finalContent(),
  async streamed() {
    let answer = '';
    const runner = client.chat.completions.runTools({ ...asked, tools, stream: true });
    runner.on('content', (delta) => (answer += delta));
    await runner.done();
    return answer;
  },
  async turns() {
    const messages = [];
    const careful = [zodFunction({ name: 'look_up', parameters: Key, function: lookUpOrError })];
    for (const content of QUESTIONS) {
      const asked = [...messages, { role: 'user', content }];
      const runner = client.chat.completions.runTools({ model: MODEL, messages: asked, tools: careful });
      await runner.done();
      messages.splice(0, messages.length, ...runner.messages);
    }
    return messages.at(-1).content;
  },
  structured: async () => (await client.chat.completions.parse(parsed)).choices[0].message.parsed,
  async structured_streamed() {
    const stream = client.chat.completions.stream(parsed);
    await piecesOf(stream);
    return (await stream.finalChatCompletion()).choices[0].message.parsed;
  },
});
