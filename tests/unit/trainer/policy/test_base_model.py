"""Base models that fit, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import TrainerConfig
from art.errors import ConfigError, TrainingError
from art.protocol.samples import plain_sample
from art.trainer.attention import kernel_check
from art.trainer.attention import tree_attention as attention
from art.trainer.attention.kernel_check import check_kernel
from art.trainer.attention.tree_attention import Formula, attend, make_layout
from art.trainer.head.products import Head
from art.trainer.policy.base_model import check_architecture, load_base_model
from art.trainer.tree.tree import SamplePath, build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

CPU = TrainerConfig(device="cpu", num_threads=1)


def long_path(num_tokens: int) -> SamplePath:
    path = check_sample(plain_sample([i % VOCAB_SIZE for i in range(num_tokens)], "probe"), vocab_size=VOCAB_SIZE)
    assert path is not None
    return path


def paths() -> list[SamplePath]:
    return [p for s in random_samples(0) if (p := check_sample(s, vocab_size=VOCAB_SIZE))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral", "GptOss"])
def test_families_pass_the_architecture_check(family: str, dtype: Any, model_path: Callable[[str], str]) -> None:
    base = load_base_model(model_path(family), TrainerConfig(device="cpu", dtype=dtype))
    assert base.head.weight.dtype == getattr(torch, dtype)
    assert base.vocab_size == VOCAB_SIZE


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, state_size=4, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError):
        load_base_model(str(tmp_path), CPU)


def test_a_head_with_more_than_a_linear_map_is_refused(model_path: Callable[[str], str]) -> None:
    base = load_base_model(model_path("Llama"), CPU)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .* differ by .* nats"):
        check_architecture(replace(base, head=Head(base.head.weight * 0.5, None)))


def test_softcap_attention_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="softcap"):
        load_base_model(str(tmp_path), CPU)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load base model .*nothing-here"):
        load_base_model(str(tmp_path / "nothing-here"), CPU)


def test_a_call_without_layout_is_explained() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ConfigError, match="does not pass keyword arguments"):
        attend(torch.nn.Linear(1, 1), x, x, x, None)


def test_flex_kernel_equals_the_dense_reference() -> None:
    """Forward only and uncompiled: FlexAttention has no backward pass on CPU."""
    layout = make_layout(build_tree(paths()), device=torch.device("cpu"), kernel="flex")
    q, k, v = (torch.randn(1, heads, len(layout.token_ids), 8) for heads in (4, 2, 2))
    for formula in (Formula(0.3), Formula(0.3, window=4), Formula(0.3, sinks=torch.tensor([-2.0, 0.0, 1.0, 3.0]))):
        with torch.no_grad():
            flex, dense = (attention.KERNELS[name](q, k, v, layout, formula) for name in ("flex", "dense"))
        torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)


def test_kernel_check(model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base_model(model_path("Qwen3"), CPU)
    check_kernel(base, "chains", paths())

    def sees_the_future(query: Any, key: Any, value: Any, layout: Any, formula: Formula) -> Any:
        return attention.attend_dense(query, key, value.cumsum(2), layout, formula)

    monkeypatch.setitem(kernel_check.KERNELS, "chains", sees_the_future)
    with pytest.raises(TrainingError, match="'chains' attention kernel is wrong on this machine: its output differs"):
        check_kernel(base, "chains", paths())


def test_kernel_check_has_memory_for_a_long_sample(
    model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference would need it for all pairs of tokens."""
    lengths = []

    def watched(*arguments: Any) -> torch.Tensor:
        lengths.append(len(arguments[3].token_ids))
        return attention.attend_dense(*arguments)

    monkeypatch.setattr(kernel_check, "_MAX_TOKENS", 100)
    monkeypatch.setattr(kernel_check, "attend_dense", watched)
    base = load_base_model(model_path("Qwen3"), CPU)
    check_kernel(base, "chains", [long_path(300), *paths()])
    check_kernel(base, "chains", [long_path(40), long_path(300)])
    assert lengths == [99, 39]  # the last token of a path is predicted only
