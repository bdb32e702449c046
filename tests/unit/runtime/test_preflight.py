"""Every check of the preflight can fail, says so, and is asked for once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.config import ModelSettings
from art.engine import EngineInfo
from art.errors import ConfigError, ProcessError, TrainingError
from art.gateway.renderer import load_renderer
from art.protocol.samples import TrainingSample
from art.protocol.training import CheckResult
from art.runtime.placement import AssignedDevices, Placement
from art.runtime.registry import RegisteredModel
from art.runtime.submission import (
    Preflight,
    check_devices,
    check_disk,
    check_trial,
    quick_checks,
    random_sample,
    rollout_samples,
)
from tests.support.gateway import make_tokenizer
from tests.support.recorded_exchanges import (
    BRANCH,
    BRANCHING,
    FIRST,
    SECOND,
    TWO_TURNS,
    Recorded,
    resolved,
    trajectory,
)

GIB = 2**30
ON_CPU = Placement(engine=AssignedDevices("cpu"), trainer=AssignedDevices("cpu"))
INFO = EngineInfo(vocab_size=400, max_context=64, dtype="float32", device="cpu")
MODEL = RegisteredModel(project="p", name="m", base_model="base", settings=ModelSettings(), step=0)
GOOD_TRIAL = {
    "seconds": 2.0, "num_tokens": 64.0, "num_tree_tokens": 64.0, "grad_norm": 0.5, "peak_memory_bytes": 4.0 * GIB,
    "headroom_bytes": 8.0 * GIB,
}  # fmt: skip


class Host:
    """What a preflight asks of a host."""

    def __init__(self, tokenizer: Path | None = None, trial: dict[str, float] | Exception | None = None) -> None:
        self.placement = ON_CPU
        self.settings = ModelSettings()
        self.tokenizer = tokenizer
        self.trainer = self  # the preflight asks it for the trial alone
        self._trial = trial or GOOD_TRIAL
        self.tried: list[TrainingSample] = []
        self.asked = 0
        self.trainer = self

    async def engine_info(self) -> EngineInfo:
        self.asked += 1
        return INFO

    def memory_plan(self) -> None:
        return None  # there is no base model

    async def renderer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("base has no chat template")
        return load_renderer(self.tokenizer)

    async def trial(self, samples: list[TrainingSample], lora: Any) -> dict[str, float]:
        self.tried = samples
        if isinstance(self._trial, Exception):
            raise self._trial
        return dict(self._trial)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


def status_of(checks: list[CheckResult], name: str) -> str:
    return next(check.status for check in checks if check.name == name)


# -- devices and disk --


def test_an_engine_on_another_device_is_found() -> None:
    assert check_devices(ON_CPU, INFO).status == "ok"
    placement = Placement(engine=AssignedDevices("cuda", (1,)), trainer=AssignedDevices("cuda", (0,)))
    check = check_devices(placement, INFO)
    assert check.status == "warning"
    assert (
        "engine on cuda:1 in float32, trainer on cuda:0; each has memory of its own; but the engine runs on cpu"
        in check.found
    )
    assert check_devices(placement, replace(INFO, device="cuda")).status == "ok"


@pytest.mark.parametrize(("free", "status"), [(1500, "failure"), (50_000, "warning"), (200_000, "ok")])
def test_too_little_disk_space_is_found(tmp_path: Path, free: int, status: str) -> None:
    (tmp_path / "adapter").write_bytes(b"x" * 1000)
    check = check_disk(tmp_path, tmp_path, free_bytes=free)
    assert check.status == status
    assert check.measured == {"free_bytes": free, "checkpoint_bytes": 1000}
    assert check_disk(tmp_path, tmp_path).measured["free_bytes"] > 0


# -- before the first step --


async def test_quick_checks_look_at_everything(tmp_path: Path, tokenizer: Path) -> None:
    checks = await quick_checks(Host(tokenizer), tmp_path, tmp_path)
    names = ["devices", "disk space", "memory forecast", "chat template", "tool parser"]
    assert [check.name for check in checks] == names


async def test_a_model_without_a_chat_template_is_not_trained(tmp_path: Path) -> None:
    host = Host()
    for _ in range(2):  # a failure is looked at again: it may be mended
        with pytest.raises(ConfigError, match=r"not ready to be trained:\n- chat template: base has no chat template"):
            await Preflight().ensure(MODEL, host, tmp_path, tmp_path)
    assert host.asked == 2


async def test_what_has_passed_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    host, preflight = Host(make_tokenizer(tmp_path / "model", template=template)), Preflight()
    warnings = await preflight.ensure(MODEL, host, tmp_path, tmp_path)
    assert [warning.split(":")[0] for warning in warnings] == ["tool parser"]
    assert await preflight.ensure(MODEL, host, tmp_path, tmp_path) == []
    assert host.asked == 1
    changed = replace(MODEL, settings=ModelSettings.model_validate({"trainer": {"max_tokens": 128}}))
    assert await preflight.ensure(changed, host, tmp_path, tmp_path) == warnings
    assert host.asked == 2


# -- the trial step --


@pytest.mark.parametrize(
    ("trial", "status", "found"),
    [
        (GOOD_TRIAL, "ok", "32 tokens/s"),
        (GOOD_TRIAL | {"headroom_bytes": 0.1 * GIB}, "warning", "0.10 GiB were left"),
        (GOOD_TRIAL | {"grad_norm": 0.0}, "failure", "would not learn"),
        (GOOD_TRIAL | {"grad_norm": math.nan}, "failure", "would not learn"),
        (TrainingError("sample 'trial', of 64 tokens, does not fit into memory even alone"), "failure", "does not fit"),
        (ProcessError("the trainer died (SIGKILL)"), "failure", "died (SIGKILL)"),
    ],
)
async def test_what_a_trial_step_shows(trial: Any, status: str, found: str) -> None:
    host: Any = Host(trial=trial)
    check = await check_trial("longest sequence", MODEL, host, [random_sample(length=64, vocab_size=400)])
    assert check.status == status
    assert found in check.found
    assert (check.remedy is None) == (status == "ok")


def test_rollouts_become_samples_with_their_answers_to_be_learnt() -> None:
    samples = rollout_samples(
        resolved([trajectory(1.0, TWO_TURNS), trajectory(1.0, BRANCHING)]),
        Recorded(FIRST, SECOND, BRANCH),  # type: ignore[arg-type]
    )
    whole = [False, False, False, True, True, False, True, True]
    assert [sample.loss_mask for sample in samples] == [whole, whole[:5], [False, False, False, True]]
    assert all(sample.component == "sft" for sample in samples)
