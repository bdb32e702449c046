"""What the fake engine has beyond the contract: scripts, and a record of what was asked."""

from __future__ import annotations

import numpy as np
import pytest

from art.engine import GenerateRequest
from tests.support.fake_engine import FakeEngine


def ask(**fields: object) -> GenerateRequest:
    defaults = {"request_id": "r", "adapter": None, "prompt_token_ids": [1, 2], "max_tokens": 10, "seed": 3}
    return GenerateRequest(**{"stop_token_ids": (9,), **defaults, **fields})


async def test_a_script_answers_by_request() -> None:
    engine = FakeEngine(script=lambda request: [request.prompt_token_ids[-1], 8, 9])
    (chunk,) = [c async for c in engine.generate(ask(prompt_token_ids=[4, 5]), stream=False)]
    assert (chunk.token_ids, chunk.finish_reason) == ([5, 8, 9], "stop")
    assert [r.prompt_token_ids for r in engine.requests] == [[4, 5]]
    scored = await engine.score([4, 5, 5, 8, 9], None)
    assert scored[1:] == pytest.approx(chunk.logprobs)


async def test_a_script_that_is_cut_off_ends_by_length() -> None:
    engine = FakeEngine(script=lambda request: [7, 8, 9])
    (chunk,) = [c async for c in engine.generate(ask(max_tokens=2), stream=False)]
    assert (chunk.token_ids, chunk.finish_reason) == ([7, 8], "length")
    chunks = [c async for c in engine.generate(ask(stop_token_ids=(), first_index=1), stream=True)]
    assert [c.token_ids for c in chunks] == [[8], [9]]


async def test_it_samples_from_the_distribution_that_it_reports() -> None:
    engine = FakeEngine(vocab_size=6)
    probs = np.array([np.exp(await engine.score([0, token], None))[0] for token in range(6)])
    assert probs.sum() == pytest.approx(1.0)
    counts = np.zeros(6)
    for seed in range(3000):
        async for chunk in engine.generate(ask(prompt_token_ids=[0], max_tokens=1, seed=seed), stream=False):
            counts[chunk.token_ids[0]] += 1
    assert np.abs(counts / 3000 - probs).max() < 0.04
