"""Senders share the engine: who asks for little does not wait for those who ask for much."""

from __future__ import annotations

import torch

from art.engine import GenerateRequest, Sender
from art.engines.torch.cache.kv_cache import KVCache, LayerShape
from art.engines.torch.scheduler import FEW, Request, Scheduler

BUDGET = 256
MANY, OTHER = ("greedy", ""), ("other", "")


def scheduler(max_running: int = 32, budget: int = 20_000) -> Scheduler:
    cache = KVCache(
        [LayerShape(1, 1, 1)], max_context=2000, budget=budget, max_rows=64, dtype=torch.float32, device="cpu"
    )
    return Scheduler(cache, max_running=max_running, prefill_tokens=BUDGET, score_tokens=BUDGET)


def add(one: Scheduler, sender: Sender, length: int, count: int = 1) -> list[Request]:
    first = len(one.waiting) + len(one.running)
    requests = []
    for number in range(first, first + count):
        params = GenerateRequest(
            request_id=f"r{number}",
            adapter=None,
            prompt_token_ids=[number + 1] * length,  # no two begin alike, so nothing is reused
            max_tokens=64,
            stop_token_ids=(),
            seed=0,
            sender=sender,
        )
        requests.append(Request(params, None, max_new=64))
    one.waiting.extend(requests)
    return requests


def step(one: Scheduler) -> dict[Sender, int]:
    """Compute a step, with a token for each request that is at its end. Returns the prompt tokens by sender."""
    prompts: dict[Sender, int] = {}
    for work in one.schedule():
        request = work.request
        if request.num_sampled == 0:
            prompts[request.sender] = prompts.get(request.sender, 0) + work.num_tokens
        if work.reaches_end:
            request.token_ids.append(0)
            request.logprobs.append(0.0)
        request.num_computed += work.num_tokens
    return prompts


def test_a_short_prompt_is_computed_beside_long_ones() -> None:
    one = scheduler()
    add(one, MANY, 1000, 2)
    step(one)
    (chat,) = add(one, OTHER, 10)
    assert step(one) == {OTHER: 10, MANY: BUDGET - 10}
    assert chat.num_sampled == 1


def test_equal_senders_get_equal_parts_and_alone_one_gets_all() -> None:
    one = scheduler()
    add(one, MANY, 1000, 2)
    assert step(one) == {MANY: BUDGET}
    add(one, OTHER, 1000, 2)
    assert step(one) == {MANY: BUDGET // 2, OTHER: BUDGET // 2}


def test_steps_are_short_while_a_sender_has_few_requests() -> None:
    one = scheduler()
    add(one, MANY, 1000, FEW - 1)
    (chat,) = add(one, OTHER, 10)
    assert step(one) == {OTHER: 10, MANY: BUDGET - 10}
    add(one, MANY, 1000)
    assert step(one) == {MANY: BUDGET // FEW}
    one.remove(chat)
    assert step(one) == {MANY: BUDGET}


def test_the_long_prompt_of_a_sender_with_few_requests_gets_the_rest_of_the_budget() -> None:
    one = scheduler()
    add(one, MANY, 1000, FEW)
    add(one, OTHER, 1000)
    assert step(one) == {MANY: BUDGET // FEW, OTHER: BUDGET - BUDGET // FEW}


def test_the_sender_that_runs_the_fewest_is_admitted_first() -> None:
    one = scheduler(max_running=4)
    first = add(one, MANY, 4, 8)
    (chat,) = add(one, OTHER, 4)
    step(one)
    assert one.running == [first[0], chat, first[1], first[2]]


def test_the_sender_that_runs_the_most_is_preempted() -> None:
    one = scheduler(budget=2304)
    one._recent.append(0)  # answers seem to be short, so slots have no room to grow
    add(one, MANY, 200, 7)
    for _ in range(7):
        step(one)
    (chat,) = add(one, OTHER, 100)
    for _ in range(60):
        step(one)
    assert one.num_preemptions > 0
    assert chat.num_sampled == 60
