// What the programs share. Each does one task with one library, as its users write it, and prints the answer as JSON.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { z } from 'zod';

/** Base URL without `/v1`, key and model name. */
export const { CLIENT_URL: BASE, CLIENT_KEY: KEY, CLIENT_MODEL: MODEL } = process.env;
export const QUESTION = 'what is under a b?';
/** What the task of three turns asks, one after the other. */
export const QUESTIONS = [QUESTION, 'what is under broken?', 'and what is under a b now?'];
export const Key = z.object({ key: z.string() });
export const Place = z.object({ shelf: z.enum(['a', 'b', 'c']), row: z.literal([1, 2, 3]) });

/** Find a value by its key. It fails for the key `broken`. */
export const lookUp = ({ key }) => {
  if (key === 'broken') throw new Error('there is no broken');
  return `value of ${key}`;
};

/** The result of `lookUp`, or its error as text, for libraries that leave both to the user. */
export const lookUpOrError = (key) => {
  try {
    return lookUp(key);
  } catch (error) {
    return `Error: ${error.message}`;
  }
};

/**
 * Run the task that the command line names, and print its answer with the version of the library.
 * `tasks` has a function for each task, or the reason why the library cannot do it.
 */
export async function main(library, tasks) {
  const installed = new URL(`../node_modules/${library}/package.json`, import.meta.url);
  const { version } = JSON.parse(readFileSync(installed, 'utf8'));
  const task = tasks[process.argv.at(-1)];
  const said = task === undefined ? { unwritten: true }
    : typeof task === 'string' ? { unsupported: task } : { answer: await task() };
  console.log(JSON.stringify({ version: `${library} ${version}`, ...said }));
}

/** The pieces of a stream, of which there must be more than one. */
export async function piecesOf(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  assert(pieces.length > 1, `a stream of ${pieces.length} pieces`);
  return pieces;
}
