"""Which memory a placement needs, what is refused before a process starts, and whether the advice that is given works."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.config import EngineConfig, LoraConfig, ModelSettings, TrainerConfig, VllmConfig
from art.errors import ConfigError
from art.memory import GIB, shape_of
from art.runtime.memory import DeviceForecast, MemoryPlan, check_forecast, check_memory, forecast_devices
from art.runtime.placement import Devices, Gpu, choose_placement
from tests.support.model_shapes import QWEN3

KEEPS_ALL = TrainerConfig(gradient_checkpointing=False)


def plan(
    model: str = "8B",
    given: ModelSettings | None = None,
    *,
    gpu_gib: float = 141,
    num_gpus: int = 1,
    host_gib: int = 256,
) -> MemoryPlan:
    chosen = given or ModelSettings(engine=VllmConfig(), trainer=KEEPS_ALL)
    gpus = tuple(Gpu(name="GPU", memory_bytes=int(gpu_gib * GIB), selector=str(i)) for i in range(num_gpus))
    devices = Devices(gpus=gpus, has_mps=False, memory_bytes=host_gib * GIB)
    return MemoryPlan(choose_placement(chosen, devices), chosen, devices, shape_of(QWEN3[model]))


def parts(device: DeviceForecast) -> dict[str, float]:
    return {f"{part.owner} {part.name}": part.size_bytes / GIB for part in device.parts}


def with_share(given: MemoryPlan, share: str) -> MemoryPlan:
    engine = VllmConfig(flags={"gpu_memory_utilization": float(share)}, sleep=given.settings.engine.sleep)  # type: ignore[union-attr]
    chosen = given.settings.model_copy(update={"engine": engine})
    return MemoryPlan(given.placement, chosen, given.devices, given.shape)


def advised_share(error: ConfigError) -> str | None:
    match = re.search(r"'gpu_memory_utilization': ([0-9.]+)\}", error.message)
    return match and match[1]


def test_the_advice_for_the_share_of_vllm_is_accepted_on_an_h200() -> None:
    """8B on 141 GiB: 0.88 would leave room, 0.89 would not."""
    first = plan()
    with pytest.raises(ConfigError, match=r"vLLM takes 90% of cuda:0 .*the trainer needs 16.6 GiB") as caught:
        check_memory(first)
    share = advised_share(caught.value)
    assert share == "0.87"
    check_memory(with_share(first, share))
    assert not any(device.is_short for device in forecast_devices(with_share(first, share)))


@settings(max_examples=80, deadline=None)
@given(
    model=st.sampled_from(sorted(QWEN3)),
    gpu_gib=st.floats(8, 300),
    sleep=st.sampled_from(["auto", "never"]),
    rank=st.sampled_from([1, 16, 512]),
    share=st.floats(0.01, 1.0),
)
def test_following_the_advice_is_always_accepted(
    model: str, gpu_gib: float, sleep: Any, rank: int, share: float
) -> None:
    engine = VllmConfig(sleep=sleep, flags={"gpu_memory_utilization": share})
    chosen = ModelSettings(engine=engine, lora=LoraConfig(rank=rank))
    first = plan(model, chosen, gpu_gib=gpu_gib, host_gib=2048)
    if (error := refusal(first)) is not None:
        advised = advised_share(error)
        assert (advised is None) == ("no share suffices" in error.message)
        assert advised is None or refusal(with_share(first, advised)) is None


def refusal(given: MemoryPlan) -> ConfigError | None:
    try:
        check_memory(given)
    except ConfigError as error:
        return error
    return None


def test_a_share_that_does_not_hold_the_model_is_raised() -> None:
    first = plan("8B", ModelSettings(engine=VllmConfig(flags={"gpu_memory_utilization": 0.1})), num_gpus=2)
    with pytest.raises(ConfigError, match=r"vLLM itself needs at least 21\.\d GiB") as caught:
        check_memory(first)
    share = advised_share(caught.value)
    assert share is not None
    check_memory(with_share(first, share))


def test_a_gpu_is_shared_by_turns() -> None:
    """While vLLM sleeps the trainer's activations have its memory, and main memory has its weights."""
    asleep = forecast_devices(with_share(plan(gpu_gib=80), "0.5"))
    gpu, main = parts(asleep[0]), parts(asleep[1])
    assert asleep[0].moment == "while the trainer works"
    assert "engine weights" not in gpu
    assert gpu["engine process"] == 2
    assert main["engine weights in main memory while asleep"] == pytest.approx(15.3, abs=0.1)
    small = ModelSettings(engine=VllmConfig(), trainer=TrainerConfig(gradient_checkpointing=True))
    awake = forecast_devices(with_share(plan(given=small, gpu_gib=80), "0.75"))[0]
    assert awake.moment == "while the engine samples"
    assert "trainer activations" not in parts(awake)
    never = ModelSettings(engine=VllmConfig(sleep="never", flags={"gpu_memory_utilization": 0.5}))
    both = forecast_devices(plan(given=never, gpu_gib=80))
    assert {"engine weights", "trainer activations"} <= parts(both[0]).keys()
    assert "engine weights in main memory while asleep" not in parts(both[1])


def test_an_engine_on_another_machine_takes_nothing_here() -> None:
    chosen = ModelSettings(engine=VllmConfig(urls=("http://gpu",)))
    devices = forecast_devices(plan("8B", chosen, num_gpus=0, host_gib=64))
    assert {part.owner for device in devices for part in device.parts} == {"trainer"}
    check_memory(plan("8B", chosen, num_gpus=0, host_gib=64))  # two copies of the weights would not fit


def test_each_replica_of_an_engine_takes_memory_of_its_own() -> None:
    def needed(replicas: int) -> float:
        given = ModelSettings(engine=EngineConfig(replicas=replicas), trainer=KEEPS_ALL)
        return parts(forecast_devices(plan("0.6B", given, num_gpus=0))[-1])["engine weights"]

    assert needed(3) == pytest.approx(3 * needed(1))


def test_two_gpus_have_one_process_each() -> None:
    first, second, main = forecast_devices(plan(num_gpus=2))
    assert {part.owner for part in first.parts} == {"trainer"}
    assert {part.owner for part in second.parts} == {"engine"}
    assert parts(second)["engine KV cache"] > 100
    assert second.needed_bytes == pytest.approx(0.9 * 141 * GIB, rel=0.001)
    assert main.gpu_index is None


@pytest.mark.parametrize(
    ("given_plan", "message"),
    [
        (plan("32B", ModelSettings(), gpu_gib=80), r"cuda:0 \(GPU\) has 80.0 GiB, but .* at least .*`device_indices`"),
        (plan("32B", ModelSettings(), gpu_gib=40, num_gpus=2), r"cuda:0 \(GPU\) has 40.0 GiB, .*base weights of the trainer"),
        (plan("32B", ModelSettings(), num_gpus=0, host_gib=64), r"this machine has 64.0 GiB, .*bfloat16"),
        (
            plan("8B", ModelSettings(lora=None, engine=VllmConfig(weights="merged")), gpu_gib=80, num_gpus=2),
            r"trainer optimiser moments 51\.\d GiB.*`lora`|train a LoRA",
        ),
        (plan("8B", gpu_gib=16), r"no share suffices"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_by_part(given_plan: MemoryPlan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_memory(given_plan)


@pytest.mark.parametrize(
    "given_plan",
    [
        plan("32B", ModelSettings(), num_gpus=2),
        plan("14B", ModelSettings(engine=EngineConfig(device="cpu", dtype="bfloat16")), gpu_gib=80),
        plan("14B", ModelSettings(engine=EngineConfig(dtype="bfloat16"), trainer=TrainerConfig(dtype="bfloat16")), num_gpus=0),
        plan("32B", ModelSettings(trainer=TrainerConfig(quantization="nf4"), engine=EngineConfig(device="cpu")), gpu_gib=24),
    ],
)  # fmt: skip
def test_what_fits_passes(given_plan: MemoryPlan) -> None:
    check_memory(given_plan)


# -- the check before a step --


@pytest.mark.parametrize(("model", "gpu_gib"), [("0.6B", 16), ("1.7B", 24), ("4B", 24), ("4B", 48), ("8B", 80)])
def test_what_is_short_is_named_by_its_largest_part(model: str, gpu_gib: int) -> None:
    chosen = ModelSettings(
        engine=VllmConfig(flags={"gpu_memory_utilization": 0.1}, max_context=8192), trainer=KEEPS_ALL
    )
    check = check_forecast(plan(model, chosen, gpu_gib=gpu_gib))
    assert check.status == "warning"
    assert re.search(
        r"GiB are missing on cuda:0 .*activations of the trainer take .*`trainer.max_tokens`", check.remedy or ""
    )


def test_main_memory_that_does_not_suffice_is_a_failure() -> None:
    """The kernel would end the trainer: nothing makes its micro-batches smaller there."""
    chosen = ModelSettings(engine=EngineConfig(max_context=4096, kv_cache_tokens=8192))
    assert check_forecast(plan("1.7B", chosen, num_gpus=0, host_gib=128)).status == "ok"
    check = check_forecast(plan("1.7B", chosen, num_gpus=0, host_gib=28))
    assert check.status == "failure"
    assert "this machine" in (check.remedy or "")
    assert "GiB are missing" in (check.remedy or "")


@pytest.mark.parametrize(("gpu_gib", "mode"), [(141, "none"), (80, "selective"), (28, "full")])
def test_auto_is_forecast_to_choose_the_checkpointing_that_fits(gpu_gib: int, mode: str) -> None:
    chosen = ModelSettings(engine=VllmConfig(flags={"gpu_memory_utilization": 0.3}))
    auto = plan("8B", chosen, gpu_gib=gpu_gib)
    assert auto.trainer.checkpointing == mode
    assert not any(device.is_short for device in forecast_devices(auto)) or mode == "full"


def test_the_forecast_is_listed_by_part() -> None:
    check = check_forecast(plan(num_gpus=2))
    names = {part.name for part in check.memory if part.owner == "trainer"}
    assert {"base weights", "gradients", "optimiser moments", "activations", "workspaces of a pass"} <= names
    total = sum(part.size_bytes for part in check.memory if part.where.startswith("cuda:0"))
    assert check.measured["needed bytes of cuda:0 (GPU)"] == total
    assert check_forecast(None).found.startswith("not forecast")
