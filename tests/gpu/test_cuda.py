"""Engine and trainer on a CUDA device compute what transformers computes, and agree with each other.

Each test also runs on the CPU, as part of the default tests: the same claims, so that a test that could not hold fails
where there is no GPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from art.config import TrainConfig, TrainerConfig
from art.engine import GenerateRequest
from art.errors import HandshakeError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.publish import BASE_NATS, publish
from art.trainer.step import micro_batch
from art.trainer.step.micro_batch import HeadShape, can_run_flex
from art.trainer.trainer import Trainer
from art.trainer.tree_attention import KernelName
from benchmarks.gradients import plain_gradient
from tests.support.cuda import (
    ADAPTER,
    LORA,
    VOCAB,
    InProcessEngine,
    ModelFiles,
    generate,
    load_engine,
    load_peft,
    load_policy,
    make_files,
    make_samples,
    plain_logprobs,
    tree_gradient,
)

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
DTYPES = ["float32", "bfloat16"]

LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
"""Largest difference of a token's log-prob, in nats; in bfloat16 that of a publish."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFiles]:
    """Model files of a family."""
    made: dict[str, ModelFiles] = {}

    def of(family: str) -> ModelFiles:
        if family not in made:
            made[family] = make_files(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelName], None]:
    """Force an attention kernel of the trainer, whatever the size of the layout.

    FlexAttention refuses a backward pass on the CPU, since it has no fused kernel for it. Uncompiled it can.
    """

    def choose(name: KernelName) -> None:
        if not torch.cuda.is_available():
            monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
        monkeypatch.setattr(micro_batch, "choose_kernel", lambda base, num_tokens: name)

    return choose


def sample_requests(adapters: list[str | None]) -> list[GenerateRequest]:
    """Prompts of many lengths, so that one batch holds prompts in parts, whole prompts and single tokens."""
    lengths = (1, 7, 40, 100, 33, 64)
    return [
        GenerateRequest(
            request_id=f"{i}",
            adapter=adapters[i % len(adapters)],
            prompt_token_ids=[(i + 5 * j) % VOCAB for j in range(length)],
            max_tokens=16 + i,
            stop_token_ids=(),
            seed=i,
            temperature=0.7 if i == 4 else 1.0,
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_engine_samples_with_the_logprobs_of_transformers(
    device: str, dtype: str, files: Callable[[str], ModelFiles]
) -> None:
    """Base model and adapter in one batch; the log-prob of every sampled token is that of a plain forward pass."""
    engine, model = load_engine(files("Qwen3"), device, dtype), load_peft(files("Qwen3"), device, dtype)
    assert (engine.info().device, engine.info().dtype) == (device, dtype)
    requests = sample_requests([ADAPTER, None])
    for request, chunk in zip(requests, generate(engine, requests), strict=True):
        prompt = request.prompt_token_ids
        assert len(chunk.token_ids) == request.max_tokens
        sequence = prompt + chunk.token_ids
        with torch.no_grad():
            if request.adapter is None:
                with model.disable_adapter():
                    expected = plain_logprobs(model, sequence, request.temperature)
            else:
                expected = plain_logprobs(model, sequence, request.temperature)
        difference = (torch.tensor(chunk.logprobs) - expected[len(prompt) - 1 :].cpu()).abs()
        assert float(difference.max()) < LOGPROB_TOLERANCE[dtype], request.request_id


@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "GptOss"])
@pytest.mark.parametrize(
    ("device", "kernel_name", "max_tokens", "num_parts"),
    [
        ("cpu", "dense", 4096, 1),
        ("cpu", "dense", 300, 2),
        ("cpu", "blocks", 4096, 1),
        ("cpu", "blocks", 300, 2),
        pytest.param("cpu", "flex", 4096, 1, marks=pytest.mark.slow),
        ("cpu", "flex", 300, 2),
        pytest.param("cuda", "dense", 4096, 1, marks=NEEDS_CUDA),
        pytest.param("cuda", "dense", 300, 2, marks=NEEDS_CUDA),
        pytest.param("cuda", "flex", 4096, 1, marks=NEEDS_CUDA),
        pytest.param("cuda", "flex", 300, 2, marks=NEEDS_CUDA),
    ],
)
def test_gradients_over_the_tree_equal_those_one_by_one(
    device: str,
    kernel_name: KernelName,
    max_tokens: int,
    num_parts: int,
    family: str,
    files: Callable[[str], ModelFiles],
    kernel: Callable[[KernelName], None],
) -> None:
    policy, samples = load_policy(files(family), device, "float32"), make_samples(1)
    expected = plain_gradient(load_peft(files(family), device, "float32"), samples, 1, policy.tensors).values.cpu()
    kernel(kernel_name)
    found, record = tree_gradient(policy, samples, max_tokens)
    assert len(record.micro_batches) == num_parts
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_flex_is_tried_before_it_is_chosen(device: str, has_sinks: bool) -> None:
    """FlexAttention has no backward pass on the CPU, where that must not end the run."""
    heads = HeadShape(
        num_heads=4, num_groups=2, size=32, value_size=32, dtype=torch.float32, device=torch.device(device),
        has_sinks=has_sinks,
    )  # fmt: skip
    assert can_run_flex(heads) == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_gradients_have_the_direction_of_float32(device: str, files: Callable[[str], ModelFiles]) -> None:
    samples = make_samples(2)
    exact, rounded = (tree_gradient(load_policy(files("Qwen3"), device, d), samples)[0] for d in DTYPES)
    assert float(torch.cosine_similarity(exact, rounded, dim=0)) > 0.998
    assert 0.97 < float(rounded.norm() / exact.norm()) < 1.03


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_sampled_logprobs_are_those_of_the_trainer(device: str, dtype: str, files: Callable[[str], ModelFiles]) -> None:
    """Without this agreement no importance ratio means anything."""
    requests = sample_requests([ADAPTER])
    chunks = generate(load_engine(files("Qwen3"), device, dtype), requests)
    samples = []
    for request, chunk in zip(requests, chunks, strict=True):
        before = len(request.prompt_token_ids)
        samples.append(
            TrainingSample(
                sample_id=request.request_id,
                rollout_id=request.request_id,
                token_ids=request.prompt_token_ids + chunk.token_ids,
                loss_mask=[False] * before + [True] * len(chunk.token_ids),
                sampling_logprobs=[0.0] * before + chunk.logprobs,
                advantages=[0.0] * before + [1.0] * len(chunk.token_ids),
                temperature=request.temperature,
            )
        )
    _, record = tree_gradient(load_policy(files("Qwen3"), device, dtype), samples)
    seen = record.micro_batches
    difference = np.concatenate([batch.policy_logprobs - batch.sampling_logprobs for batch in seen])
    assert difference.size == sum(len(chunk.token_ids) for chunk in chunks)
    assert np.abs(difference).max() < LOGPROB_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
async def test_a_trained_step_is_published_and_a_stale_one_is_refused(
    device: str, dtype: str, files: Callable[[str], ModelFiles], tmp_path: Path
) -> None:
    """A whole step of the trainer, kernel self-check included, and the handshake at its usual tolerance."""
    first, second = tmp_path / "0000", tmp_path / "0001"
    trainer = Trainer(str(files("Qwen3").base), TrainerConfig.model_validate({"device": device, "dtype": dtype}))
    trainer.init_checkpoint(first, LORA)
    config = TrainConfig(learning_rate=2e-2, mismatch=None)
    result = trainer.train(
        Train(samples=make_samples(3), config=config, from_checkpoint=first, to_checkpoint=second, job_id="job-1")
    )
    assert result.step == 1
    engine = load_engine(files("Qwen3"), device, dtype)
    metrics = await publish(as_engine(engine), "m@1", second)
    assert metrics["publish/probe_gap"] < 4 * BASE_NATS[dtype] < metrics["publish/probe_effect"]
    with pytest.raises(HandshakeError, match="m@2 was not published"):
        await publish(as_engine(engine, stale=first), "m@2", second)


@pytest.mark.parametrize("device", DEVICES)
async def test_a_quantised_base_is_served_as_it_is_trained(
    device: str, files: Callable[[str], ModelFiles], tmp_path: Path
) -> None:
    """The handshake holds at its usual tolerance with an engine that rounds alike, and not with one that does not."""
    pytest.importorskip("bitsandbytes")
    path, settings = tmp_path / "0000", {"device": device, "dtype": "float32", "quantization": "nf4"}
    trainer = Trainer(str(files("Qwen3").base), TrainerConfig.model_validate(settings))
    trainer.init_checkpoint(path, LORA)
    metrics = await publish(as_engine(load_engine(files("Qwen3"), device, "float32", quantization="nf4")), "m@0", path)
    assert metrics["publish/probe_gap"] < BASE_NATS["float32"]
    with pytest.raises(HandshakeError):
        await publish(as_engine(load_engine(files("Qwen3"), device, "float32")), "m@0", path)


def as_engine(engine: Any, **options: Any) -> Any:
    return cast(Any, InProcessEngine(engine, **options))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
