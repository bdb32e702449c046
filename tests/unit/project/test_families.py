"""Models in the shape of well-known families go through every part; docs/models.md says what came of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import EngineConfig, LoraConfig, TrainerConfig
from art.engines.torch.embedded import TorchEngine
from art.errors import ConfigError
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from tools.families import reach, support
from tools.families.architectures import ARCHITECTURES
from tools.families.build import FAMILIES, build_family
from tools.families.page import row_of
from tools.families.support import STAGES, check_model

PAGE = (Path(__file__).parents[3] / "docs/models.md").read_text()
BY_NAME = {family.name: family for family in FAMILIES}
ARCHITECTURE = {family.name: family for family in ARCHITECTURES}
QUICK = ["Qwen3.5, Qwen3.6", "Granite 3, 4.1"]


def page_row(name: str) -> list[str]:
    """The cells of a family on the page, without the numbers of reasons."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    return [re.sub(r" \(\d+\)$", "", cell.strip()) for cell in line.strip("|").split("|")]


def build(tmp_path: Path, name: str) -> Path:
    return build_family(BY_NAME[name], tmp_path / "model")


def test_the_page_names_every_family() -> None:
    section = PAGE[PAGE.index(reach.SECTION) : PAGE.index("## Tool calls")]
    for text, names in ((PAGE.replace(section, ""), list(BY_NAME)), (section, list(ARCHITECTURE))):
        assert re.findall(r"^\| ([^|]+) \| `\w+` \|", text, re.MULTILINE) == names
        numbers = {int(number) for number in re.findall(r" \((\d+)\) \|", text)}
        assert numbers == set(map(int, re.findall(r"^(\d+)\. ", text, re.MULTILINE)))


@pytest.mark.parametrize("name", ["Llama 3", "Gemma 3", "DeepSeek-V3"])
async def test_a_family_does_what_the_page_says(tmp_path: Path, name: str) -> None:
    outcomes = await check_model(build(tmp_path, name), tmp_path / "checkpoints")
    assert row_of(BY_NAME[name], outcomes)[:-1] == page_row(name)[:-1]  # the last one is vLLM
    assert outcomes["vLLM"].status == "not run"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {"Llama 3", "Gemma 3", "DeepSeek-V3"}))
async def test_the_other_families_too(tmp_path: Path, name: str) -> None:
    outcomes = await check_model(build(tmp_path, name), tmp_path / "checkpoints")
    assert row_of(BY_NAME[name], outcomes)[:-1] == page_row(name)[:-1]


def check_architecture_row(tmp_path: Path, name: str) -> None:
    path = build_family(ARCHITECTURE[name], tmp_path / "model")
    found = reach.check_reach(path, tmp_path / "checkpoints")
    row = page_row(name)
    assert [found.prefixes, found.step, found.engine, found.adapted] == [*row[2:5], row[6]]


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_does_what_the_page_says(tmp_path: Path, name: str) -> None:
    """One shares prefixes and is sampled; one is trained one sequence at a time and refused by the engine."""
    check_architecture_row(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURE.keys() - set(QUICK)))
def test_the_other_architectures_too(tmp_path: Path, name: str) -> None:
    check_architecture_row(tmp_path, name)


def test_a_wrong_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter that peft loads is not the one that the trainer measured."""
    path = build_family(ARCHITECTURE["Granite 3, 4.1"], tmp_path / "model")
    own_logprobs = support.own_logprobs
    is_adapted: list[bool] = []

    def wrong_for_adapters(model: Any, token_ids: list[int]) -> torch.Tensor:
        is_adapted.append(hasattr(model, "get_base_model"))
        return own_logprobs(model, token_ids) + 0.01 * is_adapted[-1]

    monkeypatch.setattr(support, "own_logprobs", wrong_for_adapters)
    found = reach.check_reach(path, tmp_path / "checkpoints")
    assert any(is_adapted)
    assert (found.prefixes, found.step, found.engine) == ("shared", "no", "no")
    assert "after a step, log-probs differ from peft's by" in found.reasons["step"]


def test_vllm_says_which_classes_take_a_lora(tmp_path: Path) -> None:
    models = tmp_path / "model_executor/models"
    models.mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (models / "registry.py").write_text('A = {"GraniteForCausalLM": ("g", "Granite"), "Lfm2ForCausalLM": ("l", "Lfm")}')
    (models / "g.py").write_text("class Base(SupportsLoRA): ...\nclass Granite(nn.Module, Base): ...\n")
    (models / "l.py").write_text("class Lfm(nn.Module): ...\n")
    cells = [reach.takes_lora(ARCHITECTURE[name], tmp_path) for name in ("Granite 3, 4.1", "LFM2", "GLM-5")]
    assert cells == ["yes", "no", "unknown class"]


async def test_disagreements_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison, with the other side made wrong."""
    path = build(tmp_path, "Llama 3")
    own_logprobs, own_gradient = support.own_logprobs, support._peft_gradient

    class OtherTokenizer:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            return OtherTokenizer

        @staticmethod
        def apply_chat_template(*_: Any, **__: Any) -> list[int]:
            return [1]

    def wrong_gradient(*arguments: Any) -> dict[str, torch.Tensor]:
        return {name: 1.01 * gradient for name, gradient in own_gradient(*arguments).items()}

    monkeypatch.setattr(support, "own_logprobs", lambda *arguments: own_logprobs(*arguments) + 0.01)
    monkeypatch.setattr(support, "_peft_gradient", wrong_gradient)
    outcomes = await check_model(path, tmp_path / "first")
    assert "differ from transformers' by" in outcomes["sample"].reason
    assert "the gradient differs from peft's" in outcomes["train"].reason
    assert outcomes["publish"].status == "not reached"
    monkeypatch.setattr(support, "AutoTokenizer", OtherTokenizer)
    outcomes = await check_model(path, tmp_path / "second")
    assert outcomes["render"].reason.endswith("other tokens than transformers' chat template")
    assert {outcomes[stage].status for stage in STAGES[1:-1]} == {"not reached"}


# -- what the run has brought to light --


def test_of_a_mixture_of_experts_the_attention_is_adapted(tmp_path: Path) -> None:
    base = load_base_model(str(build(tmp_path, "Qwen3-MoE")), TrainerConfig(device="cpu"))
    policy = LoraPolicy(base, LoraConfig(rank=4))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in policy.tensors} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    policy.remove()
    with pytest.raises(ConfigError, match=r"stacked weights of .* name layers of the attention only"):
        LoraPolicy(base, LoraConfig(rank=4, target_modules=["gate_proj", "up_proj", "down_proj"]))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Gemma 4 26B-A4B", {"q_proj", "k_proj", "v_proj", "o_proj"}),  # neither router.proj nor the vision tower
        ("GLM-5", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),  # no indexer
    ],
)
def test_what_has_no_gradient_is_not_adapted(tmp_path: Path, name: str, layers: set[str]) -> None:
    path = build_family(ARCHITECTURE[name], tmp_path / "model")
    base = load_base_model(str(path), TrainerConfig(device="cpu"))
    for config in (LoraConfig(rank=4), LoraConfig(rank=4, target_modules=sorted(layers))):
        policy = LoraPolicy(base, config)
        assert {key.split(".lora_")[0].rpartition(".")[2] for key in policy.tensors} == layers
        assert not any("vision" in key for key in policy.tensors)
        policy.remove()


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    path, marker = build(tmp_path, "Llama 3"), tmp_path / "ran"
    config = json.loads((path / "config.json").read_text())
    classes = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (path / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    (path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for load in (
        lambda: load_base_model(str(path), TrainerConfig(device="cpu")),
        lambda: TorchEngine.load(str(path), EngineConfig(device="cpu", num_threads=1)),
    ):
        with pytest.raises(ConfigError, match="cannot load base model"):
            load()
    assert not marker.exists()
