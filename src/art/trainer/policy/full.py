"""Full fine-tuning: all weights of the decoder layers and the final norm are trained, without an adapter.

A copy of the decoder, the *twin*, holds the trained weights. The base model stays in memory too, for references.
Embedding and language-model head are not trained and shared with it: the gradient of log-probs is computed in the
forward pass, which needs a frozen head, and the embedding often is the same tensor as the head.

The weights in `values` are float32 whatever the dtype of the base model. Updates at usual learning rates are smaller
than the resolution of bfloat16, so they are added up in float32. The layers compute with the rounded sum, which is what
an engine of the same dtype serves.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from art.errors import AdapterError, ConfigError
from art.storage import checkpoints
from art.trainer.policy.base_model import FrozenModel, run_backbone
from art.trainer.policy.policy import Policy
from art.trainer.tensor_files import read_named, stream_named
from art.trainer.tree_attention import TreeLayout

_COPIED_FILES = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab*", "merges.txt", "spiece.model", "chat_template*"),
)
"""Files that transformers reads beside the weights. They are copied from the base model into each checkpoint."""


class FullPolicy(Policy):
    """A policy for full fine-tuning: a trained copy of the decoder. `tensors` has the Hugging Face model's names."""

    weights_file = checkpoints.MODEL_WEIGHTS

    def __init__(self, base: FrozenModel) -> None:
        """Copy the decoder of `base`.

        Raises:
            ConfigError: the base weights are quantised or sharded.
        """
        if base.is_sharded or getattr(base.model, "is_quantized", False):
            raise ConfigError(
                "full fine-tuning needs the whole, unquantised base weights; set `shard_base` and `quantization` to "
                "their defaults, or train a LoRA",
                param="lora",
            )
        self.base = base
        self.config = None
        embeddings = (module for module in base.model.modules() if isinstance(module, torch.nn.Embedding))
        weights = (*(module.weight for module in embeddings), base.head.weight, base.head.bias)
        frozen = {id(weight): weight for weight in weights if weight is not None}
        model: Any = copy.deepcopy(base.model, dict(frozen))  # tensors in the memo are not copied, but shared
        self._twin = replace(base, model=model, backbone=getattr(model, model.base_model_prefix))
        self._start = {name: weight for name, weight in base.model.named_parameters() if id(weight) not in frozen}
        parameters = dict(model.named_parameters())
        self._rounded: list[tuple[Tensor, Tensor]] = []
        for name, grad in self._allocate(self._start).items():
            self._attach(parameters[name].requires_grad_(), self.tensors[name], grad)
        self._accumulates = False
        folder = Path(base.source)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(base.source, allow_patterns=list(_COPIED_FILES)))
        files = (path for pattern in _COPIED_FILES for path in folder.glob(pattern) if path.is_file())
        self._files = {path.name: path.read_bytes() for path in files}
        self.reset()

    @property
    def trained_model(self) -> Any:
        return self._twin.model

    def _attach(self, parameter: Any, value: Tensor, grad: Tensor) -> None:
        """Make `parameter` a view of `value`, or a rounded copy of it, and collect its gradient in `grad`."""
        if parameter.dtype == torch.float32:
            parameter.data, parameter.grad = value, grad
            return

        def collect(parameter: Any) -> None:
            grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        self._rounded.append((parameter.data, value))

    # -- weights --

    def reset(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(self._start[name])

    def files(self) -> dict[str, checkpoints.Content]:
        """Return the files of a whole model for transformers, by name: all weights, configuration and tokenizer."""
        return {**self._files, checkpoints.MODEL_WEIGHTS: stream_named(self._all_weights())}

    def load(self, file: Path) -> None:
        """Load the weights of a whole model. Its frozen weights must equal those of the base model.

        Raises:
            AdapterError: the tensors do not fit this model, or a frozen one differs.
        """
        weights = self._all_weights()
        frozen_first = {name: weights[name] for name in sorted(weights, key=lambda name: name in self.tensors)}
        for name, weight in read_named(file, frozen_first, checkpoints.MODEL_WEIGHTS):
            if name in self.tensors:
                self.tensors[name].copy_(weight)
            elif not torch.equal(weight.to(weights[name].device), weights[name]):
                raise AdapterError(
                    f"{checkpoints.MODEL_WEIGHTS} differs from the base model {self.base.name!r} in {name!r}, which "
                    "is never trained. The checkpoint belongs to another base model"
                )

    def norm(self) -> float:
        """Return the norm of the change of all weights since step 0, rounded to the dtype that an engine serves."""
        self._round()
        weights = dict(self._twin.model.named_parameters())
        changes = (weights[name].detach().float() - start.float() for name, start in self._start.items())
        if self.base.device.type == "mps":  # which has no float64
            changes = (change.cpu() for change in changes)
        return math.hypot(*(float(torch.linalg.vector_norm(change, dtype=torch.float64)) for change in changes))

    def _all_weights(self) -> dict[str, Tensor]:
        """All weights of the model, named as by `save_pretrained`. Tied weights appear once."""
        model = self._twin.model
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in model.named_parameters()}
        return {name: self.tensors.get(name, t) for name, t in model.state_dict().items() if name not in tied}

    def _round(self) -> None:
        for rounded, value in self._rounded:
            rounded.copy_(value)

    # -- forward and backward --

    def hidden_states(self, layout: TreeLayout) -> Tensor:
        if not self._accumulates:
            self._round()
        return run_backbone(self._twin, layout)

    @contextlib.contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        self.grads.zero_()
        self._round()
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
