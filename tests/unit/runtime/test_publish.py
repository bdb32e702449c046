"""The handshake on an engine whose policy is a hash of the adapter's file: any other file is another policy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from art.errors import CorruptCheckpointError, HandshakeError, NotFoundError
from art.runtime.publish import Scores, find_problem, largest_gap, publish
from art.storage import checkpoints
from tests.support.fake_engine import FakeEngine
from tests.support.published import PROBE_TOKENS, OnePolicyEngine, make_checkpoint


async def test_the_trained_adapter_is_published(tmp_path: Path) -> None:
    engine = FakeEngine()
    metrics = await publish(engine, "p/m@1", await make_checkpoint(tmp_path / "0001", adapter=1))
    assert metrics["publish/probe_gap"] == 0
    assert metrics["publish/probe_effect"] > 0.1
    assert await engine.score(PROBE_TOKENS, "p/m@1")


async def test_where_no_base_model_is_served_the_policy_proves_itself(tmp_path: Path) -> None:
    engine = OnePolicyEngine()
    metrics = await publish(engine, "p/m@1", await make_checkpoint(tmp_path / "0001", adapter=1))
    assert metrics["publish/probe_gap"] == 0
    assert "publish/base_gap" not in metrics
    with pytest.raises(HandshakeError, match="differ from the trainer's by"):
        await publish(engine, "p/m@2", await make_checkpoint(tmp_path / "0002", adapter=2, probe_of=1))


def test_without_a_base_model_the_bound_is_that_of_usual_noise() -> None:
    probe = checkpoints.Probe(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0], base_logprobs=[-3.0, -4.0])
    for gap, problem in ((1e-5, None), (1e-4, "at most 2e-05 is allowed")):
        scores = Scores(base_alone=None, policy=[[-1.0, -2.0], [-1.0 - gap, -2.0 - gap]], base=[])
        found = find_problem(scores, probe, dtype="float32")
        assert found is None if problem is None else problem in str(found)


async def test_another_adapter_is_refused_and_unloaded(tmp_path: Path) -> None:
    engine = FakeEngine()
    checkpoint = await make_checkpoint(tmp_path / "0001", adapter=2, probe_of=1)
    with pytest.raises(HandshakeError, match=r"p/m@1 was not published.*differ from the trainer's by"):
        await publish(engine, "p/m@1", checkpoint)
    with pytest.raises(NotFoundError):
        await engine.score(PROBE_TOKENS, "p/m@1")


async def test_an_adapter_of_another_norm_is_refused_though_the_probe_agrees(tmp_path: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(HandshakeError, match=r"the trainer saved one of 0\.5"):
        await publish(engine, "p/m@1", await make_checkpoint(tmp_path / "0001", adapter=1, norm=0.5))


@pytest.mark.parametrize("name", [checkpoints.ADAPTER_WEIGHTS, checkpoints.OPTIMIZER, checkpoints.PROBE])
async def test_a_changed_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    checkpoint = await make_checkpoint(tmp_path / "0001", adapter=1)
    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1
    (checkpoint / name).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=name):
        await publish(FakeEngine(), "p/m@1", checkpoint)


def test_largest_gap() -> None:
    assert largest_gap([0.0, -1.0], [0.0, -1.5]) == 0.5
    assert largest_gap([0.0], [0.0, 1.0]) == math.inf
    assert math.isnan(largest_gap([0.0, math.nan], [5.0, 0.0]))
    assert largest_gap([], []) == 0.0
