"""Full fine-tuning: the same laws as for an adapter, and files that transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from art.config import DppoConfig, LoraConfig, OptimizerConfig, TrainConfig, TrainerConfig
from art.errors import AdapterError, ConfigError
from art.protocol.calls import Train
from art.protocol.samples import StepResult
from art.storage import checkpoints
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.full import FullPolicy
from art.trainer.proof import fresh_probe_tokens, measure_probe
from art.trainer.step.update import Optimizer
from art.trainer.trainer import Trainer
from tests.support.trainer_files import save_content, whole
from tests.support.trainer_reference import reference_gradient, relative_error, tree_gradient
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

TOLERANCE = 1e-5
FAMILIES = ["Qwen3", "Qwen2", "Llama", "Mistral", "GptOss"]


@pytest.fixture
def make_policy(model_path: Callable[[str], str]) -> Callable[..., FullPolicy]:
    def make(family: str = "Qwen3", **config: Any) -> FullPolicy:
        return FullPolicy(load_base_model(model_path(family), TrainerConfig(device="cpu", num_threads=1, **config)))

    return make


def disturb(policy: FullPolicy, by: float = 0.02) -> None:
    policy.values.add_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * by)


# -- gradients --


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_one_by_one(family: str, make_policy: Callable[..., FullPolicy]) -> None:
    policy = make_policy(family)
    disturb(policy)
    for seed in range(2):
        expected = reference_gradient(policy, random_samples(seed), DppoConfig())
        assert relative_error(tree_gradient(policy, random_samples(seed))[0], expected) < TOLERANCE
        assert relative_error(tree_gradient(policy, random_samples(seed), max_tokens=20)[0], expected) < TOLERANCE
    shares = torch.stack([part.norm() for part in expected.split([t.numel() for t in policy.tensors.values()])])
    assert bool((shares > 0).all()), "every tensor learns"


def test_gradient_checkpointing_changes_nothing(make_policy: Callable[..., FullPolicy]) -> None:
    plain, checkpointed = make_policy(), make_policy(gradient_checkpointing=True)
    for policy in (plain, checkpointed):
        disturb(policy)
    expected = tree_gradient(plain, random_samples(3))[0]
    assert relative_error(tree_gradient(checkpointed, random_samples(3))[0], expected) < TOLERANCE


@pytest.mark.parametrize(("family", "frozen"), [("Qwen3", {"embed_tokens"}), ("Llama", {"embed_tokens", "lm_head"})])
def test_all_but_embedding_and_head_are_trained(
    family: str, frozen: set[str], make_policy: Callable[..., FullPolicy]
) -> None:
    policy = make_policy(family)
    names = [name for name, _ in policy.base.model.named_parameters()]
    assert set(names) - set(policy.tensors) == {name for name in names if name.split(".")[-2] in frozen}
    before = {name: weight.clone() for name, weight in policy.base.model.named_parameters()}
    disturb(policy)
    probe = measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE))
    assert max(abs(a - b) for a, b in zip(probe.logprobs, probe.base_logprobs, strict=True)) > 1e-3
    assert all(torch.equal(weight, before[name]) for name, weight in policy.base.model.named_parameters())


def test_bfloat16_layers_learn_in_float32(make_policy: Callable[..., FullPolicy]) -> None:
    """Steps that a weight of 8 bits cannot take one by one add up; the gradient is the rounded layers' own."""
    exact, halved = make_policy(), make_policy(dtype="bfloat16")
    expected = tree_gradient(exact, random_samples(4))[0]
    assert float(torch.cosine_similarity(tree_gradient(halved, random_samples(4))[0], expected, dim=0)) > 0.99
    assert halved.values.dtype == halved.grads.dtype == torch.float32
    optimizer, norms = Optimizer(halved), []
    for _ in range(30):
        before = halved.values.clone()
        halved.grads.fill_(1.0)
        optimizer.update(1e-7, OptimizerConfig())
        assert float(torch.dist(halved.values, before)) > 0
        norms.append(halved.norm())
    assert norms[0] < norms[-1] * 0.2  # only the smallest weights follow at once
    rounded = dict(halved._twin.model.named_parameters())
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in halved.tensors.items())


# -- files --


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_files(family: str, make_policy: Callable[..., FullPolicy], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = make_policy(family)
    disturb(policy)
    for name, data in policy.files().items():
        save_content(tmp_path / name, data)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    probe = measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE))
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert probe.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    base = AutoModelForCausalLM.from_pretrained(policy.base.name, dtype=torch.float32)
    with torch.no_grad():
        change = sum(float((a - b).square().sum()) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    assert policy.norm() == pytest.approx(change**0.5, rel=1e-5)


def test_files_beside_the_weights_are_those_of_the_base(
    make_policy: Callable[..., FullPolicy], model_path: Callable[[str], str]
) -> None:
    files = make_policy().files()
    folder = Path(model_path("Qwen3"))
    assert {name for name in files if name != checkpoints.MODEL_WEIGHTS} == {"config.json", "generation_config.json"}
    assert files["config.json"] == (folder / "config.json").read_bytes()


def test_dump_and_load(make_policy: Callable[..., FullPolicy], tmp_path: Path) -> None:
    policy = make_policy()
    disturb(policy)
    data, before = whole(policy.files()[policy.weights_file]), measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE))
    policy.reset()
    assert policy.norm() == 0
    file = save_content(tmp_path / "weights", data)
    with policy.using(file):
        assert measure_probe(policy, fresh_probe_tokens(VOCAB_SIZE)) == before
    assert policy.norm() == 0
    policy.load(file)
    assert whole(policy.files()[policy.weights_file]) == data


def test_files_that_do_not_fit_are_refused(make_policy: Callable[..., FullPolicy], tmp_path: Path) -> None:
    policy = make_policy()
    data = whole(policy.files()[policy.weights_file])
    tensors = load(data)
    first, embedding = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in tensors.items() if k != first}, "missing or unknown"),
        (tensors | {"model.layers.2.bias": torch.zeros(1)}, r"model\.layers\.2\.bias"),
        (tensors | {first: torch.zeros(4, 32)}, r"shape \[4, 32\], expected \[32, 32\]"),
        (tensors | {first: torch.full_like(tensors[first], float("nan"))}, "not finite"),
        (
            tensors | {embedding: tensors[embedding] + 1},
            r"differs from the base model .* in 'model\.embed_tokens\.weight'",
        ),
    ]
    for broken, message in cases:
        with pytest.raises(AdapterError, match=message):
            policy.load(save_content(tmp_path / "weights", save(broken)))
    assert whole(policy.files()[policy.weights_file]) == data


# -- the trainer --


@pytest.fixture
def new_trainer(model_path: Callable[[str], str]) -> Callable[..., Trainer]:
    def new(family: str = "Qwen3", **config: Any) -> Trainer:
        return Trainer(model_path(family), TrainerConfig(device="cpu", num_threads=1, **config))

    return new


def step(trainer: Trainer, directory: Path, number: int, **changes: Any) -> StepResult:
    arguments: dict[str, Any] = {
        "samples": random_samples(number),
        "config": TrainConfig(learning_rate=1e-3, mismatch=None),
        "from_checkpoint": directory / f"{number - 1:04d}",
        "to_checkpoint": directory / f"{number:04d}",
        "job_id": f"job-{number}",
    }
    return trainer.train(Train(**arguments | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restarted_trainer_continues_bit_identically(
    dtype: str, new_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    undisturbed = new_trainer(dtype=dtype)
    for name in ("a", "b"):
        undisturbed.init_checkpoint(tmp_path / name / "0000", None)
    expected = [step(undisturbed, tmp_path / "a", number) for number in (1, 2)]
    for number in (1, 2):
        result = step(new_trainer(dtype=dtype), tmp_path / "b", number)  # a new process each time
        for name, value in expected[number - 1].metrics.items():
            if not name.startswith(("time/", "throughput/")):
                assert result.metrics[name] == value, name
    for file in (checkpoints.MODEL_WEIGHTS, checkpoints.OPTIMIZER, checkpoints.PROBE):
        assert (tmp_path / "a/0002" / file).read_bytes() == (tmp_path / "b/0002" / file).read_bytes()


def test_a_checkpoint_says_what_was_trained(new_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """One trainer serves models of both kinds in turn."""
    trainer = new_trainer()
    trainer.init_checkpoint(tmp_path / "full/0000", None)
    trainer.init_checkpoint(tmp_path / "lora/0000", LoraConfig(rank=8))
    for number in (1, 2):
        for kind in ("full", "lora"):
            assert step(trainer, tmp_path / kind, number).step == number
    assert checkpoints.read_state(tmp_path / "full/0002").lora is None
    assert [checkpoints.is_full(tmp_path / kind / "0002") for kind in ("full", "lora")] == [True, False]
    alone = new_trainer()
    alone.init_checkpoint(tmp_path / "alone/0000", None)
    for number in (1, 2):
        step(alone, tmp_path / "alone", number)
    file = checkpoints.MODEL_WEIGHTS
    assert (tmp_path / "alone/0002" / file).read_bytes() == (tmp_path / "full/0002" / file).read_bytes()


def test_weights_that_are_not_whole_are_refused(make_policy: Callable[..., FullPolicy]) -> None:
    base = make_policy().base
    with pytest.raises(ConfigError, match="set `shard_base` and `quantization` to their"):
        FullPolicy(replace(base, is_sharded=True))
