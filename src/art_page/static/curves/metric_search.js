/** Search of metrics by name: every word must be found; a word may be a regular expression. */

/**
 * @param {string} text  what the reader typed, for example "loss kl" or "ratio_p(10|90)"
 * @returns {(name: string) => boolean}
 */
export function nameMatcher(text) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map(wordTest);
  return (name) => tests.every((test) => test(name));
}

/**
 * @param {string} word
 * @returns {(name: string) => boolean}
 */
function wordTest(word) {
  try {
    const pattern = new RegExp(word, "i");
    return (name) => pattern.test(name);
  } catch {
    const lower = word.toLowerCase();
    return (name) => name.toLowerCase().includes(lower);
  }
}

/**
 * Metrics by the part of their name before the first slash, in the order in which people read them.
 * @template {{name: string}} Metric
 * @param {Metric[]} metrics
 * @returns {[string, Metric[]][]}
 */
export function bySection(metrics) {
  /** @type {Map<string, Metric[]>} */
  const sections = new Map();
  for (const metric of metrics) {
    const slash = metric.name.indexOf("/");
    const section = slash < 0 ? "other" : metric.name.slice(0, slash);
    sections.set(section, [...(sections.get(section) ?? []), metric]);
  }
  return [...sections].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
}

const FIRST = ["val", "test", "train", "loss", "offpolicy", "ledger", "throughput", "time", "data", "publish", "costs"];

/** @param {string} section */
function rank(section) {
  const at = FIRST.indexOf(section);
  return at < 0 ? FIRST.length : at;
}
