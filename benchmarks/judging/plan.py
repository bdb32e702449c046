"""Which trainings each part of the comparison consists of."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.judging.results import Arm, Settings

RELIABILITIES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
COMPARED_RELIABILITY = 0.7
"""Reliability of the judge beside rewards by hand. `docs/rewards.md` measured it with noise and position bias 0.15."""
HAND = Arm(source="hand")
PARTS: dict[str, list[Arm]] = {
    "compare": [
        HAND,
        Arm(source="judge", reliability=COMPARED_RELIABILITY),
        Arm(source="both", reliability=COMPARED_RELIABILITY),
    ],
    "noise": [HAND, *(Arm(source="judge", reliability=reliability) for reliability in RELIABILITIES)],
    "passes": [Arm(source="judge", reliability=reliability, passes=2) for reliability in (0.7, 0.5)],
    "report": [Arm(source="judge", reliability=reliability, passes=2, shrink=False) for reliability in (0.7, 0.5)],
}
CHEAP = ("yes_no_maybe",)
MORE = ("support_desk", "tic_tac_toe", "mail_search")
TASKS = {"compare": (*CHEAP, *MORE), "noise": CHEAP, "report": CHEAP}
"""Tasks of each part that can be trained (shrunk scores, the part `passes`, were an option of judges that is gone): an
answer of one word whose reward has degrees, an answer that has to be read from the request, a game of several turns,
whose reward is known at its end, and questions that need tools. The first costs so little that noise is measured on
it with five seeds."""
SEEDS = {"yes_no_maybe": (101, 102, 103, 104, 105), **dict.fromkeys(MORE, (101, 102, 103))}
SETTINGS = {
    # Small steps at a low rate: at the task's own rate, the first 16 rollouts teach most of what there is to learn.
    "yes_no_maybe": Settings(
        steps=16, every=1, evaluate=150, split="test", groups=4, rollouts=4, learning_rate=4e-4
    ),
    "support_desk": Settings(steps=16, every=4, evaluate=200, split="test", groups=8, rollouts=8),
    "tic_tac_toe": Settings(steps=20, every=5, evaluate=200, split="test", groups=16, rollouts=8),
    "mail_search": Settings(steps=20, every=5, evaluate=200, split="test", groups=8, rollouts=8),
}  # fmt: skip
"""Sizes were chosen on seed 0 and the split `val`."""
QUICK = {"steps": 2, "every": 1, "evaluate": 20, "split": "val", "groups": 4, "rollouts": 4}


@dataclass(frozen=True, slots=True)
class Planned:
    """Trainings of one seed on one task."""

    task: str
    seed: int
    arms: Sequence[Arm]
    settings: Settings


def plan(args: argparse.Namespace) -> list[Planned]:
    """Return what `python -m benchmarks judged` is to train with these options: first the first seed of each task."""
    arms: dict[tuple[int, str, int], list[Arm]] = {}
    for part in args.judged_parts:
        for task in args.judged_tasks or TASKS[part]:
            seeds = (0,) if args.quick else args.judged_seeds or SEEDS[task]
            for place, seed in enumerate(seeds):
                wanted = arms.setdefault((place, task, seed), [])
                wanted += [arm for arm in PARTS[part][: 2 if args.quick else None] if arm not in wanted]
    changes = QUICK if args.quick else {"split": args.judged_split}
    return [
        Planned(task, seed, arms[place, task, seed], SETTINGS[task].model_copy(update=changes))
        for place, task, seed in sorted(arms)
    ]
