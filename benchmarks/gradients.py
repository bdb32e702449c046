"""The gradient of one update in several ways: over the prefix tree by the trainer, and without one by peft."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from art.config import DppoConfig, TrainerConfig
from art.trainer.losses import LossInputs, term_loss
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.micro_batch import split_micro_batches
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree import check_sample
from benchmarks.models import LORA, ModelFiles, choose_dtype, load_peft_model, model_files
from benchmarks.timing import main_clock, measure
from benchmarks.workloads import Samples, learnt

LOSS = DppoConfig()


@dataclass(frozen=True, slots=True)
class Gradient:
    num_tokens: int
    """Computed, padding included."""
    values: Tensor  # [P]


@dataclass(frozen=True, slots=True)
class BothModels:
    """The same weights and adapter, in the trainer and in peft."""

    files: ModelFiles
    policy: LoraPolicy
    peft: Any
    max_tokens: int
    """Tree tokens per forward pass, as the trainer has it on each device."""
    rows: int
    """Sequences per padded forward pass."""

    def tree_gradient(self, samples: Samples) -> Gradient:
        return tree_gradient(self.policy, samples, self.max_tokens)

    def plain_gradient(self, samples: Samples, rows: int) -> Gradient:
        return plain_gradient(self.peft, samples, rows, self.policy.tensors)


@contextmanager
def open_models(name: str, args: argparse.Namespace) -> Iterator[BothModels]:
    """Model `name`, loaded for `args.device` and `args.dtype`. CUDA checkpoints activations, in both."""
    is_gpu, dtype = args.device == "cuda", choose_dtype(args)
    with model_files(name, args.device) as files:
        yield BothModels(
            files=files,
            policy=load_policy(files, args.device, dtype, gradient_checkpointing=is_gpu),
            peft=load_peft_model(
                files, device=args.device, dtype=dtype, is_trainable=True, gradient_checkpointing=is_gpu
            ),
            max_tokens=TrainerConfig().max_tokens if is_gpu else 4096,
            rows=2 if is_gpu else 8,
        )


def load_policy(files: ModelFiles, device: str, dtype: str, *, gradient_checkpointing: bool = False) -> LoraPolicy:
    config = TrainerConfig.model_validate(
        {"device": device, "dtype": dtype, "gradient_checkpointing": gradient_checkpointing, "num_threads": 1}
    )
    policy = LoraPolicy(load_base_model(str(files.base), config), LORA)
    policy.load(Path(files.adapter, "adapter_model.safetensors"))
    return policy


def tree_gradient(policy: LoraPolicy, samples: Samples, max_tokens: int) -> Gradient:
    """All that the trainer does between samples and its optimiser."""
    checked = (check_sample(sample, vocab_size=policy.base.vocab_size) for sample in samples)
    paths = [path for path in checked if path is not None]
    update, record = Update(paths=paths, learning_rate=1.0, terms=(LOSS,)), StepRecord()
    micro_batches = split_micro_batches(paths, policy.base, max_tokens=max_tokens)
    compute_gradient(policy, update, micro_batches, record)
    return Gradient(record.num_tree_tokens, policy.grads.clone())


def plain_gradient(model: Any, samples: Samples, rows: int, names: dict[str, Tensor]) -> Gradient:
    """The same without a tree. `names` gives the order of the adapter's tensors in the gradient."""
    model.zero_grad()
    total = sum(sum(sample.loss_mask) for sample in samples)
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    num_tokens = 0
    for start in range(0, len(ordered), rows):
        batch = ordered[start : start + rows]
        logprobs, computed = _plain_logprobs(model, batch)
        num_tokens += computed
        sampling, advantages = (
            torch.tensor(list(learnt(batch, values)), device=logprobs.device)
            for values in ("sampling_logprobs", "advantages")
        )
        (_plain_loss(logprobs, sampling, advantages) / total).backward()
    parameters = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    return Gradient(num_tokens, torch.cat([parameters[name].grad.flatten().float() for name in names]))


def _plain_loss(logprobs: Tensor, sampling: Tensor, advantages: Tensor) -> Tensor:
    inputs = LossInputs(
        policy_logprobs=logprobs,
        anchor_logprobs=sampling,
        sampling_logprobs=sampling,
        entropy=torch.zeros_like(sampling),
        advantages=advantages,
        samples=torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device),
        num_samples=1,
    )
    return term_loss(inputs, LOSS).values.sum()


def _plain_logprobs(model: Any, batch: Samples) -> tuple[Tensor, int]:
    """Log-probs of what `batch` learns, sample after sample, and the tokens computed, padding included."""
    length = max(len(sample.token_ids) for sample in batch) - 1
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    attended, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(batch):
        count = len(sample.token_ids) - 1
        ids[row, :count] = torch.tensor(sample.token_ids[:-1])
        attended[row, :count] = 1
        wanted = torch.tensor(sample.loss_mask[1:])
        labels[row, :count][wanted] = torch.tensor(sample.token_ids[1:])[wanted]
    columns = (labels >= 0).any(0).nonzero()[:, 0]
    labels = labels[:, columns].flatten()
    ids, attended, columns, labels = (x.to(model.device) for x in (ids, attended, columns, labels))
    mask = {"attention_mask": attended} if len(batch) > 1 else {}
    logits = model(input_ids=ids, **mask, use_cache=False, logits_to_keep=columns).logits
    logprobs = -cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="none")
    return logprobs[labels >= 0], ids.numel()


def with_sampling_logprobs(model: Any, samples: Samples) -> Samples:
    """As if a slightly older policy had sampled them, so that importance ratios are what they are in training."""
    generator = torch.Generator().manual_seed(0)
    filled = []
    for sample in samples:
        with torch.no_grad():
            logprobs = _plain_logprobs(model, [sample])[0].cpu()
        near = iter((logprobs + 0.1 * torch.randn(logprobs.shape, generator=generator)).tolist())
        filled.append(replace(sample, sampling_logprobs=[next(near) if m else 0.0 for m in sample.loss_mask]))
    return filled


@lru_cache
def matmul_rate(device: str, dtype: str) -> float:
    """Operations per second of the best of several plain matrix products of torch."""
    size = 8192 if device == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    return 2 * size**3 / min(measure(lambda: a @ a, device).seconds(main_clock(device)) for _ in range(6))
