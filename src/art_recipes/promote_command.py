"""`art promote MODEL[@STEP]`: let a checkpoint answer requests to PROJECT/NAME@promoted, if it is certain to be better.

    art promote games/agent                     the newest step, as it is
    art promote games/agent@40 --require 0.02   if it beats the promoted one
    art promote games/agent@40 --require 0.02 --task tic_tac_toe --held-out 200
    art promote games/agent@40 --require 0.02 --force --note "the old leaks"

The improvement is measured by the `val` rollouts in the model's log, or with --task by rollouts that are made now. It
counts if its interval lies above --require. `art checkpoints list` shows what was decided. The server
is at --url or ART_SERVER_URL, and the key is in ART_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from art.backend import RemoteBackend
from art.cli.arguments import TASK_HELP, ModelArgument, add_task_options, server_address
from art.cli.output import PlainLines
from art.client.terminal import ProgressLine
from art.errors import ConfigError
from art.protocol.promotions import Gate, MeasuredScores
from art.protocol.training import ModelStatus
from art.storage.local_key import find_local_key
from art_recipes.arguments import task_for

HELD_OUT = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="address of the server (default: ART_SERVER_URL)")
    parser.add_argument("model", type=ModelArgument.parse, help="PROJECT/NAME@STEP; without @STEP the newest")
    parser.add_argument("--require", type=float, metavar="X", help="least improvement, e.g. 0.02 or 0 (default: none)")
    parser.add_argument("--split", help="held-out split (default: val of the log; with --task test, or val)")
    parser.add_argument("--metric", default="reward", help="metric of the logged rollouts (default: reward)")
    parser.add_argument("--force", action="store_true", help="promote it even if it is refused; the history says so")
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for the history")
    now = parser.add_argument_group("measure now", "instead of reading the log, by the rewards of a task")
    now.add_argument("--task", help=TASK_HELP)
    add_task_options(now)
    now.add_argument("--held-out", type=int, default=HELD_OUT, metavar="N", help=f"scenarios (default: {HELD_OUT})")
    now.add_argument("--rollouts", type=int, default=1, metavar="N", help="rollouts of each scenario (default: 1)")
    now.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the scenarios (default: 0)")
    now.add_argument("--data-dir", type=Path, default=Path(".art"), help="where the rollouts are kept (default: .art)")


def run(args: argparse.Namespace) -> int:
    async def act() -> None:
        async with RemoteBackend(server_address(args.url)) as backend:
            await promote(backend, args)

    asyncio.run(act())
    return 0


async def promote(backend: RemoteBackend, args: argparse.Namespace) -> None:
    model: ModelArgument = args.model
    step = model.step
    if args.require is None and args.task is not None:
        raise ConfigError("--task measures an improvement, so say how much is needed: --require 0, for example")
    gate = None
    if args.require is not None:
        status = await backend.get_status(model)
        step = status.step if step is None else step
        needless = args.task is None or step == status.promoted_step
        measured = None if needless else await _measure(args, status, step)
        gate = Gate(require=args.require, split=args.split or "val", metric=args.metric, measured=measured)
    promotion = await backend.checkpoints.promote(model, step, gate=gate, force=args.force, note=args.note)
    before = promotion.previous_step
    if before == promotion.step:
        print(f"step {before} is already the one that answers requests to {promotion.inference_name}")
        return
    replaced = "" if before is None else f" in place of step {before}"
    print(f"step {promotion.step} answers requests to {promotion.inference_name}{replaced}")
    if promotion.verdict is not None:
        print(f"{'passed' if promotion.verdict.passed else 'forced'}: {promotion.verdict.reason}")


async def _measure(args: argparse.Namespace, status: ModelStatus, step: int) -> MeasuredScores:
    """Roll out a task with the candidate and with what is promoted now."""
    from art_recipes.comparing.compare_models import measure_pair
    from art_recipes.comparing.compared_models import CompareConfig, Endpoint

    if args.split not in (None, "test", "val"):
        raise ConfigError(f"with --task, --split is test or val, got {args.split!r}")
    model, reference, lines = args.model, status.promoted_step or 0, PlainLines()
    config = CompareConfig(
        held_out=args.held_out, rollouts=args.rollouts, seed=args.seed, split=args.split or "test",
        data_dir=args.data_dir,
    )  # fmt: skip
    task = task_for(lines, args, status.base_model, warns=False)
    server = server_address(args.url)
    url = f"{server.rstrip('/')}/projects/{model.project}/v1"
    key = os.environ.get("ART_API_KEY") or find_local_key(server)
    reference_model, candidate = (
        Endpoint(label=f"{model.name}@{one}", url=url, model=f"{model.project}/{model.name}@{one}", api_key=key)
        for one in (reference, step)
    )
    with ProgressLine(f"rollouts with steps {reference} and {step}"):
        reference_values, values = await measure_pair(
            task, reference_model, candidate, config, lambda progress: lines.print(progress.text)
        )
    source = f"{task.label}, split {config.split}, seed {config.seed}, measured by `art promote`"
    return MeasuredScores(source=source, reference_step=reference, reference=reference_values, candidate=values)
