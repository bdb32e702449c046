"""`art doctor MODEL`: check everything that training a model needs, before any time is spent on it.

`art doctor MODEL --cluster` asks a cluster instead whether engine and trainer find room there, and loads nothing.
Otherwise it starts engine and trainer on this machine as a training would, runs a trial step with a throw-away
adapter, and with --task a few rollouts. Nothing is published, and nothing stays on disk. The exit code is 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from art.cli.arguments import TASK_HELP, add_task_options, read_settings, read_settings_file
from art.cli.output import run_coroutine
from art.client.submission import wire_groups
from art.client.terminal import ProgressLine
from art.config import ModelSettings, ServerConfig
from art.config.base_models import resolve_base_model
from art.config.training import SPREAD_TOLERANCE
from art.errors import ArtError, ConfigError
from art.gather import gather_trajectory_groups
from art.local_backend import LocalBackend
from art.model import TrainableModel
from art.protocol.training import CheckResult, CheckStatus, PreflightRequest
from art.storage.layout import DataDir
from art.task import Scenario, Task, draw_scenarios, list_tasks
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.arguments import task_for
from art_recipes.screen import Screen
from art_recipes.training.task_training import TaskTrainingConfig

COLOURS: dict[CheckStatus, str] = {"ok": "green", "warning": "yellow", "failure": "red"}
MUCH_WITHOUT_SPREAD = 0.5
"""Share of groups with equal rewards above which a check warns: most of the sampling is wasted."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="base model: hub id or local path")
    parser.add_argument(
        "--cluster", nargs="?", const="ray", metavar="ADDRESS",
        help="look at a cluster and where it would run engine and trainer: ray (of RAY_ADDRESS, else of this machine; "
        "the default) or ray://HOST:PORT. MODEL adds the forecast of memory",
    )  # fmt: skip
    parser.add_argument("--task", help=f"look at the rewards of this task: {TASK_HELP}")
    add_task_options(parser)
    parser.add_argument(
        "--groups", type=int, default=4, metavar="N", help="scenarios of the task to roll out (default: %(default)s)"
    )
    parser.add_argument("--rollouts", type=int, help="rollouts of each scenario (default: the task's own)")
    parser.add_argument(
        "--longest", type=int, metavar="TOKENS", help="length of the trial's sequence (default: the engine's context)"
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings to check: those of `art train`")
    parser.add_argument("--data-dir", type=Path, default=Path(".art"), help="where training will write (default: .art)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenarios (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the checks and their numbers")


def run(args: argparse.Namespace) -> int:
    console = Screen()
    if args.model is None and args.cluster is None:
        raise ConfigError("name a base model, as in `art doctor MODEL`, or a cluster by --cluster")
    if args.cluster is not None and (args.task or args.longest):
        raise ConfigError("--task and --longest are for a trial on this machine; leave them out, or --cluster")
    if args.task_options and not args.task:
        raise ConfigError("-o sets an option of a task; say which by --task")
    if args.model is not None and args.model in list_tasks() and not Path(args.model).exists():
        raise ConfigError(
            f"{args.model!r} is a task, and expected is a base model: art doctor MODEL --task {args.model}, in which "
            f"MODEL is a hub id or a folder. `art tiny-model FOLDER --task {args.model}` makes a small one"
        )
    task = task_for(console, args, args.model) if args.task else None
    settings = ModelSettings()
    if args.settings is not None:
        values = read_settings_file(args.settings)
        settings = read_settings(TaskTrainingConfig, values, str(args.settings)).model_settings()
    data_dir = args.data_dir.resolve()
    disk = next(path for path in (data_dir, *data_dir.parents) if path.is_dir())  # the one that training will fill
    with tempfile.TemporaryDirectory(prefix=".art-doctor-", dir=disk, ignore_cleanup_errors=True) as folder:
        if args.cluster is not None:
            checks = run_coroutine(_examine_cluster(args.cluster, args.model, settings, Path(folder)))
        else:
            checks = run_coroutine(_examine(args, settings, task, Path(folder)))
    table = Table(*(Column(name, overflow="fold") for name in ("check", "", "found", "what to do")), show_lines=True)
    for check in checks:
        status = Text(check.status, style=COLOURS[check.status])
        table.add_row(check.name, status, check.found, check.remedy or "")
    console.print(table)
    count = {status: sum(check.status == status for check in checks) for status in COLOURS}
    failed = count["failure"] > 0
    verdict = "not ready to be trained" if failed else "ready to be trained"
    console.print(f"{verdict}: {count['failure']} failures, {count['warning']} warnings, {count['ok']} ok")
    if args.json:
        summary = {"model": args.model, "ready": not failed, "checks": [check.model_dump() for check in checks]}
        args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return int(failed)


async def _examine_cluster(
    address: str, base_model: str | None, settings: ModelSettings, folder: Path
) -> list[CheckResult]:
    from art.runtime.hosting.cluster import make_cluster  # the server's side, which other checks do not load
    from art.runtime.placement import find_devices, with_engine

    cluster = make_cluster(ServerConfig(cluster=address), DataDir(folder))
    if cluster is None:
        raise ConfigError("--cluster has no address; leave the value out for the Ray cluster of RAY_ADDRESS")
    if base_model is not None:
        base_model = resolve_base_model(base_model)
    return await cluster.examine(with_engine(settings, find_devices()), base_model)


async def _examine(
    args: argparse.Namespace, settings: ModelSettings, task: Task | None, folder: Path
) -> list[CheckResult]:
    async with LocalBackend(path=folder, show_page=False) as backend:
        model = TrainableModel(
            name="trial", project="doctor", base_model=args.model, settings=settings, report_metrics=[]
        )
        started = time.perf_counter()
        try:
            with ProgressLine("Starting engine and trainer"):
                await model.register(backend)
        except ArtError as error:
            remedy = "the message says what to change"
            return [CheckResult(name="start", status="failure", found=error.message, remedy=remedy)]
        seconds = time.perf_counter() - started
        finding = f"engine and trainer run and agree on a probe after {seconds:.1f} s"
        checks = [CheckResult(name="start", status="ok", found=finding, measured={"seconds": seconds})]
        with ProgressLine("A trial step"):
            report = await backend.preflight(model, PreflightRequest(trial_tokens=args.longest))
        checks += report.checks
        if task is not None:
            checks += await examine_task(args, task, backend, model)
    return checks


async def roll_out(
    args: argparse.Namespace, task: Task, model: TrainableModel
) -> tuple[list[TrajectoryGroup], CheckResult]:
    """Make a few groups of rollouts of a task, as a training step would, and check that they do not raise."""
    scenarios = draw_scenarios(task, "train", seed=args.seed, count=args.groups)
    size = args.rollouts or task.defaults.rollouts_per_group

    async def rollout(scenario: Scenario, index: int) -> Trajectory:
        return await task.rollout(model, scenario, rollout_index=index)

    started = time.perf_counter()
    groups = await gather_trajectory_groups(
        (TrajectoryGroup(rollout(scenario, i) for i in range(size)) for scenario in scenarios),
        pbar_desc=None,
        max_exceptions=len(scenarios) * size,
    )
    return groups, check_rollouts(groups, len(scenarios) * size, time.perf_counter() - started)


def check_rollouts(groups: Sequence[TrajectoryGroup], num_rollouts: int, seconds: float) -> CheckResult:
    """Check that rollouts end with a trajectory, and do not raise."""
    num_failed = num_rollouts - sum(map(len, groups))
    finding = f"{num_failed} of {num_rollouts} failed, in {seconds:.1f} s"
    if error := next((error for group in groups for error in group.exceptions), None):
        finding += f"; one of them: {error.type}: {error.message}"
    status: CheckStatus = "ok" if not num_failed else "failure" if num_failed == num_rollouts else "warning"
    remedy = "correct the rollout; `max_exceptions` of the gather functions says how many failures are tolerated"
    return CheckResult(name="rollouts", status=status, found=finding, remedy=remedy if num_failed else None)


def check_spread(groups: Sequence[TrajectoryGroup]) -> CheckResult:
    """Check that the rewards of a group differ: otherwise it teaches nothing."""
    rewards = [[trajectory.reward for trajectory in group] for group in groups if len(group) > 0]
    flat = sum(max(group) - min(group) <= 2 * SPREAD_TOLERANCE for group in rewards)
    share = flat / len(rewards) if rewards else 1.0
    everything = [reward for group in rewards for reward in group]
    mean = statistics.fmean(everything) if everything else math.nan
    finding = f"{flat} of {len(rewards)} groups have equal rewards (mean reward {mean:.3g})"
    status: CheckStatus = "failure" if share == 1 else "warning" if share > MUCH_WITHOUT_SPREAD else "ok"
    remedy = (
        "use more rollouts per group, scenarios that the model solves now and then, a reward with more values, or "
        "sampling at temperature 1 with different seeds"
    )
    return CheckResult(
        name="reward spread", status=status, found=finding, remedy=None if status == "ok" else remedy,
        measured={"share_without_spread": share, "mean_reward": mean} if everything else {},
    )  # fmt: skip


async def examine_task(
    args: argparse.Namespace, task: Task, backend: LocalBackend, model: TrainableModel
) -> list[CheckResult]:
    """Check a task: a few rollouts, and unless only a judge rewards it, their rewards and a trial step on them."""
    with ProgressLine(f"Rollouts of {task.name}"):
        groups, rollouts = await roll_out(args, task, model)
    if task.needs_judge:
        return [rollouts]
    checks = [rollouts, check_spread(groups)]
    if not any(map(len, groups)):
        return checks
    request = PreflightRequest(quick=False, trial=False, groups=wire_groups(groups))
    with ProgressLine("A trial step of these rollouts"):
        checks += (await backend.preflight(model, request)).checks
    return checks
