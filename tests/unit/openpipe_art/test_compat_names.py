"""Older names: what they give, and what the refused ones say."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art
from art.utils import get_repo_root_path, strip_logprobs
from openpipe_art.older import REFUSED


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from art.tinker import TinkerBackend", r"art-server.*art\.RemoteBackend"),
        ("import art.megatron.train", r"LocalBackend.*num_processes"),
        ("from art.pipeline_trainer import PipelineTrainer", r"art\.pipeline"),
        ("import importlib; importlib.import_module('art.unsloth')", "ModelSettings"),
        ("from art import TinkerBackend", r"art-server.*art\.RemoteBackend"),
        ("from art.utils.deployment import TogetherDeploymentConfig, deploy_model", r"backend\.export.*backend\.push"),
        ("from art.utils import deploy_model", r"backend\.export"),
        ("from art.utils.s3 import pull_model_from_s3", r"backend\.pull"),
        ("from art.utils.benchmarking.load_trajectories import load_trajectories", r"read_groups"),
        ("from art import PipelineTrainer", "trajectory_group_batches"),
    ],
)
def test_what_is_gone_says_what_to_use(statement: str, advice: str) -> None:
    with pytest.raises(ImportError, match=advice):
        exec(statement)


def test_no_name_is_both_there_and_refused() -> None:
    for module, names in REFUSED.items():
        if module == "backend":
            continue
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
    assert list(stripped[1]) == ["a"]
    assert stripped[1]["a"][0].logprobs is None
    assert choice.logprobs is not None
    kept = SimpleNamespace(logprobs=[1], inner=SimpleNamespace(logprobs=2, text="x"))
    bare_object = strip_logprobs(kept)
    assert (bare_object.logprobs, bare_object.inner.logprobs, bare_object.inner.text) == (None, None, "x")
    assert kept.inner.logprobs == 2


@pytest.mark.parametrize(
    "name", ["format_message", "get_model_step", "get_repo_root_path", "iterate_dataset", "limit_concurrency", "retry"]
)
def test_functions_of_utils_are_found_in_modules_of_their_names(name: str) -> None:
    module = importlib.import_module(f"art.utils.{name}")
    assert getattr(art.utils, name) is getattr(module, name), "importing the module does not hide the function"


def test_lines_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    from art.utils.logging import dim, err, info, ok, step, warn

    for say in (info, step, ok, warn, err, dim):
        say(f"by {say}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert "INFO" in lines[0]
    assert "ERR" in lines[4]


def test_an_answer_that_repeats_a_teachers() -> None:
    from art.guided_completion import get_guided_completion_params

    tool = {"type": "function", "function": {"name": "play", "parameters": {"type": "object"}}}
    call = SimpleNamespace(function=SimpleNamespace(name="play", arguments='{"cell": 4}'))

    def said(content: str | None, *calls: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content, tool_calls=calls))])

    assert get_guided_completion_params(said("a1")) == (["a1"], None, None)
    guided, choice, tools = get_guided_completion_params(said(None, call), [tool])
    assert (guided, choice) == (None, {"type": "function", "function": {"name": "play"}})
    assert tools is not None
    assert tools[0]["function"]["parameters"]["properties"] == {"cell": {"enum": [4]}}
    assert tool["function"]["parameters"] == {"type": "object"}  # type: ignore[index]
    with pytest.raises(art.ArtError, match="not in `base_tools`"):
        get_guided_completion_params(said(None, call))


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


async def test_without_the_package_an_older_spelling_is_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("art", "art.plugins"):
        monkeypatch.setattr(f"{module}.find_plugins", lambda group: {})
    with pytest.raises(AttributeError, match="'art' has no attribute 'PipelineTrainer'"):
        _ = art.PipelineTrainer
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'art\.tinker'"):
        importlib.import_module("art.tinker")
    with pytest.raises(ValueError, match="entity"):
        art.Model(name="m", project="p", entity="me")
    with pytest.raises(AttributeError, match="_experimental_push_to_s3"):
        _ = art.LocalBackend()._experimental_push_to_s3


def test_a_module_of_older_code_is_the_one_that_has_its_names_today() -> None:
    import art.local.backend
    import art.utils.sft
    from openpipe_art import sft, utils

    assert (art.utils, art.utils.sft) == (utils, sft)
    assert (utils.__spec__ is not None and utils.__spec__.name) == "openpipe_art.utils"
    assert art.local.backend.LocalBackend is art.LocalBackend
