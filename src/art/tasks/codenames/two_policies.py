"""Two policies that learn together, one as the spymaster and one as the guesser of the same team.

    async with art.LocalBackend() as backend:
        models = {
            role: art.TrainableModel(name=role, project="words", base_model=base) for role in ("spymaster", "guesser")
        }
        for model in models.values():
            await model.register(backend)
        await train_two(task, models, PairConfig(learning_rate=3e-3))

Each policy compares its games on a board with its own other games there: a step has two groups of each board, one for
each role. A game in which the partner broke the rules says nothing about a policy and is not in its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from art.errors import ConfigError
from art.gather import gather_trajectory_groups
from art.model import TrainableModel
from art.task import derive_seed, draw_scenarios
from art.tasks.codenames.codenames_options import ROLES, Role
from art.tasks.codenames.codenames_task import Codenames
from art.trajectory import Trajectory, TrajectoryGroup

Policies = Mapping[Role, TrainableModel[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """Settings of `train_two`. The learning rate suits a LoRA on a pretrained model; a tiny one takes 3e-3."""

    num_steps: int = 30
    """Checkpoint of the spymaster up to which both are trained. A later call goes on from the newest one."""
    boards_per_step: int = 16
    rollouts_per_board: int = 8
    learning_rate: float = 1e-5
    """Rate of the first step, from which it falls to nearly 0 over the run, as in `art train`."""
    num_minibatches: int = 4
    max_exceptions: float = 0.1
    """Share of a step's rollouts that may fail."""
    seed: int = 0


async def train_two(
    task: Codenames,
    policies: Policies,
    config: PairConfig,
    on_step: Callable[[int, list[TrajectoryGroup]], None] | None = None,
) -> None:
    """Train a spymaster and a guesser, both registered with a backend, step by step on the same games.

    Args:
        on_step: called after each step with its number and its groups, whose metadata has the `role`.

    Raises:
        ConfigError: the task is one in which a single role is trained.
    """
    if task.options.train != "both":
        raise ConfigError(f"two policies play both roles, so the task needs train=both, got {task.options.train}")
    rate = replace(task.defaults, learning_rate=config.learning_rate).rate_schedule(config.num_steps)
    for step in range(await policies["spymaster"].get_step(), config.num_steps):
        seed = derive_seed(config.seed, step)
        boards = draw_scenarios(task, "train", seed=seed, count=config.boards_per_step)
        groups = await gather_trajectory_groups(
            (
                TrajectoryGroup(task.team_rollout(policies, board, index) for index in range(config.rollouts_per_board))
                for board in boards
            ),
            pbar_desc=None, max_exceptions=config.max_exceptions, after_each=split_by_role,
        )  # fmt: skip
        await asyncio.gather(*(
            policies[role].train(groups_of_role, learning_rate=rate, num_minibatches=config.num_minibatches)
            for role in ROLES if (groups_of_role := [group for group in groups if group.metadata["role"] == role])
        ))  # fmt: skip
        if on_step is not None:
            on_step(step + 1, groups)


async def split_by_role(games: TrajectoryGroup) -> list[TrajectoryGroup]:
    """Make a group of each role from the games of a board, without the games that the other role spoilt."""
    groups = []
    for role in ROLES:
        spoilt = "invalid_guess" if role == "spymaster" else "invalid_clue"
        parts = [role_part(game, role) for game in games if not game.metrics[spoilt]]
        if parts := [part for part in parts if part is not None]:
            groups.append(TrajectoryGroup(parts, metadata={"role": role}))
    return groups


def role_part(game: Trajectory, role: Role) -> Trajectory | None:
    """The part of a team's trajectory that one role sampled, with the team's reward; `None` if it was never asked."""
    histories = [game.messages_and_choices, *(history.messages_and_choices for history in game.additional_histories)]
    at = ROLES.index(role)
    if at >= len(histories):
        return None
    return game.model_copy(update={"messages_and_choices": histories[at], "additional_histories": []})
