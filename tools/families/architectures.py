"""Small random models with the real structure of newer architectures, for the table of what can be trained and sampled.

They share one text format, Qwen3's, because here only layers matter. Sizes are small, and everything that makes an
architecture special is there: latent attention, experts, gated delta nets, convolutions, windows, caps, multipliers.
"""

from __future__ import annotations

from typing import Any, Final

from tools.families import templates
from tools.families.build import DEEPSEEK, Family

_SIX: Final = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]
_DELTA_NET: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,  # three gated delta nets, then one attention
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_GEMMA4: Final[dict[str, Any]] = {
    "num_hidden_layers": 6,
    "layer_types": _SIX,
    "head_dim": 32,
    "sliding_window": 32,
    "final_logit_softcapping": 5.0,
    "initializer_range": 0.04,
    "hidden_size_per_layer_input": 0,
}
_DSA: Final[dict[str, Any]] = {
    **{key: value for key, value in DEEPSEEK.items() if key not in ("scoring_func", "topk_method")},
    "index_topk": 16,  # fewer than the tokens of a sequence, so that it leaves some out
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few heads many scores are 0, and which of equal scores are taken is undefined
    "head_dim": 8,
}
_GRANITE: Final[dict[str, Any]] = {
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
}
_GRANITE_MOE: Final[dict[str, Any]] = {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}
_LFM2: Final[dict[str, Any]] = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}


_QWEN_VISION: Final = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
_GEMMA_VISION: Final = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def _family(
    name: str, architecture: str, shape: dict[str, Any], config: str | None = None, vision: dict[str, int] | None = None
) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        config=config,
        vision=vision,
        template=templates.QWEN3,
        control_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        shape=shape,
    )


ARCHITECTURES: Final = (
    _family("Qwen3.5, Qwen3.6", "Qwen3_5", _DELTA_NET, vision=_QWEN_VISION),
    _family("Qwen3.5, Qwen3.6 MoE", "Qwen3_5Moe", {**_DELTA_NET, **_EXPERTS}, vision=_QWEN_VISION),
    _family("Qwen3-Next", "Qwen3Next", {**_DELTA_NET, **_EXPERTS}),
    _family(
        "Gemma 4 31B",
        "Gemma4",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        vision=_GEMMA_VISION,
    ),
    _family(
        "Gemma 4 E2B, E4B",
        "Gemma4",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 400,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        vision=_GEMMA_VISION,
    ),
    _family(
        "Gemma 4 26B-A4B",
        "Gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        vision=_GEMMA_VISION,
    ),
    _family("GLM-4.5, 4.6, 4.7", "Glm4Moe", {
        "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "use_qk_norm": True,
    }),
    _family("GLM-5", "GlmMoeDsa", _DSA),
    _family("DeepSeek-V3, Kimi K2", "DeepseekV3", DEEPSEEK),
    _family("DeepSeek-V3.2", "DeepseekV32", _DSA),
    _family("Kimi Linear", "KimiLinear", {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_head_dim": 16, "linear_num_heads": 2,
    }),
    _family("LFM2", "Lfm2", {**_LFM2, "block_auto_adjust_ff_dim": False}),
    _family("LFM2 MoE", "Lfm2Moe", {
        **_LFM2, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }),
    _family("SmolLM3", "SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    _family("Granite 3, 4.1", "Granite", _GRANITE),
    _family("Granite MoE", "GraniteMoe", _GRANITE_MOE),
    _family("Granite 4 hybrid", "GraniteMoeHybrid", {
        **_GRANITE_MOE, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "shared_intermediate_size": 32, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16,
        "mamba_chunk_size": 16, "position_embedding_type": None,
    }),
)  # fmt: skip
