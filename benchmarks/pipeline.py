"""Asynchronous training against synchronous: wall time, final score, and the ideal that a simulation gives.

One agent, six turns, two kinds of tools. Every arm meets the same scenarios, latencies and seeds of sampling, and
trains the same number of groups; only `max_staleness` differs.

- waiting: tools wait for something else. Their latencies are log-normal, with a median of 0.2 s and 5 s at 99 %.
- computing: tools compute in two processes, log-normal CPU times with a median of 4 ms and 0.2 s at 99 %.

The ideal is a discrete-event simulation with the same latencies, and with the mean times of a request and of a training
step that the synchronous arm had.

    python -m benchmarks pipeline --json pipeline.json
    python -m benchmarks pipeline --tools waiting --seeds 0 --pipeline-steps 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import art
from art.metrics.scores import t_quantile
from benchmarks.pipelines.arms import KINDS, Arm, Plan, ideal, run_arm
from benchmarks.pipelines.picture import draw_time_lines
from benchmarks.report import Cell, Result, Spread

BUILD = """
import sys
from art.testing.tiny_model import build_tiny_model
from benchmarks.pipelines.tasks import RepeatTheWord
build_tiny_model(sys.argv[1], task=RepeatTheWord(), warm_start_steps=int(sys.argv[2]))
"""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tools", choices=KINDS, help="kind of tools (default: both, one after the other)")
    group.add_argument("--pipeline-seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    group.add_argument("--pipeline-steps", type=int, help="training steps of each arm (default: 16, with --quick 2)")
    group.add_argument("--staleness", help="comma-separated, 0 first (default: 0,1,2,4; with --quick 0,2)")
    group.add_argument("--held-out", type=int, help="held-out scenarios for the score (default: 256)")
    group.add_argument(
        "--at-once", type=int, default=1, help="seeds that are measured at the same time (default: %(default)s)"
    )
    group.add_argument("--arms", type=Path, metavar="FILE", help="write the times of every rollout and step here")
    group.add_argument("--time-line", type=Path, metavar="FILE", help="draw the arms of the first seed, measured")


def run(args: argparse.Namespace) -> Result:
    steps = args.pipeline_steps or (2 if args.quick else 16)
    held_out = args.held_out or (8 if args.quick else 256)
    staleness = [int(word) for word in (args.staleness or ("0,2" if args.quick else "0,1,2,4")).split(",")]
    seeds = [int(word) for word in args.pipeline_seeds.split(",")][: 1 if args.quick else None]
    kinds = [args.tools] if args.tools else list(KINDS)
    plans = [Plan(kind=kind, seed=seed, steps=steps, held_out=held_out) for kind in kinds for seed in seeds]
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        warm_start = "20" if args.quick else "150"
        subprocess.run([sys.executable, "-c", BUILD, str(model), warm_start], check=True, stdout=subprocess.DEVNULL)
        measured = asyncio.run(_measure(Path(name), model, plans, staleness, args.at_once))
    if args.arms is not None:
        args.arms.write_text(json.dumps([[arm.to_json() for arm in arms] for arms in measured]) + "\n")
    if args.time_line is not None:
        draw_time_lines(measured[0]).savefig(args.time_line, dpi=110)
    rows = [row for kind in kinds for row in _rows(kind, plans, measured, staleness)]
    return Result(
        summary=f"{steps} steps of 8 groups of 8 rollouts of 6 turns, {len(seeds)} seeds, {held_out} held-out "
        f"scenarios. The machine measured {args.at_once} seeds at once.",
        rows=rows,
        notes=_notes(),
        clock="wall",
    )


async def _measure(
    folder: Path, model: Path, plans: Sequence[Plan], staleness: Sequence[int], at_once: int
) -> list[list[Arm]]:
    """Run the arms of each plan, one after the other, on a server of the plan's own."""
    places = asyncio.Semaphore(at_once)

    async def arms_of(plan: Plan) -> list[Arm]:
        async with places, art.LocalBackend(path=folder / f"{plan.kind}-{plan.seed}", show_page=False) as backend:
            arms = []
            for bound in staleness:
                name = f"{plan.kind}-{plan.seed}-{bound}"
                agent = art.TrainableModel(name=name, project="pipeline", base_model=str(model), report_metrics=[])
                await agent.register(backend)
                arms.append(await run_arm(agent, plan, bound))
                print(f"{name}: {arms[-1].wall_s:.0f} s, score {arms[-1].score:.3f}", file=sys.stderr, flush=True)
            return arms

    return await asyncio.gather(*(arms_of(plan) for plan in plans))


def _rows(
    kind: str, plans: Sequence[Plan], measured: Sequence[Sequence[Arm]], staleness: Sequence[int]
) -> Iterable[dict[str, Cell]]:
    of_kind = [(plan, arms) for plan, arms in zip(plans, measured, strict=True) if plan.kind == kind]
    simulated = {plan.seed: {bound: ideal(plan, arms[0], bound) for bound in staleness} for plan, arms in of_kind}
    for place, bound in enumerate(staleness):
        arms = [arms[place] for _, arms in of_kind]
        ratios = [arms[0].wall_s / arms[place].wall_s for _, arms in of_kind]
        ideals = [simulated[plan.seed][staleness[0]].wall_s / simulated[plan.seed][bound].wall_s for plan, _ in of_kind]
        yield {
            "tools": kind,
            "staleness": bound,
            "wall s": Spread.of([arm.wall_s for arm in arms]),
            "times as fast": Spread.of(ratios),
            "simulated": Spread.of(ideals),
            "share of it": Spread.of([ratio / best for ratio, best in zip(ratios, ideals, strict=True)]),
            "simulated s": Spread.of([simulated[plan.seed][bound].wall_s for plan, _ in of_kind]),
            "with its own times s": Spread.of([ideal(plan, arms[place], bound).wall_s for plan, arms in of_kind]),
            "score": _score(arms),
            "staleness of groups": _counts(arms),
            "trainer idle": Spread.of([arm.trainer_idle_share for arm in arms]),
            "train s": statistics.fmean(second for arm in arms for second in arm.train_s),
            "request s": statistics.fmean(arm.request_s for arm in arms),
            "groups": sum(arm.num_groups for arm in arms),
            "discarded rollouts": sum(arm.num_started - 8 * arm.num_groups for arm in arms),
            "dropped tokens": _dropped(arms),
        }


def _score(arms: Sequence[Arm]) -> str:
    """Mean over the seeds, with a 95 % interval by Student's t; of a single seed, the interval of its rollouts."""
    scores = [arm.score for arm in arms]
    mean = statistics.fmean(scores)
    if len(scores) == 1:
        low, high = arms[0].interval
    else:
        half = t_quantile(len(scores) - 1) * statistics.stdev(scores) / math.sqrt(len(scores))
        low, high = mean - half, mean + half
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _counts(arms: Sequence[Arm]) -> str:
    total: dict[int, int] = {}
    for arm in arms:
        for bound, number in arm.staleness.items():
            total[bound] = total.get(bound, 0) + number
    return ", ".join(f"{bound}: {number}" for bound, number in sorted(total.items()))


def _dropped(arms: Sequence[Arm]) -> str:
    reasons: dict[str, float] = {}
    for arm in arms:
        for reason, number in arm.dropped.items():
            reasons[reason] = reasons.get(reason, 0.0) + number
    return ", ".join(f"{reason} {number:.0f}" for reason, number in sorted(reasons.items())) or "0"


def _notes() -> list[str]:
    return [
        "times as fast: wall time of the synchronous arm over that of this one, within each seed; from the first "
        "rollout to the last checkpoint and its log",
        "simulated: the same ratio of the simulation; share of it: measured over simulated",
        "with its own times: simulated with the mean request and training times of this arm, not the synchronous one; "
        "the difference to simulated s is what a busier machine costs, and the rest up to wall s is the pipeline's own",
        "score: mean reward on held-out scenarios afterwards, with a 95 % interval over the seeds",
        "staleness of groups: number of trained groups by their staleness",
        "discarded rollouts: started, but not in a group that a step was given; dropped tokens: those of the ledger, "
        "by reason (no_reward_spread: all rollouts of a group earned the same)",
        "train s and request s: mean seconds of a training step and of a request, as the client saw them",
    ]


def draw(result: Result) -> Any:
    """Draw measured and simulated speed by staleness."""
    from benchmarks.pipelines.picture import draw_speed

    return draw_speed(result)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["pipeline", *sys.argv[1:]])
