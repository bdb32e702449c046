// Claude Code, the command line agent of Anthropic, as it is installed: no proxy, and no setting but address, key and model.
import assert from 'node:assert';
import { execFileSync } from 'node:child_process';
import { mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { BASE, KEY, MODEL, QUESTION, QUESTIONS, main } from './common.mjs';

const program = new URL('../node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs', import.meta.url).pathname;
const home = mkdtempSync(join(tmpdir(), 'claude-code-'));
const env = { PATH: process.env.PATH, HOME: home, ANTHROPIC_BASE_URL: BASE, ANTHROPIC_API_KEY: KEY };

/** What it prints for a question. */
const ask = (question, ...options) => execFileSync(
  process.execPath,
  [program, '-p', question, '--model', MODEL, '--allowedTools', 'Bash', ...options],
  { env, cwd: home, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] },
).trim();

await main('@anthropic-ai/claude-code', {
  tools: () => ask(QUESTION),
  streamed() {
    const printed = ask(QUESTION, '--output-format', 'stream-json', '--include-partial-messages', '--verbose');
    const events = printed.split('\n').map((line) => JSON.parse(line));
    assert(events.filter(({ type }) => type === 'stream_event').length > 1);
    return events.at(-1).result;
  },
  turns() {
    const [first, ...more] = QUESTIONS;
    ask(first);
    return more.map((question) => ask(question, '--continue')).at(-1);
  },
  structured: 'its `--json-schema` is a tool that the model may call, which the server cannot demand',
  structured_streamed: 'its `--json-schema` is a tool that the model may call, which the server cannot demand',
});
