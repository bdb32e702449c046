"""`art judge`: measure a judge before its scores become rewards, or serve a scripted one.

    cd .art/shop/models/agent-1/trajectories
    art judge check val/12.jsonl --judge openai/o3 --label win

FILE holds groups as `model.log` writes them. Each is judged twice per repeat, in two orders. The table says how
reliable a score is, what the order does to it, how often it agrees with labels, and what it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import re
import shlex
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from art.cli.arguments import TASK_HELP, add_task_options
from art.client.terminal import ProgressLine
from art.errors import ConfigError, JudgeError
from art.rewards import DEFAULT_RUBRIC, JudgeSettings, Ruler, params_at
from art.storage.trajectories import read_groups
from art.task import Task, get_task
from art.task.attributes import load_attribute
from art.testing.judge import Grade, ScriptedJudge, grade_conduct, grade_messages
from art.testing.scripted_server import Reply, ScriptedServer, failure
from art.trajectory import TrajectoryGroup
from art_recipes.arguments import task_for
from art_recipes.judge_check import JudgeReport, check_judge
from art_recipes.screen import Screen
from art_recipes.scripted_generator import ScriptedGenerator
from art_recipes.training.recipe_config import require_installed


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="ask a judge about groups of a file, several times each")
    check.add_argument("file", type=Path, metavar="FILE", help="groups, one JSON object per line")
    check.add_argument("--judge", required=True, metavar="MODEL", help="as litellm names it, e.g. openai/o3")
    check.add_argument(
        "--judge-url", metavar="URL", help="address of an OpenAI-compatible server that answers for MODEL"
    )
    what = check.add_mutually_exclusive_group()
    what.add_argument("--judge-rubric", type=Path, metavar="FILE", help="what is good, in prose (default: RULER's)")
    what.add_argument("--task", help="task whose rubric says what is good, as in `art train`")
    check.add_argument(
        "--label", metavar="NAME",
        help="metric or metadata of the trajectories that tells which is better (default: the reward that the rollout "
        "set)",
    )  # fmt: skip
    check.add_argument("--max-groups", type=int, default=50, help="judge this many at most (default: 50)")
    check.add_argument(
        "--repeats", type=int, default=1, help="how often the two questions per group are asked (default: 1)"
    )
    check.add_argument("--seed", type=int, default=0, help="seed of the orders (default: 0)")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the numbers for scripts")
    add_serve_parser(actions)


def run(args: argparse.Namespace) -> int:
    if not args.file.exists():
        raise ConfigError(f"there is no file {args.file}; `model.log` writes trajectories/<split>/<step>.jsonl")
    groups = list(read_groups(args.file))[: args.max_groups]
    rubric = (get_task(args.task).rubric if args.task else None) or DEFAULT_RUBRIC
    if args.judge_rubric is not None:
        rubric = args.judge_rubric.read_text(encoding="utf-8")
    where, settings = params_at(args.judge_url), JudgeSettings()
    judge = Ruler(args.judge, rubric=rubric, extra_litellm_params=where, settings=settings)
    if not any(len(group) > 1 for group in groups):
        raise ConfigError(f"{args.file} has no group of at least two trajectories, so there is nothing to compare")
    require_installed(judge)
    console = Screen()
    total = len(groups) * args.repeats
    with ProgressLine("judging") as line:
        line.update(0, total)
        report = asyncio.run(
            check_judge(
                judge, groups, label=partial(labels_of, args.label), repeats=args.repeats, seed=args.seed,
                on_trial=lambda: line.update(line.done + 1, total),
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


def labels_of(name: str | None, group: TrajectoryGroup) -> list[float] | None:
    """True scores of a group's trajectories, to measure a judge with; `None` if one has none or all are equal.

    Args:
        name: metric or metadata that holds the label; `None` takes the reward that the rollout set.
    """
    if name is None:  # in a group that was judged, `independent_reward` is the reward that the rollout set
        labels: list[Any] = [one.metrics.get("independent_reward", one.reward) for one in group]
    else:
        labels = [one.metrics.get(name, one.metadata.get(name)) for one in group]
    known = [float(label) for label in labels if isinstance(label, (int, float)) and math.isfinite(label)]
    return known if len(known) == len(group) and len(set(known)) > 1 else None


def _show(console: Console, judge: str, report: JudgeReport) -> None:
    title = f"{judge} on {report.num_groups} groups ({report.num_trajectories} trajectories)"
    table = Table("", "measured", "means", title=title)
    low, high = report.order_bias_interval
    cost = "unknown price" if report.cost_usd is None else f"{report.cost_usd:.4f} USD"
    rows = [
        ("groups without scores", f"{len(report.faults)}", "the judge failed: these would be set aside"),
        ("answers refused", f"{report.num_refused} of {report.num_questions}", "asked for again"),
        ("spread in a group", _number(report.spread), "standard deviation of scores: what there is to learn from"),
        ("order bias", f"{report.order_bias:+.3f} ({low:+.3f}, {high:+.3f})", "gain of the first over the last place"),
        ("reliability, one pass", _number(report.order_reliability), "of what training is given with passes=1"),
        ("reliability, two passes", _number(report.two_pass_reliability), "with passes=2"),
        ("pairs in the right order", _number(report.pairwise_accuracy), "by the labels; 0.5 is chance"),
        ("the same, two passes", _number(report.two_pass_accuracy), "with passes=2"),
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


def add_serve_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "serve", help="serve a scripted judge and generator without network, for trying things",
        description=inspect.getdoc(serve),
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--task", help=TASK_HELP)
    how.add_argument("--score", metavar="FUNC", help="module:function from a list of messages to 0 to 1")
    add_task_options(parser)
    parser.add_argument(
        "--base-model", help="base model that will be trained on the task, since tiny models may do a smaller form of "
        "it (default: a tiny model)",
    )  # fmt: skip
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of a score's error (default: 0)")
    parser.add_argument(
        "--position-bias", type=float, default=0.0, metavar="B",
        help="added to what is shown first and taken from what is shown last (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--fault-rate", type=float, default=0.0, metavar="P",
        help="share of requests that fail: overload, errors, answers of no use (default: 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and failures (default: 0)")
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="scenarios to give as a generator, one per line")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default: 0)")
    parser.set_defaults(run=serve)


def serve(args: argparse.Namespace) -> int:
    """Serve a judge and a writer of scenarios without network, to try --judge and --generator with.

        art judge serve --task nim:Nim --noise 0.1 --position-bias 0.1

    It serves an OpenAI-compatible address on this machine, follows a script, and asks no model. It scores a rollout

        --task TASK    by the task's `score_messages(messages)`
        --score FUNC   by a function `module:function` of the messages, 0 to 1
        otherwise      by conduct: it ends with an answer, no call fails, few words

    When asked for scenarios it gives the lines of --inputs.
    """
    console, reply, served = Screen(), scripted_models(args), threading.Event()
    try:
        with ScriptedServer(reply, args.port) as server:
            shared = [word for key, value in args.task_options for word in ("-o", f"{key}={value}")]
            shared += ["--base-model", args.base_model] if args.base_model else []
            task = shlex.join([args.task or "my_module:MyTask", *shared])
            console.print(
                f"judging and writing scenarios at {server.base_url} until Ctrl-C; for example\n\n"
                f"    art train {task} --judge openai/judge --judge-url {server.base_url}\n",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
            served.wait()
    except OSError as error:
        raise ConfigError(f"--port {args.port}: cannot listen there: {error.strerror}; 0 takes a free one") from error
    except KeyboardInterrupt:
        console.print()
    return 0


def scripted_models(args: argparse.Namespace) -> Callable[[dict[str, Any]], Reply]:
    """Make a function that answers chat requests: as a judge if they show rollouts to score, else as a generator.

    Raises:
        ConfigError: an option is out of range, or names something that does not exist.
    """
    for option in ("noise", "position_bias", "fault_rate"):
        if not 0 <= getattr(args, option) <= 1:
            raise ConfigError(f"--{option.replace('_', '-')} must be 0 to 1, got {getattr(args, option)}")
    judge = ScriptedJudge(
        _grade(args), noise=args.noise, position_bias=args.position_bias, fault_rate=args.fault_rate, seed=args.seed
    )
    generator = ScriptedGenerator(inputs=_read_inputs(args.inputs), fault_rate=args.fault_rate, seed=args.seed)

    def reply(body: dict[str, Any]) -> Reply:
        texts = [str(message.get("content")) for message in body.get("messages", [])]
        if len(texts) >= 2 and any("BEGIN EVIDENCE" in text for text in texts):
            return judge.answer(body)
        asks_for_scenarios = len(texts) >= 2 and re.search(r"^(The job: |Write exactly \d+ )", texts[1], re.MULTILINE)
        if asks_for_scenarios and generator.inputs:
            return generator.answer(body)
        return failure(
            400, "this stand-in for a model answers only what ART's own judges ask, and with --inputs FILE what its "
            "writers of scenarios ask, by a system message and a user message of a known form; ask a real model"
        )  # fmt: skip

    return reply


def _grade(args: argparse.Namespace) -> Grade:
    if args.task is None and (args.task_options or args.base_model):
        raise ConfigError("-o and --base-model say what is judged of a task; say which by --task")
    if args.score is not None:
        function = load_attribute(args.score, "score")
        if not callable(function):
            raise ConfigError(f"--score {args.score}: expected a function of a list of messages, found {function!r}")
        return grade_messages(function)
    if args.task is None:
        return grade_conduct
    task = task_for(Screen(), args, args.base_model, warns=False)
    if type(task).score_messages is Task.score_messages:
        raise ConfigError(
            f"--task {args.task}: class {type(task).__name__} has no `score_messages(messages)`, which returns 0 to 1; "
            "add it, or give a function by --score"
        )
    return grade_messages(task.score_messages)


def _read_inputs(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        inputs = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--inputs {path}: cannot be read: {error.strerror}") from error
    if not inputs:
        raise ConfigError(f"--inputs {path}: there is no line with text")
    return inputs
