"""How many requests and scored tokens a vLLM server gets at once, and what draws them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art.config import VllmConfig
from art.engine import EngineInfo, GenerateRequest
from art.engines.vllm.command import (
    BYTES_PER_LOGIT,
    Installation,
    choose_prefill_piece,
    server_command,
    server_environment,
)
from art.engines.vllm.replica import Replica
from art.engines.vllm.vllm_engine import VllmEngine
from art.memory import choose_max_running, shape_of
from tests.support.fake_vllm import FakeVllm

GIB = 2**30
QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151_936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_30B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936,
}  # fmt: skip
DEEPSEEK = QWEN3_8B | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
INFO = EngineInfo(vocab_size=151_936, max_context=32_768, dtype="bfloat16", device="cuda", draws_by_index=False)
GPU = Installation("python", "0.32.0", "2.13.0", "cuda")


@pytest.mark.parametrize(("model", "billions"), [(QWEN3_8B, 8.19), (QWEN3_4B, 4.02), (QWEN3_30B, 30.5)])
def test_weights_are_counted_from_the_config(model: dict[str, Any], billions: float) -> None:
    """The published sizes of Qwen3-8B, Qwen3-4B and Qwen3-30B-A3B."""
    assert shape_of(model).num_weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_keys_and_values_of_a_token() -> None:
    assert shape_of(QWEN3_8B).kv_bytes_per_token(2) == 2 * 36 * 8 * 128 * 2
    assert shape_of(DEEPSEEK).kv_bytes_per_token(2) == 61 * 576 * 2


@pytest.mark.parametrize(
    ("memory_gib", "context", "expected"),
    [(139, 32_768, 320), (80, 32_768, 160), (24, 32_768, 16), (139, 512, 512), (8, 32_768, 16)],
)
def test_as_many_requests_as_the_memory_holds(memory_gib: int, context: int, expected: int) -> None:
    found = choose_max_running(
        VllmConfig(), shape_of(QWEN3_8B), device="cuda", memory_bytes=memory_gib * GIB, context=context
    )
    assert found == expected


def test_more_gpus_hold_more_requests() -> None:
    sizes = [
        choose_max_running(
            VllmConfig(flags={"tensor_parallel_size": n, "gpu_memory_utilization": share}),
            shape_of(QWEN3_30B),
            device="cuda",
            memory_bytes=80 * GIB,
            context=8192,
        )
        for n, share in ((1, 0.7), (1, 0.9), (2, 0.9))
    ]
    assert sizes == sorted({*sizes})


def test_a_scored_prompt_is_computed_in_pieces_whose_logits_fit() -> None:
    assert choose_prefill_piece(151_936, 32_768) * 151_936 * BYTES_PER_LOGIT < GIB
    assert choose_prefill_piece(32_000, 32_768) == 2048
    assert choose_prefill_piece(128, 300) == 300  # vLLM refuses a piece longer than the context


def test_the_flags_of_a_gpu_server() -> None:
    command = server_command(GPU, "m", VllmConfig(max_running=336), INFO, lora_rank=16)
    assert {"--max-num-seqs=336", "--long-prefill-token-threshold=512"} <= set(command)
    seeds = {
        next(word for word in server_command(GPU, "m", VllmConfig(), INFO, lora_rank=16) if "--seed=" in word)
        for _ in range(3)
    }
    assert len(seeds) == 3
    own = VllmConfig(flags={"seed": 5, "long_prefill_token_threshold": 4096})
    assert {"--seed=5", "--long-prefill-token-threshold=4096"} <= set(server_command(GPU, "m", own, INFO, lora_rank=16))


def test_expandable_segments_do_not_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environment = server_environment(GPU, "key", None)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "garbage_collection_threshold:0.8"
    assert environment["PYTORCH_ALLOC_CONF"] == ""


async def sent_seed(*, repeatable: bool, shares_seed: bool) -> int | None:
    fake = FakeVllm()
    request = GenerateRequest(
        request_id="r", adapter=None, prompt_token_ids=[1], max_tokens=1, stop_token_ids=(), seed=7,
        repeatable=repeatable,
    )  # fmt: skip
    async with fake.serve() as url:
        engine = VllmEngine([Replica(url, None)], "the-base", replace(INFO, device="cuda"), shares_seed=shares_seed)
        _ = [chunk async for chunk in engine.generate(request, stream=False)]
        await engine.close()
    return fake.requests[-1].get("seed")


async def test_only_a_seed_that_the_client_chose_is_sent() -> None:
    assert await sent_seed(repeatable=False, shares_seed=False) is None
    assert await sent_seed(repeatable=True, shares_seed=False) is not None
    assert await sent_seed(repeatable=False, shares_seed=True) is not None
