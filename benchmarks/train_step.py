"""Loss and gradient over the prefix tree against the same sequences padded in batches, and one by one.

All three compute the same numbers, the gradient of the same loss on the same adapter, from the same samples:

    tree         the trainer's own way: check, pack, lay out, forward, backward
    padded       transformers with peft: sorted by length, 8 rows per forward pass, padding masked
    one by one   the same with 1 row

Both baselines compute the head only where something is learnt, as a good plain trainer does. "By turn" has one sequence
for each of a rollout's requests, as recorded; "by rollout" has one for its whole history, which only works while
every turn extends the last one. The tree is the same for both.

    python -m benchmarks train_step --repeats 5           the small model
    python -m benchmarks train_step --full                30 M parameters too
    python -m benchmarks train_step --device cuda         bfloat16 on a GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from art.config import DppoConfig, TrainerConfig
from art.trainer.lora import LoraPolicy
from art.trainer.losses import LossInputs, term_loss
from art.trainer.metrics import StepRecord
from art.trainer.model import load_base_model
from art.trainer.tree import check_sample
from art.trainer.update import Update, compute_gradient, split_micro_batches
from benchmarks.models import LORA, ModelFiles, choose_dtype, load_peft_model, model_files, model_names
from benchmarks.report import Cell, Result
from benchmarks.timing import Clock, Timing, alternate, median, ratio
from benchmarks.workloads import Samples, make_workloads

ROWS = 8
"""Sequences per padded forward pass."""

LOSS = DppoConfig()

_MAX_TOKENS = {"cpu": 4096, "cuda": TrainerConfig().max_tokens}
"""Tree tokens per forward pass, as the trainer has it on each device."""


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    dtype = choose_dtype(args)
    rows: list[dict[str, Cell]] = []
    for name in model_names(args):
        with model_files(name) as files:
            policy = load_policy(files, args.device, dtype)
            model = load_peft_model(files, device=args.device, dtype=dtype, is_trainable=True)
            for workload, samples in make_workloads(files.vocab_size).items():
                rows += _compare(policy, model, (name, workload), samples, args)
    return Result(
        summary=f"Loss and gradient of one update in {dtype} on {args.device}, LoRA rank {LORA.rank}.",
        rows=rows,
        notes=[
            "times the tree: time by that of the tree",
            "gradient error: |g - g'| / |g'| where g' is the gradient one by one",
        ],
    )


def load_policy(files: ModelFiles, device: str, dtype: str) -> LoraPolicy:
    config = TrainerConfig.model_validate({"device": device, "dtype": dtype})
    policy = LoraPolicy(load_base_model(str(files.base), config), LORA, may_fold=not config.gradient_checkpointing)
    policy.load(Path(files.adapter, "adapter_model.safetensors").read_bytes())
    return policy


def _compare(
    policy: LoraPolicy, model: Any, names: tuple[str, str], samples: Samples, args: argparse.Namespace
) -> list[dict[str, Cell]]:
    samples = _with_sampling_logprobs(model, samples)
    max_tokens = _MAX_TOKENS[args.device]
    contenders: dict[str, Callable[[], tuple[int, Tensor]]] = {
        "tree": lambda: tree_gradient(policy, samples, max_tokens),
        "padded": lambda: plain_gradient(model, samples, ROWS, policy.tensors),
        "one by one": lambda: plain_gradient(model, samples, 1, policy.tensors),
    }
    last: dict[str, tuple[int, Tensor]] = {}

    def keep(name: str) -> Callable[[int], None]:
        return lambda _: last.__setitem__(name, contenders[name]())

    timings = alternate({name: keep(name) for name in contenders}, repeats=args.repeats, device=args.device)
    expected = last["one by one"][1]
    return [
        {
            "model": names[0],
            "workload": names[1],
            "way": way,
            "tokens": last[way][0],
            "CPU s": median(timings[way], "cpu_s"),
            "times the tree, CPU": _times(timings, way, "cpu_s"),
            "times the tree, wall": _times(timings, way, "wall_s"),
            "gradient error": float((last[way][1] - expected).norm() / expected.norm()),
        }
        for way in contenders
    ]


def _times(timings: dict[str, list[Timing]], way: str, clock: Clock) -> Cell:
    return 1 if way == "tree" else ratio(timings[way], timings["tree"], clock)


def tree_gradient(policy: LoraPolicy, samples: Samples, max_tokens: int) -> tuple[int, Tensor]:
    """Tokens computed, and the gradient [P]: all that the trainer does between samples and its optimiser."""
    checked = (check_sample(sample, vocab_size=policy.base.vocab_size) for sample in samples)
    paths = [path for path in checked if path is not None]
    update, record = Update(paths=paths, learning_rate=1.0, terms=(LOSS,)), StepRecord()
    micro_batches = split_micro_batches(paths, policy, max_tokens=max_tokens)
    compute_gradient(policy, update, micro_batches, record, lambda: None)
    return record.num_tree_tokens, policy.grads.clone()


def plain_gradient(model: Any, samples: Samples, rows: int, names: dict[str, Tensor]) -> tuple[int, Tensor]:
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
            torch.tensor(_learnt(batch, values), device=logprobs.device)
            for values in ("sampling_logprobs", "advantages")
        )
        (_plain_loss(logprobs, sampling, advantages) / total).backward()
    parameters = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    return num_tokens, torch.cat([parameters[name].grad.flatten().float() for name in names])


def _plain_loss(logprobs: Tensor, sampling: Tensor, advantages: Tensor) -> Tensor:
    inputs = LossInputs(
        policy_logprobs=logprobs,
        anchor_logprobs=sampling,
        sampling_logprobs=sampling,
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


def _learnt(batch: Samples, values: str) -> list[float]:
    """A field of the tokens that are learnt, sample after sample."""
    return [value for s in batch for value, learnt in zip(getattr(s, values), s.loss_mask, strict=True) if learnt]


def _with_sampling_logprobs(model: Any, samples: Samples) -> Samples:
    """As if a slightly older policy had sampled them, so that importance ratios are what they are in training."""
    generator = torch.Generator().manual_seed(0)
    filled = []
    for sample in samples:
        with torch.no_grad():
            logprobs = _plain_logprobs(model, [sample])[0].cpu()
        near = iter((logprobs + 0.1 * torch.randn(logprobs.shape, generator=generator)).tolist())
        filled.append(replace(sample, sampling_logprobs=[next(near) if m else 0.0 for m in sample.loss_mask]))
    return filled
