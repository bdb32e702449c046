"""`art judge serve`: a judge and a writer of scenarios without network, to try `--judge` and `--generator` with.

    art judge serve --task nim:Nim --noise 0.1 --position-bias 0.1

It serves an OpenAI-compatible address on this machine, follows a script, and asks no model. It scores a rollout
  --task TASK    by the task's `score_messages(messages)`
  --score FUNC   by a function of the messages, `module:function`, that returns 0 to 1
  --prefer TEXT  by whether a regular expression is found in the last answer
  otherwise      by plain conduct: it ends with an answer, no call fails, few words
When asked for scenarios it writes texts for any description and for the tools of any MCP server, or takes --inputs.
"""

from __future__ import annotations

import argparse
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art.cli.options.task_options import TASK_HELP, add_task_options, task_for
from art.cli.terminal.screen import Screen
from art.errors import ConfigError
from art.task import Task
from art.testing.generator import ScriptedGenerator
from art.testing.judge import Grade, ScriptedJudge, grade_conduct, grade_messages, grade_preferring
from art.testing.scripted_server import Reply, ScriptedServer, failure
from art.utils.attributes import load_attribute


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "serve", help="a judge and generator without network, for trying things", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--task", help=TASK_HELP)
    how.add_argument("--score", metavar="FUNC", help="module:function from a list of messages to 0 to 1")
    how.add_argument("--prefer", metavar="TEXT", help="regular expression that good answers match")
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
    parser.add_argument("--seed", type=int, default=0, help="of noise and failures (default: 0)")
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="the scenarios that it writes, one per line")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console, reply, served = Screen(), scripted_models(args), threading.Event()
    try:
        with ScriptedServer(reply, args.port) as server:
            task = shlex.join([args.task or "my_module:MyTask", *_repeated(args)])
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


def _repeated(args: argparse.Namespace) -> list[str]:
    """The options that a training must share with this judge."""
    options = [word for key, value in args.task_options for word in ("-o", f"{key}={value}")]
    return [*options, *(["--base-model", args.base_model] if args.base_model else [])]


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
        if len(texts) >= 2 and re.search(r"^(The job: |Write exactly \d+ )", texts[1], re.MULTILINE):
            return generator.answer(body)
        return failure(
            400, "this stand-in for a model answers only what ART's own judges and writers of scenarios ask, by a "
            "system message and a user message of a known form; ask a real model"
        )  # fmt: skip

    return reply


def _grade(args: argparse.Namespace) -> Grade:
    if args.task is None and (args.task_options or args.base_model):
        raise ConfigError("-o and --base-model say what is judged of a task; say which by --task")
    if args.prefer is not None:
        return grade_preferring(args.prefer)
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
            "add it, or give a function by --score, or a text that good answers have by --prefer"
        )
    return grade_messages(task.score_messages)


def _read_inputs(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        inputs = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--inputs {path}: cannot be read: {error.strerror}") from error
    if not inputs:
        raise ConfigError(f"--inputs {path}: there is no line with text")
    return inputs
