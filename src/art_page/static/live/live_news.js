/** What trains now, and what happened lately: steps, findings, jobs that failed. */
import { h, replace } from "../lib/dom.js";
import { formatCount, formatTime, plural } from "../lib/format.js";
import { link } from "../lib/router.js";

const MAX_NEWS_LINES = 50;
/** @typedef {import("./live_state.js").LiveJob} LiveJob */

export class LiveNewsList {
  constructor() {
    this.jobs = h("ul", { class: "live-jobs" });
    this.lines = h("ol", { class: "live-news" });
    this.empty = h("p", { class: "soft small" }, "Steps and findings appear here.");
    this.element = h("section", { "aria-label": "Training and news" }, h("h2", null, "Training"), this.jobs, this.lines, this.empty);
    this.drawn = "";
    this.drawnJobs = "";
  }

  /**
   * @param {LiveJob[]} jobs
   * @param {import("./live_state.js").LiveNews[]} news  newest last
   */
  update(jobs, news) {
    const jobText = JSON.stringify(jobs);
    if (jobText !== this.drawnJobs) {
      this.drawnJobs = jobText;
      replace(this.jobs, jobs.map(jobLine));
    }
    const newest = `${news.length} ${news.at(-1)?.at ?? 0}`;
    if (newest !== this.drawn) {
      this.drawn = newest;
      replace(this.lines, news.slice(-MAX_NEWS_LINES).reverse().map(newsLine));
    }
    this.empty.hidden = jobs.length + news.length > 0;
  }
}

/** @param {LiveJob} job */
function jobLine(job) {
  const who = h("a", { href: link("run", [job.project, job.name]) }, `${job.project}/${job.name}`);
  if (job.state === "queued") return h("li", null, who, h("span", { class: "soft" }, ` waits for its turn (${job.job_kind})`));
  const hasParts = job.total !== null && job.total > 0;
  const unit = job.phase === "train" ? plural(job.total ?? 0, "micro-batch", "micro-batches") : formatCount(job.total);
  const text = ` ${job.phase ?? "is being prepared"}${hasParts ? ` ${formatCount(job.done)} of ${unit}` : ""}`;
  return h("li", null, who, h("span", { class: "soft" }, text), hasParts ? h("progress", { max: job.total, value: job.done ?? 0, "aria-label": `Progress of ${job.project}/${job.name}` }) : null);
}

/** @param {import("./live_state.js").LiveNews} news */
function newsLine(news) {
  const [project, ...rest] = (news.model ?? "").split("/");
  const at = h("time", { class: "small soft nowrap" }, formatTime(news.at).slice(11));
  const step = news.step === null ? "" : ` step ${news.step}`;
  const who = news.model === null ? null : h("a", { href: link("run", [project, rest.join("/")]) }, `${news.model}${step}`);
  const kind = news.type === "finding" ? h("span", { class: "chip chip-note" }, "finding") : null;
  return h("li", { class: news.isBad ? "bad" : null }, at, h("span", null, who, who ? " " : null, kind, kind ? " " : null, news.text));
}
