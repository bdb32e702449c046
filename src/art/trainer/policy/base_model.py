"""Load the frozen base model, check that it can be trained, and run layouts through it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from art.config import TrainerConfig
from art.errors import ConfigError
from art.kernels.quantization import loading_options
from art.protocol.samples import plain_sample
from art.trainer.attention.tree_attention import ATTENTION_NAME, TreeLayout, make_layout, register_attention
from art.trainer.machine.shard import shard_layers
from art.trainer.policy.checkpointing import configured_mode, set_checkpointing
from art.trainer.policy.lean import keep_less
from art.trainer.step.logprobs import Head, group_by_row, target_logprobs
from art.trainer.tree.tree import build_tree, check_sample

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest allowed difference in nats between a tree and separate sequences. A wrong mask or head gives far more."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    name: str
    model: torch.nn.Module
    """Hugging Face causal LM that runs the attention `ATTENTION_NAME`."""
    backbone: torch.nn.Module
    """The decoder without the head. Returns final hidden states."""
    head: Head
    device: torch.device
    is_sharded: bool = False
    """Whether the layers' weights are split over processes. All processes must then run the model equally often."""

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
    if (device.type, dtype) != ("cpu", torch.float32) and not config.compile_layers:
        keep_less(model)  # small models in float32 on a CPU need speed, not memory; torch.compile does the same itself
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
        head=Head(head.weight, getattr(head, "bias", None)),
        device=device,
        is_sharded=config.shard_base,
    )
    check_architecture(base)
    _log.info("loaded %s: %s, %s on %s", name, type(model).__name__, dtype, device)
    return base


def run_backbone(base: BaseModel, layout: TreeLayout, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Compute the final hidden states [T, H] of a layout. `weights` replace parameters of the backbone, by name."""
    inputs: dict[str, Any] = {
        "input_ids": layout.token_ids[None],
        "position_ids": layout.positions[None],
        "use_cache": False,
        "tree_layout": layout,
    }
    if weights is None:
        output = base.backbone(**inputs)
    else:
        output = torch.func.functional_call(base.backbone, dict(weights), kwargs=inputs)
    return output.last_hidden_state[0]


def check_architecture(base: BaseModel) -> None:
    """Compare log-probs over a small prefix tree with the model's own forward pass over each sequence alone.

    Three kinds of models would train wrongly without this check: layers that mix tokens without attention (state-space
    models), heads that are more than a linear map, and attention that ignores the layout.

    Raises:
        ConfigError: the log-probs differ.
    """
    ids = [(11 + 7 * i) % base.vocab_size for i in range(12)]
    sequences = [ids, ids[:5] + ids[8:] + ids[:3]]
    samples = [plain_sample(sequence, str(number)) for number, sequence in enumerate(sequences)]
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=base.vocab_size))]
    tree = build_tree(paths)
    rows = group_by_row(tree.targets, base.device)
    with torch.no_grad():
        hidden = run_backbone(base, make_layout(tree, device=base.device, kernel="dense"))
        ours = rows.spread(target_logprobs(hidden, base.head, rows)[0])
        theirs = torch.cat([_own_logprobs(base, sequence) for sequence in sequences])
    difference = float((ours - theirs).abs().max())
    if not difference <= _TOLERANCE.get(base.head.weight.dtype, 0.3):
        raise ConfigError(
            f"{type(base.model).__name__} of {base.name!r} cannot be trained: over a prefix tree it gives log-probs "
            f"that differ by {difference:.3g} nats from its own forward pass. Its layers mix tokens other than by "
            "attention, or its head is more than a linear map",
            param="base_model",
        )


def _own_logprobs(base: BaseModel, token_ids: list[int]) -> Tensor:
    """Log-probs of `token_ids[1:]` by the model's own attention and head, on the CPU."""
    model: Any = base.model
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
    try:
        ids = torch.tensor([token_ids], device=base.device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()


def choose_device(config: TrainerConfig) -> torch.device:
    """Return the configured device; for "auto" the first available of CUDA, Apple's MPS and CPU."""
    if config.device != "auto":
        return torch.device(config.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
