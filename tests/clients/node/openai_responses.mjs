// openai for node: the Responses API, with and without a stream, and parsed answers.
import OpenAI from 'openai';
import { zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod';
import { BASE, KEY, Key, MODEL, Place, QUESTION, QUESTIONS, lookUpOrError, main, piecesOf } from './common.mjs';

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY });
const tools = [zodResponsesFunction({ name: 'look_up', parameters: Key })];
const parsed = { model: MODEL, input: QUESTION, text: { format: zodTextFormat(Place, 'place') } };

const resultsOf = (output) => output.filter((item) => item.type === 'function_call').map((call) => ({
  type: 'function_call_output', call_id: call.call_id, output: lookUpOrError(JSON.parse(call.arguments)),
}));

await main('openai', {
  async tools() {
    let input = QUESTION;
    let previous;
    for (;;) {
      const response = await client.responses.parse({ model: MODEL, input, tools, previous_response_id: previous });
      [input, previous] = [resultsOf(response.output), response.id];
      if (input.length === 0) return response.output_text;
    }
  },
  async turns() {
    const input = [];
    let response;
    for (const content of QUESTIONS) {
      input.push({ role: 'user', content });
      for (let results = []; ; ) {
        response = await client.responses.create({ model: MODEL, input, tools });
        results = resultsOf(response.output);
        input.push(...response.output, ...results);
        if (results.length === 0) break;
      }
    }
    return response.output_text;
  },
  async streamed() {
    const input = [{ role: 'user', content: QUESTION }];
    for (;;) {
      let answer = '';
      const stream = client.responses.stream({ model: MODEL, input, tools });
      stream.on('response.output_text.delta', ({ delta }) => (answer += delta));
      const { output } = await stream.finalResponse();
      const results = resultsOf(output);
      if (results.length === 0) return answer;
      input.push(...output, ...results);
    }
  },
  structured: async () => (await client.responses.parse(parsed)).output_parsed,
  async structured_streamed() {
    const stream = client.responses.stream(parsed);
    await piecesOf(stream);
    return (await stream.finalResponse()).output_parsed;
  },
});
