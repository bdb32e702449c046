"""Which devices engine and trainer get, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import art.runtime.runtime
from art.config import EngineConfig, ModelSettings, ServerConfig, TrainerConfig, VllmConfig
from art.errors import ConfigError
from art.protocol.training import RegisterRequest
from art.runtime import placement as placement_module
from art.runtime.hosting.host import BaseModelHost, Hosts
from art.runtime.placement import (
    AssignedDevices,
    Devices,
    Gpu,
    check_placement,
    choose_placement,
    find_devices,
    parse_gpus,
    smallest_memory,
)
from art.runtime.registry import RegisteredModel
from art.runtime.runtime import Runtime
from art.storage.layout import DataDir

GIB = 2**30
LISTING = "0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559\n1, GPU-bb22, NVIDIA L4, 23034\n"


def machine(num_gpus: int, gpu_gib: int = 80, memory_gib: int = 64, has_mps: bool = False) -> Devices:
    gpus = tuple(Gpu(name="H100", memory_bytes=gpu_gib * GIB, selector=str(i)) for i in range(num_gpus))
    return Devices(gpus=gpus, has_mps=has_mps, memory_bytes=memory_gib * GIB)


def settings(engine: dict[str, Any] | None = None, **trainer: Any) -> ModelSettings:
    return ModelSettings(engine=EngineConfig(**(engine or {})), trainer=TrainerConfig(**trainer))


def placed(devices: Devices, given: ModelSettings) -> tuple[str, str]:
    placement = choose_placement(given, devices)
    check_placement(placement, given, devices)
    return str(placement.engine), str(placement.trainer)


@pytest.mark.parametrize(
    ("num_gpus", "given", "expected"),
    [
        (0, settings(), ("cpu", "cpu")),
        (1, settings(), ("cuda:0", "cuda:0")),
        (1, settings({"device": "cpu"}), ("cpu", "cuda:0")),
        (2, settings(), ("cuda:1", "cuda:0")),
        (4, settings(num_processes=3), ("cuda:3", "cuda:0, cuda:1, cuda:2")),
        (2, settings(num_processes=2), ("cuda:0", "cuda:0, cuda:1")),
        (2, settings({"device_indices": (0,)}), ("cuda:0", "cuda:1")),
        (1, settings({"device_indices": (0,)}), ("cuda:0", "cuda:0")),
        (4, settings({"device_indices": (1,)}, num_processes=2), ("cuda:1", "cuda:0, cuda:2")),
        (4, settings(device_indices=(2, 3), num_processes=2), ("cuda:0", "cuda:2, cuda:3")),
        (2, settings({"device_indices": (1,)}, device_indices=(1,)), ("cuda:1", "cuda:1")),
    ],
)
def test_what_is_not_said_is_chosen(num_gpus: int, given: ModelSettings, expected: tuple[str, str]) -> None:
    assert placed(machine(num_gpus), given) == expected


def test_a_mac_without_nvidia_uses_its_own() -> None:
    assert placed(machine(0, has_mps=True), settings()) == ("mps", "mps")


@pytest.mark.parametrize(
    ("devices", "given", "message"),
    [
        (machine(0), settings({"device": "cuda"}), r"`engine.device` is 'cuda', but this machine shows no NVIDIA GPU"),
        (machine(0), settings(device="cuda"), r"`trainer.device` is 'cuda', but .* use \"auto\" or \"cpu\""),
        (machine(0), settings({"device": "mps"}), r"no Mac with Apple silicon"),
        (machine(2), settings({"device_indices": (2,)}), r"`engine.device_indices` is \[2\], but .* 2 GPUs .* from 0 to 1"),
        (machine(0), settings(device_indices=(0,)), r"`trainer.device_indices` is \[0\]"),
        (machine(2), settings(num_processes=3), r"`trainer.num_processes` is 3, each on a GPU of its own, but .* 2 GPUs"),
        (machine(0, has_mps=True), settings(num_processes=2), r'"mps", a single one; set it to 1'),
    ],
)  # fmt: skip
def test_devices_that_are_not_there_are_refused(devices: Devices, given: ModelSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(devices, given)


def vllm(flags: dict[str, Any] | None = None, **fields: Any) -> ModelSettings:
    return ModelSettings(engine=VllmConfig(flags=flags or {}, **fields))


def test_vllm_gets_as_many_as_its_flags_ask_for() -> None:
    assert placed(machine(4), vllm({"tensor_parallel_size": 2})) == ("cuda:1, cuda:2", "cuda:0")
    assert placed(machine(2), vllm({"tensor_parallel_size": 2})) == ("cuda:0, cuda:1", "cuda:0")
    assert placed(machine(1), vllm(urls=("http://gpu:8000",))) == ("elsewhere", "cuda:0")
    for given in (vllm({"tensor_parallel_size": 8}), vllm(device_indices=(0, 1))):
        with pytest.raises(ConfigError, match=r"the flags of vLLM make . GPUs"):
            placed(machine(2), given)


def test_replicas_divide_the_gpus_of_their_engine(tmp_path: Path) -> None:
    four = machine(4)
    given = settings({"replicas": 3})
    assert placed(four, given) == ("cuda:1, cuda:2, cuda:3", "cuda:0")
    parallel = ModelSettings(engine=VllmConfig(replicas=2, flags={"tensor_parallel_size": 2}))
    assert [one.indices for one in choose_placement(parallel, machine(5)).engine.split(2)] == [(1, 2), (3, 4)]
    host = BaseModelHost("m", given, DataDir(tmp_path), ServerConfig(), devices=four)
    visible = [replica.process.spec.variables["CUDA_VISIBLE_DEVICES"] for replica in host.engine.replicas]
    assert visible == ["1", "2", "3"]
    assert [replica.process.spec.name for replica in host.engine.replicas][1] == "engine 2 of m"
    assert len({process.spec.log_path for process in host.processes}) == 4


def test_replicas_divide_the_threads_on_a_cpu(tmp_path: Path) -> None:
    given = settings({"replicas": 2, "num_threads": 7})
    host = BaseModelHost("m", given, DataDir(tmp_path), ServerConfig(), devices=machine(0))
    assert [replica.process.spec.num_threads for replica in host.engine.replicas] == [3, 3]


@pytest.mark.parametrize(
    ("num_gpus", "engine", "num_ranks", "expected"),
    [
        (8, {}, 2, 6),
        (8, {"kind": "vllm", "flags": {"tensor_parallel_size": 2}}, 2, 3),
        (1, {}, 1, 1),
        (0, {}, 1, 1),
        (4, {"device_indices": (1, 3)}, 1, 2),
    ],
)
def test_as_many_replicas_as_there_is_room_for(
    tmp_path: Path, num_gpus: int, engine: dict[str, Any], num_ranks: int, expected: int
) -> None:
    given = ModelSettings.model_validate(
        {"engine": {"replicas": "auto", **engine}, "trainer": {"num_processes": num_ranks}}
    )
    assert ModelSettings.model_validate_json(given.model_dump_json()).engine.replicas == "auto"
    hosts = Hosts(DataDir(tmp_path), ServerConfig(), machine(num_gpus))
    hosts._of("key", "m", given)
    (host,) = hosts.all()
    assert len(host.engine.replicas) == expected
    check_placement(host.placement, host.settings, machine(num_gpus))


@pytest.mark.parametrize(
    ("devices", "engine", "message"),
    [
        (machine(2), {"replicas": 3}, "each on 1 GPU of its own, so 3 are needed, but the engine has cuda:0, cuda:1"),
        (machine(0, has_mps=True), {"replicas": 2}, '"mps", a single one'),
        (Devices(gpus=None, has_mps=False, memory_bytes=GIB), {"replicas": 2}, "lists no GPUs"),
    ],
)
def test_replicas_without_devices_of_their_own_are_refused(
    devices: Devices, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        placed(devices, settings(engine))
    assert refused.value.param == "replicas"


def test_ray_finds_gpus_on_other_machines() -> None:
    given = vllm({"distributed_executor_backend": "ray", "tensor-parallel-size": 8, "pipeline_parallel_size": 2})
    placement = choose_placement(given, machine(2))
    check_placement(placement, given, machine(2))
    assert str(placement.trainer) == "cuda:0"
    assert placement.engine.environment(machine(2)) == {}  # Ray says which GPUs each of its processes sees
    assert not placement.shared
    assert not placement.sleeps
    assert smallest_memory(placement.engine, machine(2)) == 80 * 2**30


@pytest.mark.parametrize(
    ("devices", "given", "sleeps"),
    [
        (machine(1), vllm(), True),
        (machine(1), vllm(sleep="never"), False),
        (machine(2), vllm(), False),
        (machine(0), vllm(), False),
        (machine(0), vllm(sleep="always"), True),
        (machine(1), vllm(urls=("http://gpu:8000",)), False),
        (machine(1), settings(), False),
    ],
)
def test_vllm_sleeps_where_it_shares_a_gpu_with_the_trainer(
    devices: Devices, given: ModelSettings, sleeps: bool
) -> None:
    placement = choose_placement(given, devices)
    check_placement(placement, given, devices)
    assert placement.sleeps == sleeps


def test_sleeping_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the engine runs on cuda:1 and the trainer on cuda:0.*`sleep`"):
        placed(machine(2), vllm(sleep="always"))
    with pytest.raises(ConfigError, match="never put to sleep"):
        vllm(sleep="always", urls=("http://gpu:8000",))


def test_what_cannot_be_listed_is_left_to_torch() -> None:
    unknown = Devices(gpus=None, has_mps=False, memory_bytes=GIB)
    assert placed(unknown, settings({"device": "cuda"}, num_processes=2)) == ("cuda", "cuda")
    assert choose_placement(settings(), unknown).trainer.environment(unknown) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: EngineConfig(device="cpu", device_indices=(0,)),
        lambda: EngineConfig(device_indices=(0, 1)),
        lambda: TrainerConfig(device="mps", device_indices=(0,)),
        lambda: TrainerConfig(device_indices=(0, 0), num_processes=2),
        lambda: TrainerConfig(device_indices=(-1,)),
        lambda: TrainerConfig(device_indices=(0, 1)),
        lambda: TrainerConfig(device_indices=(0,), num_processes=2),
    ],
)
def test_settings_that_contradict_themselves(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="device_indices"):
        wrong()


# -- what is there --


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [("NVIDIA H100 80GB HBM3", "0"), ("NVIDIA L4", "1")]),
        ("1,0", [("NVIDIA L4", "1"), ("NVIDIA H100 80GB HBM3", "0")]),
        ("GPU-bb", [("NVIDIA L4", "GPU-bb")]),
        ("0,7,1", [("NVIDIA H100 80GB HBM3", "0")]),
        ("MIG-1234", [("slice of a GPU", "MIG-1234")]),
    ],
)
def test_gpus_are_counted_as_cuda_does(visible: str | None, expected: list[tuple[str, str]]) -> None:
    assert [(gpu.name, gpu.selector) for gpu in parse_gpus(LISTING, visible)] == expected


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `nvidia-smi` on the PATH that prints `LISTING`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{LISTING}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    find_devices.cache_clear()
    yield
    find_devices.cache_clear()


def test_the_driver_is_asked(smi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_devices()
    assert [gpu.memory_bytes for gpu in found.gpus or ()] == [81559 * 2**20, 23034 * 2**20]
    assert found.default_kind == "cuda"
    assert found.memory_bytes > GIB / 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    find_devices.cache_clear()
    assert find_devices().gpus == ()


def test_a_driver_without_its_tool_leaves_gpus_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(placement_module, "_DEVICE_FILES", (tmp_path,))
    find_devices.cache_clear()
    assert find_devices().gpus is None
    find_devices.cache_clear()


# -- what the processes see --


def test_each_process_sees_its_own_gpus(tmp_path: Path) -> None:
    gpus = tuple(Gpu(name="H100", memory_bytes=GIB, selector=selector) for selector in ("4", "5", "GPU-c"))
    devices = Devices(gpus, has_mps=False, memory_bytes=GIB)
    given = settings({"device_indices": (2,)}, num_processes=2)
    host = BaseModelHost("base", given, DataDir(tmp_path), ServerConfig(), devices=devices)
    assert host.engine_process.spec.variables["CUDA_VISIBLE_DEVICES"] == "GPU-c"
    trainer = host.trainer_process.spec.variables
    assert (trainer["CUDA_VISIBLE_DEVICES"], trainer["CUDA_DEVICE_ORDER"]) == ("4,5", "PCI_BUS_ID")
    assert AssignedDevices("cpu").environment(machine(1)) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (1, [("cuda:0", "cuda:0")] * 3),
        (2, [("cuda:1", "cuda:0")] * 3),
        (3, [("cuda:1", "cuda:0"), ("cuda:0", "cuda:2"), ("cuda:2", "cuda:1")]),
        (4, [("cuda:1", "cuda:0"), ("cuda:3", "cuda:2"), ("cuda:1", "cuda:0")]),
        (6, [("cuda:1", "cuda:0"), ("cuda:3", "cuda:2"), ("cuda:5", "cuda:4")]),
    ],
)
def test_base_models_spread_over_the_gpus(num_gpus: int, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    hosts = Hosts(DataDir(tmp_path), ServerConfig(), devices=machine(num_gpus))
    models = [RegisteredModel("p", name, name, settings(), 0) for name in ("one", "two", "three")]
    for model, (engine, trainer) in zip(models, expected, strict=True):
        before = hosts.placement_of(model, machine(num_gpus))
        host = hosts.of(model)
        assert (str(host.placement.engine), str(host.placement.trainer)) == (engine, trainer)
        assert hosts.placement_of(model, machine(num_gpus)) == before == (host.placement, host.settings)
    assert hosts.of(models[0]) is hosts.of(RegisteredModel("p", "again", "one", settings(), 0)), "nothing else to place"


async def test_gpus_of_a_base_model_that_is_gone_are_free_again(tmp_path: Path) -> None:
    hosts = Hosts(DataDir(tmp_path), ServerConfig(), devices=machine(4))
    one, two, three = (RegisteredModel("p", name, name, settings(), 0) for name in ("one", "two", "three"))
    hosts.of(one)
    hosts.of(two)
    await hosts.close_unused([two])
    assert str(hosts.of(three).placement.trainer) == "cuda:0"


async def test_a_model_is_refused_before_any_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(art.runtime.runtime, "find_devices", lambda: machine(0))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    runtime = Runtime(tmp_path, ServerConfig())
    await runtime.start()
    try:
        request = RegisterRequest(project="p", name="m", base_model=str(tmp_path), settings=settings(device="cuda"))
        with pytest.raises(ConfigError, match="no NVIDIA GPU"):
            await runtime.registration.register(request)
        assert runtime.models.list_all() == []
        assert (await runtime.health())["base_models"] == []
    finally:
        await runtime.close()
