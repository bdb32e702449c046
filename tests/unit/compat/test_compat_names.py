"""Older names: what they give, and what the refused ones say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from openai.types.chat.chat_completion import Choice

import art
from art.compat.refused import REFUSED
from art.utils import get_repo_root_path, strip_logprobs


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from art import TinkerBackend", r"art-server.*art\.RemoteBackend"),
        ("from art.utils.deployment import TogetherDeploymentConfig, deploy_model", r"backend\.export.*backend\.push"),
        ("from art.utils import deploy_model", r"backend\.export"),
        ("from art.utils.s3 import pull_model_from_s3", r"backend\.pull"),
        ("from art import PipelineTrainer", "trajectory_group_batches"),
    ],
)
def test_what_is_gone_says_what_to_use(statement: str, advice: str) -> None:
    with pytest.raises(ImportError, match=advice):
        exec(statement)


def test_no_name_is_both_there_and_refused() -> None:
    for module, names in REFUSED.items():
        there = importlib.import_module(module)
        assert not [name for name in names if name in vars(there)]
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = there.no_such_name


def test_types_of_older_modules_are_the_same() -> None:
    from art.local.backend import LocalBackend
    from art.trajectories import TrajectoryGroup, get_messages
    from art.types import TrainConfig

    assert (LocalBackend, TrajectoryGroup, TrainConfig) == (art.LocalBackend, art.TrajectoryGroup, art.TrainConfig)
    assert get_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]


def test_strip_logprobs() -> None:
    choice = Choice.model_validate(
        {
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}, "exchange_id": "e",
            "logprobs": {"content": [{"token": "hi", "logprob": -1.0, "top_logprobs": []}], "refusal": None},
        }
    )  # fmt: skip
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "x"}, choice], reward=1.0)
    stripped = strip_logprobs([trajectory, {"logprobs": 1, "a": (choice, 2)}])
    bare = stripped[0].messages_and_choices[1]
    assert bare.logprobs is None
    assert (bare.exchange_id, bare.message.content, stripped[0].reward) == ("e", "hi", 1.0)
    assert stripped[1]["logprobs"] is None
    assert stripped[1]["a"][0].logprobs is None
    assert choice.logprobs is not None


def test_the_root_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert get_repo_root_path() == str(inner)
    (tmp_path / ".git").mkdir()
    assert get_repo_root_path() == str(tmp_path)


def test_older_arguments_of_the_local_backend(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        art.LocalBackend(in_process=True)
    assert "processes of their own" in caplog.text
    with pytest.raises(art.ArtError, match="gpu_cost_per_hour_usd must be 0 USD or more, got -1"):
        art.LocalBackend(gpu_cost_per_hour_usd=-1)


async def test_the_price_of_the_machine(tmp_path: Path) -> None:
    from art.costs import Prices

    backend = art.LocalBackend(path=tmp_path, gpu_cost_per_hour_usd=3.0)
    for prices, expected in ((Prices(), 3.0), (Prices(device_usd_per_hour=1.0), 1.0)):
        model = art.Model(name="m", project="p", prices=prices)
        await model.register(backend)
        assert model.prices.device_usd_per_hour == expected
    await backend.close()
