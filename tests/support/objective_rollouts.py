"""Random groups of rollouts for the proofs of objectives, and the way from them to what the trainer is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from art.config import DistillConfig, TrainConfig
from art.credit.plan import plan_step
from art.credit.resolve import ResolvedAnswer, ResolvedGroup, ResolvedPath, ResolvedTrajectory
from art.credit.samples import build_samples
from art.protocol.samples import TrainingSample
from art.record.recorder import Exchange
from tests.support.objective_reference import Branch, Rollout
from tests.support.recorded_exchanges import Recorded
from tests.support.trainer_samples import VOCAB_SIZE


def random_rollouts(
    seed: int,
    logprobs: Callable[[Branch], list[Tensor]],
    *,
    temperatures: Sequence[float] = (1.0, 1.0, 1.0, 0.7),
    has_branches: bool = True,
    num_groups: int = 2,
) -> list[Rollout]:
    """Groups, each of as many rollouts as `temperatures`: two turns with a tool's result between them, behind a
    prompt that the group shares.

    Member 1 says the same as member 0 at first; member 2 has a second branch, in which its first answer stands
    rewritten. The groups have equally many tokens. Sampler and teacher scatter around `logprobs`.
    """
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    rollouts = []
    for group in range(num_groups):
        prompt, opening = draw(5), draw(4)
        for member, temperature in enumerate(temperatures):
            first = opening if member < 2 else draw(3 + member)
            result, second = draw(2), draw(3 + member)
            start = len(prompt) + len(first) + len(result)
            spans = [(len(prompt), len(prompt) + len(first)), (start, start + len(second))]
            branches = [Branch(token_ids=prompt + first + result + second, spans=spans)]
            if member == 2 and has_branches:
                before = prompt + first[:2] + draw(3)
                branches.append(Branch(token_ids=before + draw(4), spans=[(len(before), len(before) + 4)]))
            rollouts.append(
                Rollout(
                    name=f"groups[{group}].trajectories[{member}]",
                    group=group,
                    reward=rng.uniform(-1, 1),
                    branches=[_measured(replace(b, temperature=temperature), logprobs, rng) for b in branches],
                )
            )
    return rollouts


def _measured(branch: Branch, logprobs: Callable[[Branch], list[Tensor]], rng: random.Random) -> Branch:
    """With a sampler that is off by a bit as a whole and by more at single tokens, and a teacher."""
    sampler, teacher = [0.0] * len(branch.token_ids), [0.0] * len(branch.token_ids)
    offset = rng.uniform(-0.3, 0.3)
    for place, logprob in zip(branch.learnt, logprobs(branch), strict=True):
        sampler[place] = logprob.item() + offset + rng.gauss(0, 0.5)
        teacher[place] = logprob.item() + rng.gauss(0, 1.0)
    # The trainer holds these in float32; what is compared is what follows from them.
    return replace(branch, sampling_logprobs=_float32(sampler), teacher_logprobs=_float32(teacher))


def _float32(values: list[float]) -> list[float]:
    import numpy as np

    return np.asarray(values, dtype=np.float32).tolist()


def plan(rollouts: Sequence[Rollout], config: TrainConfig) -> tuple[list[TrainingSample], list[tuple[str, str]]]:
    """Samples and preference pairs as a server makes them of recorded rollouts."""
    groups = [_group(rollouts, number) for number in sorted({r.group for r in rollouts})]
    planned = plan_step(groups, config, step=2)
    samples = build_samples(planned.samples, Recorded(*_exchanges(rollouts)))  # type: ignore[arg-type]
    if not any(isinstance(term, DistillConfig) for term in config.terms):
        return samples, planned.pairs
    branches = {
        f"{rollout.name}.paths[{b}]": branch for rollout in rollouts for b, branch in enumerate(rollout.branches)
    }
    return [replace(s, teacher_logprobs=branches[s.sample_id].teacher_logprobs) for s in samples], planned.pairs


def _exchanges(rollouts: Sequence[Rollout]) -> list[Exchange]:
    return [
        _exchange(branch, start, end, f"{rollout.name}.paths[{b}]")
        for rollout in rollouts
        for b, branch in enumerate(rollout.branches)
        for start, end in branch.spans
    ]


def _group(rollouts: Sequence[Rollout], number: int) -> ResolvedGroup:
    members = [
        ResolvedTrajectory(
            group=number,
            index=index,
            reward=rollout.reward,
            paths=[_path(branch, f"{rollout.name}.paths[{b}]") for b, branch in enumerate(rollout.branches)],
        )
        for index, rollout in enumerate(rollout for rollout in rollouts if rollout.group == number)
    ]
    return ResolvedGroup(number, members)


def _path(branch: Branch, name: str) -> ResolvedPath:
    answers = [
        ResolvedAnswer(
            exchange_id=f"{name}@{start}",
            choice=turn,
            start=start,
            num_tokens=end - start,
            policy_version=2,
            temperature=branch.temperature,
        )
        for turn, (start, end) in enumerate(branch.spans)
    ]
    return ResolvedPath(answers)


def _exchange(branch: Branch, start: int, end: int, name: str) -> Exchange:
    return Exchange(
        id=f"{name}@{start}",
        rollout_id=None,
        project="p",
        name="m",
        policy_version=2,
        parent_id=None,
        branch_reason=None,
        prompt_token_ids=branch.token_ids[:start],
        completion_token_ids=branch.token_ids[start:end],
        sampling_logprobs=branch.sampling_logprobs[start:end],
        temperature=branch.temperature,
        top_p=1.0,
        seed=0,
        finish_reason="length" if branch.is_cut else "stop",
        message={"role": "assistant", "content": ""},
        request_messages=[],
        tools=None,
        created_at=0.0,
    )
