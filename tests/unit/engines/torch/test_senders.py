"""Senders share the engine: who asks for little does not wait for those who ask for much."""

from __future__ import annotations

import torch

from art.engine import GenerateRequest, Sender
from art.engines.torch.kv_cache import KVCache, LayerShape
from art.engines.torch.scheduler import LIGHT, LIGHT_STEPS, STEP_COST, Request, Scheduler

BUDGET = 256
MANY, OTHER = ("greedy", ""), ("other", "")


def scheduler(max_running: int = 32, budget: int = 20_000, keys_per_token: int = 10**9) -> Scheduler:
    cache = KVCache(
        [LayerShape(1, 1, 1)], max_context=2000, budget=budget, max_rows=64, dtype=torch.float32, device="cpu"
    )
    return Scheduler(
        cache, max_running=max_running, prefill_tokens=BUDGET, score_tokens=BUDGET, keys_per_token=keys_per_token
    )


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


def test_a_prompt_is_computed_beside_a_longer_one() -> None:
    one = scheduler()
    add(one, MANY, 1000)
    step(one)
    (chat,) = add(one, OTHER, 100)
    assert step(one) == {OTHER: 100, MANY: BUDGET - 100}
    assert chat.num_sampled == 1


def test_equal_senders_get_equal_parts_and_alone_one_gets_all() -> None:
    one = scheduler()
    add(one, MANY, 1000, 2)
    assert step(one) == {MANY: BUDGET}
    add(one, OTHER, 1000, 2)
    assert step(one) == {MANY: BUDGET // 2, OTHER: BUDGET // 2}


def test_a_light_sender_and_a_heavy_one_take_turns() -> None:
    one = scheduler()
    add(one, MANY, 1000, LIGHT)
    step(one)
    (chat,) = add(one, OTHER, 10)
    assert step(one) == {OTHER: 10}, "a newcomer is first"
    work = dict.fromkeys((MANY, OTHER), 0)
    for _ in range(100):
        done = one.schedule()
        assert chat in [item.request for item in done], "it is part of every step"
        others = [item for item in done if item.request is not chat]
        assert sum(item.num_tokens for item in others) <= BUDGET // LIGHT
        work[MANY if others else OTHER] += STEP_COST + sum(item.num_tokens for item in done)
        for item in done:
            item.request.num_computed += item.num_tokens
            if item.request is chat:
                chat.token_ids.append(0)
    assert 0.5 < work[MANY] / work[OTHER] < 2, "half of the work is for each"


def test_prompts_stay_short_for_a_while_after_a_light_sender() -> None:
    one = scheduler(budget=200_000)
    add(one, MANY, 1000, 20)
    (chat,) = add(one, OTHER, 10)
    assert step(one) == {OTHER: 10}
    one.remove(chat)
    assert step(one) == {MANY: BUDGET // LIGHT}
    for _ in range(LIGHT_STEPS):
        step(one)
    assert step(one) == {MANY: BUDGET}


def test_far_tokens_of_a_prompt_count_for_more() -> None:
    one = scheduler(keys_per_token=100)
    (prompt,) = add(one, MANY, 1900)
    sizes = []
    while prompt.num_computed < prompt.num_prompt:
        sizes += step(one).values()
    assert sizes[0] > BUDGET / 4
    assert sizes == sorted(sizes, reverse=True) or sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert BUDGET // 20 <= sizes[-2] <= BUDGET // 18, "with 1,900 keys a token counts as twenty"


def test_the_sender_that_runs_the_fewest_is_admitted_first() -> None:
    one = scheduler(max_running=4)
    first = add(one, MANY, 4, LIGHT - 1)
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
