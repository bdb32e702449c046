"""Load the frozen base model, check that it can be trained, and run layouts through it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from art.config import TrainerConfig
from art.errors import ConfigError
from art.kernels.layer_kinds import other_layers
from art.kernels.quantization import loading_options
from art.protocol.samples import plain_sample
from art.trainer.attention.tree_attention import ATTENTION_NAME, TreeLayout, make_layout, register_attention
from art.trainer.head import Head
from art.trainer.policy.layers import configured_mode, set_checkpointing, shard_layers
from art.trainer.policy.lean import keep_less
from art.trainer.step.logprobs import group_by_row, target_logprobs
from art.trainer.tree.tree import build_tree, check_sample

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest allowed difference in nats between a tree and separate sequences. A wrong mask or head gives far more."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    name: str
    model: torch.nn.Module
    """Hugging Face causal LM that runs the attention `ATTENTION_NAME`, or its own where `one_by_one` is true."""
    backbone: torch.nn.Module
    """The decoder without the head. Returns final hidden states."""
    head: Head
    device: torch.device
    is_sharded: bool = False
    """Whether the layers' weights are split over processes. All processes must then run the model equally often."""
    one_by_one: bool = False
    """Whether the model runs one sequence at a time, because it cannot run over a prefix tree."""

    @property
    def vocab_size(self) -> int:
        return len(self.head.weight)


def load_base_model(name: str, config: TrainerConfig) -> BaseModel:
    """Load the frozen base model `name`, a directory or a hub id.

    Raises:
        ConfigError: the model cannot be loaded, or the trainer cannot train its architecture.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    device = choose_device(config)
    default = {"cpu": torch.float32, "cuda": torch.bfloat16}.get(device.type, "auto")
    dtype = default if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        options = loading_options(config.quantization, device=str(device), dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot load base model {name!r}: {error}. Expected a directory with a Hugging Face causal language "
            "model, or the id of one on the hub",
            param="base_model",
        ) from error
    model.requires_grad_(False)
    if not config.compile_layers and (device.type, dtype) != ("cpu", torch.float32):
        keep_less(model)  # torch.compile does the same itself, and small models in float32 on a CPU need no memory
    if config.shard_base:
        shard_layers(model, device)
    if config.quantization == "none":  # quantised weights are loaded onto the device
        model = model.to(device)
    set_checkpointing(model, configured_mode(config) or "none")
    head = model.get_output_embeddings()
    base = BaseModel(
        name=name,
        model=model,
        backbone=getattr(model, model.base_model_prefix),
        head=_describe_head(head, model.config.get_text_config(decoder=True)),
        device=device,
        is_sharded=config.shard_base,
    )
    base = check_architecture(base)
    _log.info("loaded %s: %s, %s on %s", name, type(model).__name__, dtype, device)
    return base


def _describe_head(head: Any, config: Any) -> Head:
    """Describe the language-model head by the model's configuration. `check_architecture` compares what it computes."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(head.weight, getattr(head, "bias", None), scale, getattr(config, "final_logit_softcapping", None))


def run_backbone(base: BaseModel, layout: TreeLayout) -> Tensor:
    """Compute the final hidden states [T, H] of a layout."""

    def run(**inputs: Any) -> Tensor:
        hidden: Tensor = base.backbone(**inputs, use_cache=False).last_hidden_state[0]
        return hidden

    if base.one_by_one:
        return torch.cat([run(input_ids=layout.token_ids[None, chain.start : chain.end]) for chain in layout.chains])
    return run(input_ids=layout.token_ids[None], position_ids=layout.positions[None], tree_layout=layout)


def check_architecture(base: BaseModel) -> BaseModel:
    """Compare log-probs over a small prefix tree with the model's own forward pass over each sequence alone.

    A model that differs, or whose configuration names layers that mix tokens other than by attention, is switched to
    its own attention and to one sequence at a time, and compared again.

    Returns:
        `base`, or a copy that runs one sequence at a time.

    Raises:
        ConfigError: the log-probs differ even so, or the weights are sharded and the model cannot run over a tree.
    """
    model: Any = base.model
    reason = _why_not_a_tree(base)
    if reason is None:
        return base
    kind = f"{type(model).__name__} of {base.name!r}"
    if base.is_sharded:
        raise ConfigError(
            f"{kind} cannot be trained with `shard_base`: {reason}, so it runs one sequence at a time, and processes "
            "with different numbers of sequences would wait for each other; set `shard_base` to false",
            param="shard_base",
        )
    model.set_attn_implementation(_own_attention(model))
    _switch_dropout_off(model)
    base = replace(base, one_by_one=True)
    difference = _difference(base)
    if not difference <= _tolerance(base):
        raise ConfigError(
            f"{kind} cannot be trained: the log-probs of its hidden states and head differ by {difference:.3g} nats "
            "from its own forward pass, one sequence at a time too. Its head is more than a linear map with a scale "
            f"and a softcap. Over a prefix tree: {reason}",
            param="base_model",
        )
    _log.warning("%s trains one sequence at a time, without sharing prefixes: %s", kind, reason)
    return base


def _switch_dropout_off(model: Any) -> None:
    """The attention of trees has no dropout. A model's own would have it while layers are checkpointed."""
    for settings in (model.config.get_text_config(decoder=True), *model.modules()):
        if getattr(settings, "attention_dropout", 0.0):
            settings.attention_dropout = 0.0


def _why_not_a_tree(base: BaseModel) -> str | None:
    if layers := other_layers(base.model.config):
        return f"{layers}, which mixes tokens other than by attention to the tokens before"
    try:
        difference = _difference(base)
    except Exception as error:  # an unknown architecture may raise anything here
        return f"its layers do not run over a tree ({error!r})"
    if difference <= _tolerance(base):
        return None
    return f"its log-probs there differ by {difference:.3g} nats"


def _tolerance(base: BaseModel) -> float:
    return _TOLERANCE.get(base.head.weight.dtype, 0.3)


def _difference(base: BaseModel) -> float:
    """Largest difference in nats between a small layout of two sequences and the model's own forward passes."""
    ids = [(11 + 7 * i) % base.vocab_size for i in range(12)]
    sequences = [ids, ids[:5] + ids[8:] + ids[:3]]
    samples = [plain_sample(sequence, str(number)) for number, sequence in enumerate(sequences)]
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=base.vocab_size))]
    tree = build_tree(paths, branches=not base.one_by_one)
    rows = group_by_row(tree.targets, base.device)
    with torch.no_grad():
        layout = make_layout(tree, device=base.device, kernel="own" if base.one_by_one else "dense")
        ours = rows.spread(target_logprobs(run_backbone(base, layout), base.head, rows)[0])
        theirs = torch.cat([_own_logprobs(base, sequence) for sequence in sequences])
    return float((ours - theirs).abs().max())


def _own_attention(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _own_logprobs(base: BaseModel, token_ids: list[int]) -> Tensor:
    """Log-probs of `token_ids[1:]` by the model's own attention and head, on the CPU."""
    model: Any = base.model
    before = model.config._attn_implementation
    model.set_attn_implementation(_own_attention(model))
    try:
        ids = torch.tensor([token_ids], device=base.device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    finally:
        model.set_attn_implementation(before)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()


def choose_device(config: TrainerConfig) -> torch.device:
    """Return the configured device; for "auto" the first available of CUDA, Apple's MPS and CPU."""
    if config.device != "auto":
        return torch.device(config.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
