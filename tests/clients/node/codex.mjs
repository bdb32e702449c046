// Codex, the command line agent of OpenAI, as it is installed: no proxy, and no setting but address, key and model.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { z } from 'zod';
import { BASE, KEY, MODEL, Place, QUESTION, QUESTIONS, main } from './common.mjs';

const program = new URL('../node_modules/@openai/codex/bin/codex.js', import.meta.url).pathname;
const home = mkdtempSync(join(tmpdir(), 'codex-'));
const env = { PATH: process.env.PATH, HOME: home, CODEX_HOME: home, ART_KEY: KEY };
writeFileSync(join(home, 'config.toml'), `
model = "${MODEL}"
model_provider = "art"
sandbox_mode = "danger-full-access"
[model_providers.art]
name = "art"
base_url = "${BASE}/v1"
env_key = "ART_KEY"
wire_api = "responses"
`);

/** Its last message; `command` is what comes after `codex exec`. */
function ask(...command) {
  const last = join(home, 'last.txt');
  execFileSync(
    process.execPath, [program, 'exec', '--skip-git-repo-check', '-o', last, ...command],
    { env, cwd: home, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] },
  );
  return readFileSync(last, 'utf8').trim();
}

await main('@openai/codex', {
  tools: () => ask(QUESTION),
  streamed: 'it prints whole messages',
  turns() {
    const [first, ...more] = QUESTIONS;
    ask(first);
    return more.map((question) => ask('resume', '--last', question)).at(-1);
  },
  structured() {
    const schema = join(home, 'schema.json');
    writeFileSync(schema, JSON.stringify(z.toJSONSchema(Place)));
    return JSON.parse(ask('--output-schema', schema, QUESTION));
  },
  structured_streamed: 'it prints whole messages',
});
