"""Base models that fit, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import TrainerConfig
from art.errors import ConfigError
from art.trainer import tree_attention as attention
from art.trainer.logprobs import Head
from art.trainer.policy.base_model import FrozenModel, check_architecture, load_base_model, run_backbone
from art.trainer.step.micro_batch import make_micro_batch, target_logprobs_in_order
from art.trainer.tree import SamplePath, build_tree
from art.trainer.tree_attention import AttentionFormula, attend, make_layout
from tests.support.trainer_samples import VOCAB_SIZE, paths_of, random_samples

CPU = TrainerConfig(device="cpu", num_threads=1)


def paths() -> list[SamplePath]:
    return paths_of(random_samples(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral", "GptOss"])
def test_families_pass_the_architecture_check(family: str, dtype: Any, model_path: Callable[[str], str]) -> None:
    base = load_base_model(model_path(family), TrainerConfig(device="cpu", dtype=dtype))
    assert base.head.weight.dtype == getattr(torch, dtype)
    assert base.vocab_size == VOCAB_SIZE


def save_lfm2(path: Path) -> str:
    """Short convolutions around one layer of attention."""
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], initializer_range=0.15,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).save_pretrained(path)
    return str(path)


def own_logprobs(base: FrozenModel, path: SamplePath) -> torch.Tensor:
    ids = torch.tensor([[*path.token_ids.tolist(), 0]])
    with torch.no_grad():
        logprobs = base.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    return logprobs[torch.from_numpy(path.query_positions), torch.from_numpy(path.target_token_ids)]


def test_a_recurrent_model_runs_one_sequence_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = load_base_model(save_lfm2(tmp_path), CPU)
    assert base.one_by_one
    assert "one sequence at a time, without sharing prefixes: layers 0 and 2 are conv" in caplog.text
    with pytest.raises(ConfigError, match=r"with `shard_base`: layers 0 and 2 are conv"):
        check_architecture(replace(base, is_sharded=True, one_by_one=False))
    batch = make_micro_batch(paths(), base)
    assert batch.layout.kernel == "own"
    with torch.no_grad():
        ours = target_logprobs_in_order(batch, base, lambda layout: run_backbone(base, layout))
    expected = torch.cat([own_logprobs(base, path) for path in batch.paths])
    plain = torch.from_numpy(batch.targets.temperatures) == 1
    torch.testing.assert_close(torch.from_numpy(ours)[plain], expected[plain], rtol=0, atol=1e-4)


def test_a_head_with_more_than_a_linear_map_is_refused(model_path: Callable[[str], str]) -> None:
    base = load_base_model(model_path("Llama"), CPU)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .* differ by .* nats"):
        check_architecture(replace(base, head=Head(base.head.weight * 0.5, None)))


def test_softcap_attention_runs_one_sequence_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    base = load_base_model(str(tmp_path), CPU)
    assert base.one_by_one
    assert base.head.softcap == 30
    assert "uses `softcap` in its attention" in caplog.text


def test_a_models_own_attention_has_no_dropout(tmp_path: Path) -> None:
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attention_dropout=0.5,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    base = load_base_model(str(tmp_path), TrainerConfig(device="cpu", num_threads=1, gradient_checkpointing=True))
    layout = make_micro_batch(paths(), base).layout
    with torch.no_grad():
        assert base.model.training
        assert torch.equal(run_backbone(base, layout), run_backbone(base, layout))


def test_a_mask_of_the_model_is_not_ignored() -> None:
    x = torch.zeros(1, 1, 2, 4)
    layout = make_layout(build_tree(paths()), device=torch.device("cpu"), kernel="dense")
    with pytest.raises(ConfigError, match="makes an attention mask of its own"):
        attend(torch.nn.Linear(1, 1), x, x, x, torch.zeros(1, 1, 2, 2), tree_layout=layout)


def test_a_model_without_a_text_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25"}')
    with pytest.raises(ConfigError, match=r"cannot load base model .*Kimi"):
        load_base_model(str(tmp_path), CPU)


def test_a_call_without_layout_is_explained() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ConfigError, match="does not pass keyword arguments"):
        attend(torch.nn.Linear(1, 1), x, x, x, None)


def test_flex_kernel_equals_the_dense_reference() -> None:
    """Forward only and uncompiled: FlexAttention has no backward pass on CPU."""
    layout = make_layout(build_tree(paths()), device=torch.device("cpu"), kernel="flex")
    q, k, v = (torch.randn(1, heads, len(layout.token_ids), 8) for heads in (4, 2, 2))
    for formula in (
        AttentionFormula(0.3),
        AttentionFormula(0.3, window=4),
        AttentionFormula(0.3, sinks=torch.tensor([-2.0, 0.0, 1.0, 3.0])),
    ):
        with torch.no_grad():
            flex, dense = (attention.KERNELS[name](q, k, v, layout, formula) for name in ("flex", "dense"))
        torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)
