"""`art judge check FILE` measures a judge before its scores become rewards; `art judge serve` serves a scripted one.

    art judge check .art/shop/models/agent-1/trajectories/val/12.jsonl --judge openai/o3 --label win

FILE holds groups as `model.log` writes them. Each is judged three times per repeat, in two orders. The table says how
much of a score is noise, what the order does to it, how often it agrees with labels, and what it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from art.cli.judging import judge_serve
from art.cli.terminal.screen import Screen, progress_bar
from art.errors import ConfigError, JudgeError
from art.recipes.recipe_config import require_installed
from art.rewards import DEFAULT_RUBRIC, JudgeSettings, Ruler, params_at
from art.rewards.measuring.check import JudgeReport, check_judge
from art.storage.trajectories import read_groups
from art.task import get_task
from art.trajectory import Trajectory, TrajectoryGroup


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="ask a judge about groups of a file, several times each")
    check.add_argument("file", type=Path, metavar="FILE", help="groups, one JSON object per line")
    check.add_argument("--judge", required=True, metavar="MODEL", help="as litellm names it, e.g. openai/o3")
    check.add_argument("--judge-url", metavar="URL", help="of an OpenAI-compatible server that answers for MODEL")
    what = check.add_mutually_exclusive_group()
    what.add_argument("--judge-rubric", type=Path, metavar="FILE", help="what is good, in prose (default: RULER's)")
    what.add_argument("--task", help="task whose rubric says what is good, as in `art train`")
    check.add_argument(
        "--label", metavar="NAME",
        help="metric or metadata of the trajectories that tells which is better (default: the reward that the rollout "
        "set)",
    )  # fmt: skip
    check.add_argument("--max-groups", type=int, default=50, help="judge this many at most (default: 50)")
    check.add_argument("--repeats", type=int, default=1, help="of the three questions per group (default: 1)")
    check.add_argument("--seed", type=int, default=0, help="of the orders (default: 0)")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the numbers for scripts")
    judge_serve.add_parser(actions)


def run(args: argparse.Namespace) -> int:
    if not args.file.exists():
        raise ConfigError(f"there is no file {args.file}; `model.log` writes trajectories/<split>/<step>.jsonl")
    groups = list(read_groups(args.file))[: args.max_groups]
    judge = Ruler(
        args.judge, rubric=_rubric(args), extra_litellm_params=params_at(args.judge_url),
        settings=JudgeSettings(cache_path=None),
    )  # fmt: skip
    if not any(len(group) > 1 for group in groups):
        raise ConfigError(f"{args.file} has no group of at least two trajectories, so there is nothing to compare")
    require_installed(judge)
    console = Screen()
    with progress_bar(console, transient=True) as progress:
        bar = progress.add_task("judging", total=len(groups) * args.repeats)
        report = asyncio.run(
            check_judge(
                judge, groups, label=partial(labels_of, args.label), repeats=args.repeats, seed=args.seed,
                on_trial=lambda: progress.advance(bar),
            )
        )  # fmt: skip
    if args.json:
        values = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(report).items()}
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if not report.num_groups:
        raise ConfigError(f"in {args.file} the trajectories of each group are equal, so there is nothing to compare")
    if not report.num_questions:
        raise JudgeError(f"{args.judge} scored none of {report.num_groups} groups: {report.faults[0]}")
    _show(console, args.judge, report)
    return 0


def _rubric(args: argparse.Namespace) -> str:
    if args.judge_rubric is not None:
        return str(args.judge_rubric.read_text(encoding="utf-8"))
    return (get_task(args.task).rubric if args.task else None) or DEFAULT_RUBRIC


def labels_of(name: str | None, group: TrajectoryGroup) -> list[float] | None:
    """True scores of a group's trajectories, to measure a judge with; `None` if one has none or all are equal.

    Args:
        name: metric or metadata that holds the label; `None` takes the reward that the rollout set.
    """
    labels = [_label(trajectory, name) for trajectory in group]
    known = [float(label) for label in labels if isinstance(label, (int, float)) and math.isfinite(label)]
    return known if len(known) == len(group) and len(set(known)) > 1 else None


def _label(trajectory: Trajectory, name: str | None) -> object:
    if name is None:  # in a group that was judged, `independent_reward` is the reward that the rollout set
        return trajectory.metrics.get("independent_reward", trajectory.reward)
    return trajectory.metrics.get(name, trajectory.metadata.get(name))


def _show(console: Console, judge: str, report: JudgeReport) -> None:
    title = f"{judge} on {report.num_groups} groups ({report.num_trajectories} trajectories)"
    table = Table("", "measured", "means", title=title)
    low, high = report.order_bias_interval
    cost = "unknown price" if report.cost_usd is None else f"{report.cost_usd:.4f} USD"
    rows = [
        ("groups without scores", f"{len(report.faults)}", "the judge failed: these would be set aside"),
        ("answers refused", f"{report.num_refused} of {report.num_questions}", "asked for again"),
        ("spread in a group", _number(report.spread), "standard deviation of scores: what there is to learn from"),
        ("noise of a score", _number(report.noise), "the same question asked twice"),
        ("repeatability", _number(report.repeatability), "1: the second answer is the first; 0: no relation"),
        ("order bias", f"{report.order_bias:+.3f} ({low:+.3f}, {high:+.3f})", "gain of the first over the last place"),
        ("reliability, one pass", _number(report.order_reliability), "of what training is given with passes=1"),
        ("reliability, two passes", _number(report.two_pass_reliability), "with passes=2"),
        ("pairs in the right order", _number(report.pairwise_accuracy), "by the labels; 0.5 is chance"),
        ("the same, two passes", _number(report.two_pass_accuracy), "with passes=2"),
        ("rank correlation", _number(report.spearman), "Spearman, with the labels, within groups"),
        ("time of a question", f"{report.seconds_median:.2f} s, at most {report.seconds_max:.2f} s", "median"),
        ("cost of this check", cost, f"{report.num_questions} questions"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for fault in sorted(set(report.faults))[:5]:
        console.print(f"no scores: {fault}", highlight=False, soft_wrap=True)


def _number(value: float) -> str:
    return "not known" if math.isnan(value) else f"{value:.3f}"
