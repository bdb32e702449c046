"""A recorded conversation of two turns, one of its branches, and groups of trajectories that name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from art.credit.plan import StepPlan
from art.credit.resolve import ResolvedGroup, resolve
from art.credit.samples import build_samples
from art.protocol.samples import TrainingSample
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from art.record.recorded_answers import RecordedAnswer
from art.record.recorder import Exchange

USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "again"}


def exchange(
    id: str, prompt: list[int], completion: list[int], *, messages: list[dict], text: str, **changes: object
) -> Exchange:
    base = Exchange(
        id=id, rollout_id=None, project="p", name="m", policy_version=3, parent_id=None, branch_reason=None,
        prompt_token_ids=prompt, completion_token_ids=completion, sampling_logprobs=[-0.5] * len(completion), temperature=1.0,
        top_p=1.0, seed=1, finish_reason="stop", message={"role": "assistant", "content": text}, request_messages=messages,
        tools=None, created_at=0.0,
    )  # fmt: skip
    return replace(base, **changes)


def choice(exchange_id: str | None, text: str) -> dict:
    item = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": text}}
    return {"choice": item | ({"exchange_id": exchange_id} if exchange_id else {})}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


FIRST = exchange("e1", [1, 2, 3], [4, 5], messages=[USER], text="a")
SECOND = exchange("e2", [1, 2, 3, 4, 5, 6], [7, 8], messages=[USER, answer("a"), AGAIN], text="b", policy_version=2)
BRANCH = exchange("e3", [1, 9, 6], [7], messages=[USER, answer("a"), AGAIN], text="b")
LONG = exchange("e4", [1, 2, 3], [4] * 6, messages=[USER], text="aaa")
ONE_TURN = WireHistory(items=[USER, choice("e1", "a")])
TWO_TURNS = WireHistory(items=[USER, choice("e1", "a"), AGAIN, choice("e2", "b")])
BRANCHING = WireHistory(items=[USER, choice("e1", "a"), AGAIN, choice("e3", "b")])
LONG_TURN = WireHistory(items=[USER, choice("e4", "aaa")])
UNTRACKED = WireHistory(items=[USER, choice(None, "a")])


def trajectory(reward: float, *histories: WireHistory, **further: Any) -> WireTrajectory:
    return WireTrajectory(reward=reward, histories=list(histories or [TWO_TURNS]), **further)


def group(*rewards: float, history: WireHistory = TWO_TURNS) -> WireGroup:
    return WireGroup(trajectories=[trajectory(reward, history) for reward in rewards])


def resolved(
    *groups: WireGroup | list[WireTrajectory], exchanges: tuple[Exchange, ...] = (FIRST, SECOND, BRANCH, LONG)
) -> list[ResolvedGroup]:
    wired = [g if isinstance(g, WireGroup) else WireGroup(trajectories=g) for g in groups]
    return resolve(wired, Recorded(*exchanges).find_answers, project="p", name="m")


def recorded_answer(exchange: Exchange) -> RecordedAnswer:
    """The exchange as training reads it from a record."""
    same = (
        "id", "project", "name", "policy_version", "temperature", "top_p", "finish_reason", "constraint", "segments",
    )  # fmt: skip
    return RecordedAnswer(
        **{name: getattr(exchange, name) for name in same},
        prompt_token_ids=np.asarray(exchange.prompt_token_ids, dtype=np.uint32),
        completion_token_ids=np.asarray(exchange.completion_token_ids, dtype=np.uint32),
        sampling_logprobs=np.asarray(exchange.sampling_logprobs),
        has_tools=bool(exchange.tools),
        texts=(orjson.dumps(exchange.request_messages), orjson.dumps(exchange.message)),
    )


class Recorded:
    """A recorder of these exchanges only."""

    def __init__(self, *exchanges: Exchange) -> None:
        self._by_id = {exchange.id: exchange for exchange in exchanges}

    def find_answers(self, ids: Iterable[str]) -> dict[str, RecordedAnswer]:
        return {id: recorded_answer(self._by_id[id]) for id in ids if id in self._by_id}

    get_answers = find_answers


def samples_of(plan: StepPlan, *exchanges: Exchange) -> list[TrainingSample]:
    """What the trainer gets when the planned step runs."""
    return build_samples(plan.samples, Recorded(*(exchanges or (FIRST, SECOND, BRANCH, LONG))))  # type: ignore[arg-type]


def token_scales(plan: StepPlan) -> dict[str, dict[str, float]]:
    """What a token's loss is multiplied with in the sum that the trainer makes, by rollout and sample."""
    total = sum(s.weight * sum(a.num_tokens for a in s.answers) if s.share is None else s.share for s in plan.samples)
    scales: dict[str, dict[str, float]] = {}
    for sample in plan.samples:
        rollout = scales.setdefault(sample.rollout_id.removeprefix("groups"), {})
        rollout[sample.sample_id.rsplit(".", 1)[1]] = sample.weight / total
    return scales
