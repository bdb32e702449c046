"""A loss of the user's own with `LocalBackend`: its module lies where this process finds it, as beside a script."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import pytest_asyncio

import art
from art.config import CustomLossConfig, ServerConfig
from art.config.losses import LOSS_PATH_VARIABLE
from art.errors import ConfigError, TrainingError
from art.local_backend import _loss_path
from art.tasks.yes_no_maybe import YesNoMaybe

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULE = """\
from art.losses import LossInputs, LossOutput, unclipped


def weighted(inputs: LossInputs, *, factor: float) -> LossOutput:
    return unclipped(-factor * inputs.advantages * inputs.policy_logprobs)


def broken(inputs: LossInputs) -> LossOutput:
    return unclipped(inputs.policy_logprobs * inputs.credit)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(shared_backend: art.LocalBackend, tiny_model: Path) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="custom-loss", base_model=str(tiny_model))
    await model.register(shared_backend)
    return model


async def rollouts(model: art.TrainableModel) -> list[art.TrajectoryGroup]:
    task = YesNoMaybe()
    (scenario,) = task.scenarios("train", seed=0, count=1)
    group = art.TrajectoryGroup(task.rollout(model, scenario, rollout_index=i) for i in range(8))
    return await art.gather_trajectory_groups([group], pbar_desc=None)


async def test_a_step_with_a_loss_of_one_s_own(
    shared_backend: art.LocalBackend, model: art.TrainableModel, own_modules: Path
) -> None:
    (own_modules / "losses_of_this_test.py").write_text(MODULE)
    weighted = importlib.import_module("losses_of_this_test").weighted
    groups = await rollouts(model)
    loss = CustomLossConfig(function=weighted, settings={"factor": 0.0})
    still = await shared_backend.train(model, groups, loss=loss, learning_rate=1e-3)
    assert still.metrics["loss/grad_norm"] == 0
    moving = loss.model_copy(update={"settings": {"factor": 1.0}})
    moved = await shared_backend.train(model, groups, loss=moving, learning_rate=1e-3)
    assert moved.metrics["loss/grad_norm"] > 0
    assert moved.step == still.step + 1

    with pytest.raises(TrainingError, match=r"(?s)losses_of_this_test\.py.*in broken.*no attribute 'credit'"):
        await shared_backend.train(model, groups, loss=CustomLossConfig(function="losses_of_this_test:broken"))
    with pytest.raises(ConfigError, match=r"cannot import .*no_such_module"):
        await shared_backend.train(model, groups, loss=CustomLossConfig(function="no_such_module:loss"))
    assert await shared_backend.get_step(model) == moved.step


async def test_where_modules_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the script, in the current folder (notebooks), and what the variable named before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "missing"), str(Path(__file__).parent)])
    monkeypatch.setenv(LOSS_PATH_VARIABLE, "/own/losses")
    assert _loss_path().split(os.pathsep) == ["/own/losses", str(tmp_path), str(Path(__file__).parent)]


async def test_a_backend_allows_what_its_settings_say(tmp_path: Path) -> None:
    assert art.LocalBackend(path=tmp_path)._config.custom_losses == ("*",)
    for allowed in ((), ("my_losses",)):
        backend = art.LocalBackend(path=tmp_path, server_config=ServerConfig(custom_losses=allowed))
        assert backend._config.custom_losses == allowed
