"""The engine against transformers: the same greedy tokens as `generate`, the same log-probs as a plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from art.engines.torch import base_model
from art.engines.torch.base_model import HfDecoder, LlamaDecoder
from art.engines.torch.cache_attention import AttentionProbe
from art.errors import ConfigError
from tests.support.engine import (
    FAMILIES,
    generate,
    hf_logprobs,
    hf_model,
    load,
    make_model,
    request,
    save_model,
    score,
    shape,
    tokens,
    write_adapter,
)

own_see = AttentionProbe.see
PROMPTS = [tokens(i, n) for i, n in enumerate((1, 5, 17, 40))]


@pytest.fixture(scope="module", params=["fused", "general"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def chosen(path: str, monkeypatch: pytest.MonkeyPatch) -> type:
    if path == "general":
        monkeypatch.setattr(base_model, "LLAMA_CLASSES", frozenset())
    return LlamaDecoder if path == "fused" else HfDecoder


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(models: Path, family: str, chosen: type) -> None:
    folder = make_model(models / f"parity-{family}", family)
    engine = load(folder, prefill_tokens=32)
    assert type(engine._model.decoder) is chosen
    results = generate(engine, *(request(p, 24, temperature=0.0) for p in PROMPTS))
    reference = hf_model(folder)
    for prompt, result in zip(PROMPTS, results, strict=True):
        want = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert result.token_ids == want
        assert result.logprobs == pytest.approx(hf_logprobs(reference, prompt + want)[len(prompt) - 1 :], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_compute_what_peft_computes(models: Path, family: str, chosen: type) -> None:
    from peft import PeftModel

    folder = make_model(models / f"parity-{family}", family)
    settings = {"use_rslora": True} if family == "llama" else {}
    adapter = write_adapter(models / f"peft-{family}", folder, rank=4, alpha=6.0, **settings)
    engine = load(folder)
    info = engine.load_adapter("a@1", adapter)
    assert (info.num_layers, info.rank) == (14, 4)
    model = PeftModel.from_pretrained(hf_model(folder), adapter)
    sequence = tokens(3, 30)
    assert score(engine, sequence, "a@1") == pytest.approx(hf_logprobs(model, sequence), abs=1e-4)
    with model.disable_adapter():
        assert score(engine, sequence) == pytest.approx(hf_logprobs(model, sequence), abs=1e-4)
    deltas = (m.get_delta_weight("default") for m in model.modules() if hasattr(m, "get_delta_weight"))
    assert info.norm == pytest.approx(sum(float(d.detach().square().sum()) for d in deltas) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}]
)
def test_shapes_of_heads_and_embeddings(models: Path, changes: dict[str, object], tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3", **changes)
    sequence = tokens(4, 25)
    assert score(load(folder), sequence) == pytest.approx(hf_logprobs(hf_model(folder), sequence), abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Olmo2Config(**shape()),
        transformers.Phi3Config(**shape()),
        transformers.GraniteConfig(**shape(), logits_scaling=2.0),
        transformers.GemmaConfig(**shape(), head_dim=16),
        transformers.MixtralConfig(**shape(), num_local_experts=4, sliding_window=None),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_run_through_the_general_path(
    config: transformers.PreTrainedConfig, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, config)
    engine, reference = load(folder), hf_model(folder)
    prompts = [tokens(i, 10 + i) for i in range(3)]
    for prompt, result in zip(prompts, generate(engine, *(request(p, temperature=0.0) for p in prompts)), strict=True):
        sequence = prompt + result.token_ids
        assert result.logprobs == pytest.approx(hf_logprobs(reference, sequence)[len(prompt) - 1 :], abs=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.Gemma2Config(**shape(), head_dim=16, sliding_window=64), "softcap"),
        (
            transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2),
            "layers 0 and 1 are linear_attention",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_architectures_that_the_seam_does_not_cover_are_refused(
    config: transformers.PreTrainedConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(save_model(tmp_path, config))


GPT_OSS = transformers.GptOssConfig(
    **{**shape(), "intermediate_size": 32}, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=24
)
GEMMA3 = transformers.Gemma3TextConfig(**shape(), head_dim=16, query_pre_attn_scalar=16, sliding_window=24)
DEEPSEEK = transformers.DeepseekV3Config(
    **{**shape(), "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
    n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=12,
)  # fmt: skip


@pytest.mark.parametrize("config", [GPT_OSS, GEMMA3, DEEPSEEK], ids=lambda config: config.model_type)
def test_sinks_windows_and_narrow_values(
    config: transformers.PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts shorter and longer than the window, in one pass and in parts, on top of each other's prefixes; sequences
    decoded together whose lengths differ by more than the window."""
    monkeypatch.setattr("art.engines.torch.cache_attention._MAX_MASK_ELEMENTS", 1 << 11)  # several blocks per prompt
    folder = save_model(tmp_path, config)
    engine, reference = load(folder, prefill_tokens=50, max_context=300), hf_model(folder)
    long = tokens(1, 90)
    prompts = [tokens(0, 5), long, long[:60] + tokens(2, 70), tokens(3, 24)]
    for prompt, result in zip(prompts, generate(engine, *(request(p, 40) for p in prompts)), strict=True):
        sequence = prompt + result.token_ids
        assert result.logprobs == pytest.approx(hf_logprobs(reference, sequence)[len(prompt) - 1 :], abs=2e-4)
    follow_up = long + tokens(4, 30)
    assert score(engine, follow_up) == pytest.approx(hf_logprobs(reference, follow_up), abs=2e-4)


def test_windows_of_the_fused_path(tmp_path: Path) -> None:
    """Mistral has a window in every layer, Qwen2 in the upper ones only."""
    qwen2 = {"use_sliding_window": True, "max_window_layers": 1}
    for family, extra in (("mistral", {}), ("qwen2", qwen2)):
        folder = make_model(tmp_path / family, family, sliding_window=24, **extra)
        engine, reference = load(folder), hf_model(folder)
        assert type(engine._model.decoder) is LlamaDecoder
        prompts = [tokens(5, 10), tokens(6, 80)]
        for prompt, result in zip(prompts, generate(engine, *(request(p, 30) for p in prompts)), strict=True):
            sequence = prompt + result.token_ids
            assert result.logprobs == pytest.approx(hf_logprobs(reference, sequence)[len(prompt) - 1 :], abs=2e-4)


def test_a_window_that_is_not_computed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path, "mistral", sliding_window=24)
    monkeypatch.setattr("art.engines.torch.cache_attention.AttentionProbe.see", see_no_window)
    with pytest.raises(ConfigError, match="logits differ from transformers'"):
        load(folder)


def see_no_window(self: AttentionProbe, layer: int, query: Any, key: Any, value: Any, kwargs: dict[str, Any]) -> None:
    own_see(self, layer, query, key, value, {**kwargs, "sliding_window": None})


def test_batch_dependent_positions_bound_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    folder = make_model(tmp_path, "llama", rope_parameters=rope)
    assert load(folder).info().max_context == 128


def test_yarn_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    folder = make_model(tmp_path, "qwen3", rope_parameters=rope)
    sequence = tokens(5, 200)
    assert score(load(folder), sequence) == pytest.approx(hf_logprobs(hf_model(folder), sequence), abs=2e-4)


def test_bfloat16_is_close(models: Path, qwen3: Path) -> None:
    engine = load(qwen3, dtype="bfloat16")
    assert engine.info().dtype == "bfloat16"
    sequence = tokens(6, 40)
    got, want = torch.tensor(score(engine, sequence)), torch.tensor(hf_logprobs(hf_model(qwen3), sequence))
    assert float((got - want).abs().mean()) < 0.3
