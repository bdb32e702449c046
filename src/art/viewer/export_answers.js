"use strict";
/**
 * Answers what the exported page asks, from files that are loaded when they are needed. `lib/api.js` asks here instead of
 * a server. Files register their answers by artAnswers({path: answer}), and the manifest by artManifest({...}).
 */
(() => {
  /** @type {Map<string, any>} */
  const answers = new Map();
  /** @type {Map<string, Promise<void>>} */
  const loading = new Map();
  let manifest = { files: [], runs: { runs: [], now: 0 }, left_out: [] };
  const known = new Set();
  const session = { key_id: null, scopes: [], project: null, has_server: false, base_url: null, version: "" };

  globalThis.artAnswers = (part) => {
    for (const [path, answer] of Object.entries(part)) answers.set(path, answer);
  };
  globalThis.artManifest = (value) => {
    manifest = value;
    for (const name of value.files) known.add(name);
  };

  function load(name) {
    if (!known.has(name)) return Promise.resolve();
    if (!loading.has(name)) {
      loading.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = name;
        script.addEventListener("load", () => resolve());
        script.addEventListener("error", () => reject(new Error(`The file ${name} of this export cannot be read. Was the whole folder copied?`)));
        document.head.append(script);
      }));
    }
    return loading.get(name);
  }

  async function find(file, path, missing) {
    await load(file);
    if (answers.has(path)) return answers.get(path);
    const why = manifest.left_out.length > 0 ? ` Left out are: ${manifest.left_out.join(" ")}` : "";
    throw new Error(`${missing} is not in this export.${why}`);
  }

  /** Answer an address as lib/api.js makes it, e.g. "runs/P/N/series?metric=a". */
  async function get(address) {
    const [path, text] = address.split("?");
    const query = new URLSearchParams(text ?? "");
    const parts = path.split("/").map(decodeURIComponent);
    if (path === "session") return session;
    if (path === "runs") return manifest.runs;
    if (parts[0] === "comparisons") return find("data/comparisons.js", parts.join("/"), "This comparison of models");
    if (parts[0] !== "runs") throw new Error("This is a copy of a run. What happens now is shown by the page of a running server only.");
    const [, project, name, kind, ...rest] = parts;
    const run = `runs/${project}/${name}`;
    const folder = `data/${project}/${name}`;
    if (kind === undefined) return find(`${folder}/run.js`, run, `The run ${project}/${name}`);
    if (kind === "series") return series(await find(`${folder}/run.js`, `${run}/series`, "This run"), query);
    if (kind === "ledger") return ledger(folder, run, query);
    if (kind === "steps" && rest[1] === "tree") {
      return subtree(await find(`${folder}/tree-${rest[0]}.js`, `${run}/steps/${rest[0]}/tree`, `The prefix tree of step ${rest[0]}`), query);
    }
    if (kind === "steps") return find(`${folder}/steps.js`, `${run}/steps/${rest[0]}`, `Step ${rest[0]}`);
    if (kind === "groups") return group(folder, run, rest);
    if (kind === "rollouts" && rest.length === 0) return rollouts(folder, run, query);
    if (kind === "rollouts" && rest[4] === "tokens") return tokens(folder, run, rest, query);
    if (kind === "rollouts") return find(`${folder}/${rest[0]}-${rest[1]}.js`, `${run}/rollouts/${rest.join("/")}`, "This rollout");
    if (kind === "checkpoints" && rest[0] === "compare") return comparison(folder, run, query);
    return find(`${folder}/run.js`, `${run}/${[kind, ...rest].join("/")}`, "This");
  }

  function number(query, name) {
    const text = query.get(name);
    return text === null || text === "" ? null : Number(text);
  }

  function series(all, query) {
    const [first, last] = [number(query, "first"), number(query, "last")];
    const chosen = query.getAll("metric").map((metric) => {
      const one = all.find((each) => each.metric === metric) ?? { metric, split: null, steps: [], mean: [], low: null, high: null, num: null, num_steps: null };
      const keep = one.steps.map((step) => (first === null || step >= first) && (last === null || step <= last));
      const cut = (list) => (list === null ? null : list.filter((_, place) => keep[place]));
      return { ...one, steps: cut(one.steps), mean: cut(one.mean), low: cut(one.low), high: cut(one.high), num: cut(one.num), num_steps: cut(one.num_steps) };
    });
    return { series: chosen, num_unreadable_lines: 0 };
  }

  async function ledger(folder, run, query) {
    const whole = await find(`${folder}/run.js`, `${run}/ledger`, "The ledger");
    const [first, last] = [number(query, "first") ?? whole.first, number(query, "last") ?? whole.last];
    if (whole.ledger === null || (first <= whole.first && last >= whole.last)) return whole;
    await load(`${folder}/steps.js`);
    const sum = { sampled: 0, trained: 0, context: 0, dropped: {} };
    const steps = [];
    for (let step = first; step <= last; step++) {
      const one = answers.get(`${run}/steps/${step}`)?.ledger;
      if (!one) continue;
      steps.push(step);
      for (const name of ["sampled", "trained", "context"]) sum[name] += one[name];
      for (const [reason, count] of Object.entries(one.dropped)) sum.dropped[reason] = (sum.dropped[reason] ?? 0) + count;
    }
    return { ...whole, ledger: steps.length > 0 ? sum : null, first: steps[0] ?? null, last: steps.at(-1) ?? null, num_steps: steps.length };
  }

  function subtree(tree, query) {
    const top = number(query, "node");
    if (top === null) return tree;
    const inside = new Set([top]);
    const above = [];
    for (const node of tree.nodes) if (inside.has(node.parent)) inside.add(node.id);
    for (let id = tree.nodes.find((node) => node.id === top)?.parent ?? null; id !== null; id = tree.nodes.find((node) => node.id === id).parent) above.unshift(id);
    return { ...tree, above, nodes: tree.nodes.filter((node) => inside.has(node.id)) };
  }

  async function group(folder, run, [split, step, place]) {
    const answer = await find(`${folder}/${split}-${step}.js`, `${run}/groups/${split}/${step}/${place}`, "This group");
    const detail = (index) => answers.get(`${run}/rollouts/${split}/${step}/${place}/${index}`);
    return { ...answer, rollouts: answer.rollouts.map(detail).filter((rollout) => rollout !== undefined) };
  }

  async function tokens(folder, run, rest, query) {
    const path = `${run}/rollouts/${rest.join("/")}?${number(query, "path") ?? 0}`;
    const answer = await find(`${folder}/${rest[0]}-${rest[1]}-tokens.js`, path, "The record of the exact tokens of this rollout");
    if ((number(query, "first") ?? 0) < answer.first + answer.token_ids.length) return answer;
    throw new Error("This export has the first 20,000 tokens of a path only.");
  }

  async function comparison(folder, run, query) {
    const [a, b, split] = [query.get("a"), query.get("b"), query.get("split") ?? "val"];
    await load(`${folder}/run.js`);
    const prefix = `${run}/checkpoints/compare?`;
    const splits = [...answers.keys()].filter((path) => path.startsWith(prefix) && path.endsWith(`&${a}&${b}`)).map((path) => path.slice(prefix.length).split("&")[0]);
    if (splits.length > 0 && !splits.includes(split)) return { ...answers.get(`${prefix}${splits[0]}&${a}&${b}`), num_scenarios: 0, scenarios: [], splits };
    const answer = await find(`${folder}/run.js`, `${run}/checkpoints/compare?${split}&${a}&${b}`, `The comparison of steps ${a} and ${b} on ${split}`);
    const offset = number(query, "offset") ?? 0;
    return { ...answer, scenarios: answer.scenarios.slice(offset, offset + (number(query, "limit") ?? 100)) };
  }

  const SORTED_BY = { tokens: "num_tokens", turns: "num_turns", duration: "duration_s" };

  async function rollouts(folder, run, query) {
    const all = await find(`${folder}/rows.js`, `${run}/rollouts`, "The table of rollouts");
    const filters = ["split", "outcome", "stop", "scenario"].filter((name) => query.get(name));
    const numbers = ["step", "group"].filter((name) => query.get(name));
    const [least, most, dropped] = [number(query, "min_reward"), number(query, "max_reward"), query.get("dropped")];
    let rows = all.filter((row) =>
      filters.every((name) => row[name] === query.get(name)) && numbers.every((name) => row[name] === number(query, name)) &&
      (least === null || (row.reward !== null && row.reward >= least)) && (most === null || (row.reward !== null && row.reward <= most)) &&
      (!dropped || (dropped === "none" ? row.dropped_because === null : dropped === "any" ? row.dropped_because !== null : row.dropped_because === dropped)));
    if (query.get("text")) rows = await containing(folder, run, rows, query.get("text"));
    const field = SORTED_BY[query.get("sort")] ?? query.get("sort") ?? "step";
    const sign = (query.get("descending") ?? "true") === "true" ? -1 : 1;
    rows = [...rows].sort((a, b) => compare(a[field], b[field], sign) || a.step - b.step || a.group - b.group || a.index - b.index);
    const offset = number(query, "offset") ?? 0;
    const different = (name) => [...new Set(all.map((row) => row[name]).filter((value) => value !== null))].sort();
    return { rows: rows.slice(offset, offset + (number(query, "limit") ?? 100)), total: rows.length, is_total_exact: true, indexing: null, stops: different("stop"), dropped: different("dropped_because") };
  }

  /** Rows without a value come last in either direction. */
  function compare(a, b, sign) {
    if (a === null || b === null) return (a === null ? 1 : 0) - (b === null ? 1 : 0);
    return a < b ? -sign : a > b ? sign : 0;
  }

  /** The rows whose rollout has all words, or phrases in double quotes. A star at the end of a word is left out. */
  async function containing(folder, run, rows, text) {
    const words = [...text.toLowerCase().matchAll(/"([^"]+)"|(\S+)/g)].map((match) => match[1] ?? match[2].replace(/\*$/, ""));
    for (const place of new Set(rows.map((row) => `${row.split}-${row.step}`))) await load(`${folder}/${place}.js`);
    return rows.flatMap((row) => {
      const said = textsOf(answers.get(`${run}/rollouts/${row.split}/${row.step}/${row.group}/${row.index}`));
      const all = said.join("\n").toLowerCase();
      return words.every((word) => all.includes(word)) ? [{ ...row, snippet: snippet(said, words[0]) }] : [];
    });
  }

  /** What was said in a rollout, and about it. */
  function textsOf(detail) {
    if (!detail) return [];
    const items = detail.histories.flatMap((history) => history.items);
    const calls = items.flatMap((item) => item.tool_calls.map((call) => `${call.name} ${call.arguments}`));
    const said = [...items.flatMap((item) => [item.reasoning, item.text]), ...calls, ...detail.logs, detail.judge?.explanation, detail.error];
    return said.filter((text) => text);
  }

  /** The words around the first match, as the server's search shows them. */
  function snippet(said, word) {
    const text = said.find((one) => one.toLowerCase().includes(word));
    if (word === undefined || text === undefined) return null;
    const at = text.toLowerCase().indexOf(word);
    const first = Math.max(0, at - 40);
    return { text: text.slice(first, at + word.length + 80), start: at - first, end: at - first + word.length };
  }

  globalThis.artExport = { get };
})();
