"""Load the frozen base model, check that it can be trained, and run layouts through it.

A layer that is checkpointed computes again in the backward pass what it does not keep:

    none         nothing
    selective    all of a layer but its attention (`keep_attention`)
    full         all of a layer

Layers that are split (`shard_base`, torch's FSDP2, for models that do not fit one device) are gathered when they run,
forward and backward, and freed afterwards. The adapter is not sharded: it is injected later, and `fully_shard` manages
only what exists when it is called. Embedding, final norm and head stay whole, because the head is read outside of the
model's forward pass. Gathering needs every process, so all processes must run the model equally often.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from art.config import TrainerConfig
from art.errors import ConfigError
from art.kernels.base_model import loading_options, other_layers
from art.memory import Checkpointing
from art.protocol.samples import plain_sample
from art.trainer.logprobs import Head, group_by_row, target_logprobs
from art.trainer.tree import build_tree, check_sample
from art.trainer.tree_attention import (
    ATTENTION_NAME,
    TreeLayout,
    keep_attention,
    make_layout,
    register_attention,
)

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest allowed difference in nats between a tree and separate sequences. A wrong mask or head gives far more."""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """The base model of a trainer. Its own weights are never trained."""

    name: str
    """What checkpoints call it."""
    source: str
    """The directory that it was read from, or its hub id."""
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


def load_base_model(source: str, config: TrainerConfig, name: str | None = None) -> FrozenModel:
    """Load the frozen base model `source`, a directory or a hub id. Checkpoints call it `name`, if that is another.

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
            source,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot load base model {source!r}: {error}. Expected a directory with a Hugging Face causal language "
            "model, or the id of one on the hub",
            param="base_model",
        ) from error
    model.requires_grad_(False)
    if (device.type, dtype) != ("cpu", torch.float32):
        keep_less(model)  # small models in float32 on a CPU need no memory
    if config.shard_base:
        shard_layers(model, device)
    if config.quantization == "none":  # quantised weights are loaded onto the device
        model = model.to(device)
    set_checkpointing(model, configured_mode(config) or "none")
    head, text = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    base = FrozenModel(
        name=name or source,
        source=source,
        model=model,
        backbone=getattr(model, model.base_model_prefix),
        # By the configuration. `check_architecture` compares what it computes.
        head=Head(
            head.weight,
            getattr(head, "bias", None),
            (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0),
            getattr(text, "final_logit_softcapping", None),
        ),
        device=device,
        is_sharded=config.shard_base,
    )
    base = check_architecture(base)
    _log.info("loaded %s: %s, %s on %s", source, type(model).__name__, dtype, device)
    return base


def run_backbone(base: FrozenModel, layout: TreeLayout) -> Tensor:
    """Compute the final hidden states [T, H] of a layout."""

    def run(**inputs: Any) -> Tensor:
        hidden: Tensor = base.backbone(**inputs, use_cache=False).last_hidden_state[0]
        return hidden

    if base.one_by_one:
        starts = (layout.positions == 0).nonzero().flatten().tolist()
        sequences = layout.token_ids.tensor_split(starts[1:])
        return torch.cat([run(input_ids=sequence[None]) for sequence in sequences])
    return run(input_ids=layout.token_ids[None], position_ids=layout.positions[None], tree_layout=layout)


def check_architecture(base: FrozenModel) -> FrozenModel:
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
    # The attention of trees has no dropout. A model's own would have it while layers are checkpointed.
    for settings in (model.config.get_text_config(decoder=True), *model.modules()):
        if getattr(settings, "attention_dropout", 0.0):
            settings.attention_dropout = 0.0
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


def _why_not_a_tree(base: FrozenModel) -> str | None:
    if layers := other_layers(base.model.config):
        return f"{layers}, which mixes tokens other than by attention to the tokens before"
    try:
        difference = _difference(base)
    except Exception as error:  # an unknown architecture may raise anything here
        return f"its layers do not run over a tree ({error!r})"
    return None if difference <= _tolerance(base) else f"its log-probs there differ by {difference:.3g} nats"


def _tolerance(base: FrozenModel) -> float:
    return _TOLERANCE.get(base.head.weight.dtype, 0.3)


def _difference(base: FrozenModel) -> float:
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
        theirs = []  # by the model's own attention and head
        model: Any = base.model
        before = model.config._attn_implementation
        model.set_attn_implementation(_own_attention(model))
        try:
            for sequence in sequences:
                token_ids = torch.tensor([sequence], device=base.device)
                logprobs = model(input_ids=token_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
                theirs.append(logprobs.gather(1, token_ids[0, 1:, None])[:, 0].cpu())
        finally:
            model.set_attn_implementation(before)
    return float((ours - torch.cat(theirs)).abs().max())


def _own_attention(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def choose_device(config: TrainerConfig) -> torch.device:
    """Return the configured device; for "auto" the first available of CUDA, Apple's MPS and CPU."""
    if config.device != "auto":
        return torch.device(config.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


# -- layers: split over processes, checkpointed --


def shard_layers(model: Any, device: torch.device) -> None:
    """Split the decoder layers of a Hugging Face causal LM over all processes, and move them to `device`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its decoder layers; set `shard_base` to false", param="shard_base"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = set(model.parameters())
    for layer in layers:
        whole -= set(layer.parameters())
        fully_shard(layer, mesh=mesh)
    backbone = getattr(model, model.base_model_prefix)
    fully_shard(backbone, mesh=mesh, ignored_params=whole)  # the root, which overlaps gathering with computing


def configured_mode(config: TrainerConfig) -> Checkpointing | None:
    """Return the configured way of checkpointing; `None` if it is to be chosen."""
    chosen = config.gradient_checkpointing
    return None if chosen == "auto" else "selective" if chosen == "selective" else "full" if chosen else "none"


def set_checkpointing(model: Any, mode: Checkpointing) -> None:
    """Make a Hugging Face causal LM keep, or compute again, the activations of its layers.

    Layers checkpoint in training mode only. Dropout stays off, since the engine has none.
    """

    def call(what: str, *args: Any) -> None:
        newer = getattr(model, f"activation_checkpointing_{what}", None)  # the name in transformers 5.20 and later
        (newer or getattr(model, f"gradient_checkpointing_{what}"))(*args)

    model.train(mode != "none")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    if mode == "none":
        if model.supports_gradient_checkpointing:
            call("disable")
        return
    options = {"use_reentrant": False} | ({"context_fn": keep_attention} if mode == "selective" else {})
    try:
        call("enable", options)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} cannot checkpoint its layers ({error}); set `gradient_checkpointing` to false",
            param="gradient_checkpointing",
        ) from error


# -- norms and gates are computed again from their inputs, which takes little time --
#
#     norm       keeps its input in the model's dtype. transformers' own code keeps a float32 copy of it
#     MLP        down_proj(act(gate_proj(x)) * up_proj(x)) keeps gate and up, and neither act(gate) nor the product
#
# No formula is written down here: the model's own code runs a second time. Outputs are bit for bit those of the model
# as it was loaded, and so are gradients in bfloat16; in float32 some of their sums are in another order.


class _Recomputed(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Call `function` on tensors, and again in the backward pass. Only the tensors themselves are kept.

    The first `num_arguments` tensors are passed to `function`. The others are parameters that it uses, and get their
    gradients too.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], num_arguments: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.num_arguments = function, num_arguments
        return function(*tensors[:num_arguments])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_(needs) if index < ctx.num_arguments else tensor
                for index, (tensor, needs) in enumerate(zip(tensors, needed, strict=True))
            ]
            out = ctx.function(*leaves[: ctx.num_arguments])
        learnt = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
        grads_in = iter(torch.autograd.grad(out, learnt, grads[0]))
        return None, None, *(next(grads_in) if needs else None for needs in needed)


def gated_input(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute `activation(gate) * up`, keeping only the two inputs for the backward pass."""
    return _Recomputed.apply(lambda gate, up: activation(gate) * up, 2, gate, up)


def keep_less(model: torch.nn.Module) -> None:
    """Replace the forward passes of RMS norms and gated MLPs of a Hugging Face model by ones with the same output.

    Names and parameters of the modules stay as they are. MLPs of another form are left alone.
    """
    verdicts: dict[type, bool] = {}
    for module in list(model.modules()):
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm") and kind is not torch.nn.RMSNorm:  # torch's own keeps its input
            module.__class__ = _recomputing_norm(kind)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            if kind not in verdicts:
                verdicts[kind] = _is_gated_mlp(module)
                if not verdicts[kind]:
                    _log.info("%s is not a plain gated MLP; it keeps what transformers keeps", kind.__name__)
            if verdicts[kind]:
                module.__class__ = _gated_mlp(kind)


@functools.cache
def _recomputing_norm(kind: Any) -> type:
    """A subclass of a norm's class that computes it again in the backward pass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not torch.is_grad_enabled():  # e.g. a norm with a gate
            return kind.forward(self, *args, **kwargs)
        trained = [parameter for parameter in self.parameters(recurse=False) if parameter.requires_grad]
        return _Recomputed.apply(functools.partial(kind.forward, self), 1, args[0], *trained)

    return type(f"Recomputing{kind.__name__}", (kind,), {"forward": forward})


@functools.cache
def _gated_mlp(kind: Any) -> type:
    """A subclass of an MLP's class that computes the gate again in the backward pass."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return _apply_gated_mlp(self, x)

    return type(f"Recomputing{kind.__name__}", (kind,), {"forward": forward})


def _apply_gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    adapted: Any = getattr(down, "gated", None)  # an `LoraLinear`, which does not keep its input either
    out: Tensor = down(gated_input(gate, up, mlp.act_fn)) if adapted is None else adapted(gate, up, mlp.act_fn)
    return out


def _is_gated_mlp(mlp: Any) -> bool:
    """Whether the module computes what `_apply_gated_mlp` does, by its output for usual and large numbers."""
    if not all(isinstance(layer, torch.nn.Linear) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        return False
    weight = mlp.down_proj.weight
    dtype = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
    x = torch.randn(4, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    try:
        with torch.no_grad():
            return all(torch.equal(mlp(x * factor), _apply_gated_mlp(mlp, x * factor)) for factor in (1.0, 10.0))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # takes or returns something else
        return False
