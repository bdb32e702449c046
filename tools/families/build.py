"""Random models of a few ten thousand weights, one per family: its architecture, control tokens and text format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from art.testing.tiny_model import MARKUP_TOKENS
from tools.families import templates

MAX_CONTEXT = 512
_BASE_VOCAB = 320
_SHAPE: dict[str, Any] = {
    "hidden_size": 128,  # 32 per head, the smallest size that vLLM supports on CPU
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.08,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "scoring_func": "sigmoid",  # the values of the published models; vLLM reads these two
    "topk_method": "noaux_tc",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that makes a family except its weights."""

    name: str
    architecture: str
    """Class prefix in transformers: `<architecture>ForCausalLM`."""
    template: str
    control_tokens: tuple[str, ...]
    """Special tokens of the text format."""
    eos: str
    bos: str | None = None
    markup_tokens: tuple[str, ...] = ()
    """Added tokens that belong to the text of an answer."""
    shape: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Settings that extend or override the common small shape."""
    config: str | None = None
    """Configuration class, where it is not `<architecture>Config`."""
    vision: Mapping[str, Any] | None = None
    """Settings of a vision tower, for models that are published as `<architecture>ForConditionalGeneration`."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = (
    Family(
        name="Qwen2.5", architecture="Qwen2", template=templates.QWEN2, control_tokens=_CHATML, eos="<|im_end|>",
        markup_tokens=MARKUP_TOKENS[:4],
    ),
    Family(
        name="Qwen3", architecture="Qwen3", template=templates.QWEN3, control_tokens=_CHATML, eos="<|im_end|>",
        markup_tokens=MARKUP_TOKENS, shape={"head_dim": 32, "tie_word_embeddings": True},
    ),
    Family(
        name="Qwen3-MoE", architecture="Qwen3Moe", template=templates.QWEN3, control_tokens=_CHATML, eos="<|im_end|>",
        markup_tokens=MARKUP_TOKENS,
        shape={"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    Family(
        name="Llama 3", architecture="Llama", template=templates.LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>",
        control_tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    Family(
        name="Mistral", architecture="Mistral", template=templates.MISTRAL, bos="<s>", eos="</s>",
        control_tokens=(
            "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ),
        shape={"head_dim": 32, "sliding_window": None},
    ),
    Family(
        name="Gemma 3", architecture="Gemma3", config="Gemma3TextConfig", template=templates.GEMMA3, bos="<bos>",
        eos="<end_of_turn>", control_tokens=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        shape={"head_dim": 32, "query_pre_attn_scalar": 32, "initializer_range": 0.04, "sliding_window": 32},
    ),
    Family(
        name="Phi-3", architecture="Phi3", template=templates.PHI3, eos="<|endoftext|>",
        control_tokens=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        shape={"pad_token_id": 0},
    ),
    Family(
        name="gpt-oss", architecture="GptOss", template=templates.GPT_OSS, eos="<|return|>",
        control_tokens=(
            "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>",
        ),
        shape={"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    Family(
        name="DeepSeek-V3", architecture="DeepseekV3", template=templates.DEEPSEEK, bos="<|begin|>", eos="<|end|>",
        control_tokens=("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", *templates.DEEPSEEK_CALL_TOKENS),
        shape=DEEPSEEK,
    ),
    Family(
        name="Kimi K2 (as DeepseekV3)", architecture="DeepseekV3", template=templates.KIMI, eos="<|im_end|>",
        control_tokens=(
            "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
            *templates.KIMI_CALL_TOKENS,
        ),
        shape=DEEPSEEK,
    ),
)  # fmt: skip


def build_family(family: Family, path: Path, *, seed: int = 0) -> Path:
    """Write a random model of `family`, with its tokenizer, to the folder `path`. A seed gives the same weights."""
    tokenizer = build_tokenizer(family)
    end = tokenizer.convert_tokens_to_ids(family.eos)
    shape = {**_SHAPE, "bos_token_id": None, "pad_token_id": end, **family.shape}
    config_class = getattr(transformers, family.config or f"{family.architecture}Config")
    shape |= {"vocab_size": len(tokenizer), "eos_token_id": end}
    if family.vision is None:
        config, kind = config_class(**shape), "CausalLM"
    else:
        config = config_class(text_config=shape, vision_config=dict(family.vision))
        kind = "ConditionalGeneration"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family.architecture}For{kind}")(config)
        with torch.no_grad():  # biases, sinks and norms start at constants; make them count
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config = transformers.GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def build_tokenizer(family: Family) -> Any:
    """Build a byte-level BPE tokenizer with the control tokens of `family`. It can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_BASE_VOCAB,
        special_tokens=list(family.control_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["system user assistant the a look_up key name arguments"] * 20, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup_tokens])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )
    wrapped.chat_template = family.template
    return wrapped
