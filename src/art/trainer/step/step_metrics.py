"""The metrics of a step, computed from the records of its micro-batches. `art.metrics.catalogue` explains each.

How well a step used its device: the arithmetic that it needs, and the device's peak speed.
"""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from art.kernels.layer_kinds import head_dims
from art.protocol.samples import COMPONENTS, Component
from art.trainer.gate import Evidence
from art.trainer.policy.base_model import BaseModel
from art.trainer.policy.policy import Policy
from art.trainer.tree.tree import SamplePath

RATIO_LOW, RATIO_HIGH = 0.9, 1.1
"""Importance ratios outside of this range are counted."""

_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class MicroBatchRecord:
    """What one forward and backward pass observed. All arrays are [N], one entry per target."""

    update: NDArray[np.int64]
    """Number of the optimiser update in the step, from 0."""
    policy_logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    entropy: NDArray[np.float32]
    clipped_low: NDArray[np.bool_]
    clipped_high: NDArray[np.bool_]
    components: NDArray[np.int8]
    """Index into `COMPONENTS`."""
    base_logprobs: NDArray[np.float32]
    """Log-probs under the base model, NaN where they were not measured."""
    anchor_logprobs: NDArray[np.float32]
    """Denominators of the importance ratios."""
    ranks: NDArray[np.int64]
    """Rank of the target's sample in the layout of the step. Targets of one sample follow one another."""
    reasons: NDArray[np.uint8]
    """`TokenReason`: whether the target was learnt, and if not, why."""

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> MicroBatchRecord:
        """Return the record of the targets for which `chosen` [N] is true, or of those with the indices `chosen`."""
        return MicroBatchRecord(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})

    def of(self, component: Component) -> MicroBatchRecord:
        """Return the record of the targets of a component."""
        return self.where(self.components == COMPONENTS.index(component))

    def __len__(self) -> int:
        return len(self.components)


@dataclass(frozen=True, slots=True)
class GateView:
    """What micro-batches saw of the R rollouts of an update, and what the gate decided by it."""

    evidence: Evidence
    masked: NDArray[np.bool_]  # [R]
    """Rollouts of which a micro-batch masked targets."""
    kept: NDArray[np.bool_]  # [R]
    """Rollouts of which a micro-batch kept targets."""

    def __add__(self, other: GateView) -> GateView:
        return GateView(self.evidence + other.evidence, self.masked | other.masked, self.kept | other.kept)


@dataclass(slots=True)
class StepRecord:
    """Measurements of a training step, from which its metrics are computed. They are added while it runs."""

    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # per update
    grad_norms: list[float] = field(default_factory=list)  # per update
    num_tree_tokens: int = 0
    num_dense_tokens: int = 0
    """Tree tokens whose attention ran on the dense kernel."""
    num_visible_keys: int = 0
    """Sum over the tree's tokens of how many tokens each attends to."""
    num_rows: int = 0
    """Number of hidden states that went through the language-model head."""
    num_gated: int = 0
    """Number of reinforcement-learning rollouts that the mismatch gate judged."""
    num_mismatched: int = 0
    """Number of rollouts that it masked."""
    gate_noise: list[tuple[float, float]] = field(default_factory=list)  # per update that was gated
    """Noise that the gate measured, and the largest that it explains by rounding."""
    gate_views: list[GateView] = field(default_factory=list)
    """One per update and process."""
    num_mismatched_targets: int = 0
    num_truncated_targets: int = 0


def summarise(record: StepRecord, paths: list[SamplePath], *, step: int, max_grad_norm: float) -> dict[str, float]:
    """Compute the metrics of a training step from its record. `step` is the checkpoint that it continued from."""
    targets = join_records(record.micro_batches)
    rl = targets.of("rl")
    entropy = (rl if len(rl) else targets).entropy  # other components do not show how varied the policy's answers are
    rollouts = [path for path in paths if path.sample.component != "sft"] or paths
    unshared = sum(len(path.sample.token_ids) for path in paths)
    grad_norms = np.asarray(record.grad_norms)
    metrics = {
        "loss/train": _mean(record.losses),
        "loss/entropy": _mean(entropy),
        **_entropy_where_it_varies(entropy),
        "loss/grad_norm": _mean(grad_norms),
        "loss/grad_norm_max": float(grad_norms.max()),
        "loss/grad_clipped_share": _mean(grad_norms > max_grad_norm),
        "data/step_trainer_tokens": float(record.num_tree_tokens),
        "data/step_tokens_unshared": float(unshared),
        "data/step_shared_share": 1 - record.num_tree_tokens / unshared,
        "data/step_trainable_tokens": float(len(targets)),
        **_supervised(targets),
        "data/step_num_rollouts_trained": float(len({path.sample.rollout_id for path in rollouts})),
        "data/step_num_gradient_steps": float(len(record.losses)),
        "throughput/attention_dense_share": record.num_dense_tokens / record.num_tree_tokens,
    }
    if len(rl) == 0:
        return metrics
    staleness = step - np.concatenate([path.policy_versions for path in paths if path.sample.component == "rl"])
    return (
        metrics
        | _entropy_by_sign(rl)
        | {
            "loss/masked_share": _mean(rl.clipped_low | rl.clipped_high),
            "loss/clipped_low_share": _mean(rl.clipped_low),
            "loss/clipped_high_share": _mean(rl.clipped_high),
        }
        | _against_sampler(rl)
        | _against_base(rl)
        | _gate_noise(record)
        | {
            "offpolicy/mismatch_masked_share": record.num_mismatched / max(record.num_gated, 1),
            "offpolicy/mismatch_masked_tokens": float(record.num_mismatched_targets),
            "offpolicy/truncated_share": record.num_truncated_targets / len(rl),
            "offpolicy/mean_staleness": _mean(staleness),
        }
    )


def join_records(parts: list[MicroBatchRecord]) -> MicroBatchRecord:
    """Join the targets of several micro-batches, in their order."""
    names = (each.name for each in fields(MicroBatchRecord))
    return MicroBatchRecord(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def summarise_weights(policy: Policy, before: Tensor, *, learning_rate: float) -> dict[str, float]:
    """Compute metrics of the weights after a step. `before` [P] are `policy.values` from before it."""
    norm = policy.norm()
    return {
        "loss/learning_rate": learning_rate,
        "loss/adapter_norm": norm,
        "loss/adapter_change": policy.change_norm(before) / norm if norm else 0.0,
    }


def _entropy_where_it_varies(entropy: NDArray[np.float32]) -> dict[str, float]:
    """Mean entropy weighted by itself, and the effective share of targets that have this entropy.

    Their product is the plain mean. Tokens that are certain, e.g. the JSON around an argument, do not count.

    Example: [1, 1, 0, 0, 0, 0, 0, 0] has a mean of 0.25, which is an entropy of 1 in a share of 0.25.
    """
    total, squares = entropy.sum(dtype=np.float64), np.square(entropy, dtype=np.float64).sum()
    if squares == 0:
        return {"loss/entropy_varying": 0.0, "loss/entropy_varying_share": 0.0}
    share = total**2 / (len(entropy) * squares)
    return {"loss/entropy_varying": float(squares / total), "loss/entropy_varying_share": float(share)}


def _supervised(targets: MicroBatchRecord) -> dict[str, float]:
    """Mean cross-entropy and number of the targets of each component that learns by it."""
    metrics: dict[str, float] = {}
    for component in COMPONENTS:
        if component != "rl" and len(own := targets.of(component)):
            metrics[f"loss/{component}"] = -_mean(own.policy_logprobs)
            metrics[f"data/step_{component}_tokens"] = float(len(own))
    return metrics


def _entropy_by_sign(rl: MicroBatchRecord) -> dict[str, float]:
    signs = {"loss/entropy_rewarded": rl.advantages > 0, "loss/entropy_punished": rl.advantages < 0}
    return {name: _mean(rl.entropy[sign]) for name, sign in signs.items() if sign.any()}


def _gate_noise(record: StepRecord) -> dict[str, float]:
    if not record.gate_noise:
        return {}
    measured, most = record.gate_noise[0]  # of the first update: nothing was trained before it
    return {"offpolicy/mismatch_noise": measured, "offpolicy/mismatch_noise_allowed": most}


def _against_sampler(rl: MicroBatchRecord) -> dict[str, float]:
    """Metrics of the importance ratios r = policy / sampler: over all updates, and in the first and the last one."""
    log_ratio = _log_ratio(rl.policy_logprobs, rl.sampling_logprobs)
    ratio = np.exp(log_ratio)
    outside = (ratio < RATIO_LOW) | (ratio > RATIO_HIGH)
    k3 = ratio - 1 - log_ratio
    first, last = rl.update == rl.update.min(), rl.update == rl.update.max()
    names = [f"offpolicy/ratio_p{round(100 * q):02d}" for q in _QUANTILES]
    return dict(zip(names, map(float, np.quantile(ratio, _QUANTILES)), strict=True)) | {
        "loss/kl_to_sampler": _mean(k3),
        "loss/kl_to_sampler_k1": _mean(-log_ratio),
        "offpolicy/ratio_mean": _mean(ratio),
        "offpolicy/ratio_max": float(ratio.max()),
        "offpolicy/ratio_outside_share": _mean(outside),
        "offpolicy/first_update_gap": _mean(np.abs(log_ratio[first])),
        "offpolicy/first_update_gap_max": float(np.abs(log_ratio[first]).max()),
        "offpolicy/first_update_kl": _mean(k3[first]),
        "offpolicy/first_update_outside_share": _mean(outside[first]),
        "offpolicy/last_update_kl": _mean(k3[last]),
    }


def _against_base(rl: MicroBatchRecord) -> dict[str, float]:
    """KL to the base model, over the targets whose log-prob under it is known (all, some or none)."""
    known = rl.where(~np.isnan(rl.base_logprobs))
    if len(known) == 0:
        return {}
    log_ratio = _log_ratio(known.base_logprobs, known.policy_logprobs)
    return {
        "loss/kl_to_base": _mean(np.exp(log_ratio) - 1 - log_ratio),
        "loss/kl_to_base_k1": _mean(-log_ratio),
        "loss/kl_to_base_targets": float(len(known)),
    }


def _log_ratio(above: ArrayLike, below: ArrayLike) -> NDArray[np.float64]:
    """`above - below`, clipped so that its exponential stays finite even if a broken sampler reports nonsense."""
    return np.clip(np.subtract(above, below, dtype=np.float64), -50.0, 50.0)


def _mean(values: ArrayLike) -> float:
    return float(np.asarray(values, dtype=np.float64).mean())


_GPU_PEAKS = {
    "B200": 2.25e15,
    "GH200": 9.89e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "A10G": 7.0e13,
    "A10": 1.25e14,
    "RTX 4090": 1.65e14,
    "RTX 3090": 7.1e13,
}
"""Peak dense bfloat16 operations per second with float32 accumulation, from data sheets."""

_PRODUCT_SIZE = 1024
_NUM_PRODUCTS = 3


def measure_usage(policy: Policy, record: StepRecord, updates_s: float, *, peak_flops: float) -> dict[str, float]:
    """Compute throughput metrics of updates that took `updates_s` s, on a device with `peak_flops` operations per s."""
    flops_per_s = count_flops(policy.base, record, trains_base_weights=policy.trains_base_weights) / updates_s
    return {
        "throughput/train_tree_tokens_per_s": record.num_tree_tokens / updates_s,
        "throughput/train_flops_per_s": flops_per_s,
        "throughput/train_utilization": flops_per_s / peak_flops,
        "throughput/peak_flops_per_s": peak_flops,
        "time/step_updates_s": updates_s,
    }


def count_flops(base: BaseModel, record: StepRecord, *, trains_base_weights: bool = False) -> float:
    """Count the floating-point operations that updates need. A multiplication and an addition are two operations.

    Per token and weight: 2 forward, 2 for the gradient of the input, and 2 for the gradient of the weight if it is
    trained. With a frozen base that is 4 N D, where arXiv 2001.08361 has 6 N D; the small products of the adapter are
    not counted. Attention takes 12 per query, visible key and head feature, the frozen head 4 per row and weight.
    Recomputation, e.g. by gradient checkpointing, is not counted.
    """
    num_heads = getattr(base.model.config.get_text_config(decoder=True), "num_attention_heads", None) or 0
    attention = 12 * record.num_visible_keys * num_heads * sum(head_dims(base.model.config))
    linear = (6 if trains_base_weights else 4) * record.num_tree_tokens * count_active_weights(base)
    return float(linear + attention + 4 * record.num_rows * base.head.weight.numel())


def count_active_weights(base: BaseModel) -> int:
    """Count the weights of the decoder's linear layers that one token uses: in a mixture, only those of its experts."""
    linear = sum(
        module.in_features * module.out_features
        for name, module in base.backbone.named_modules()
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and ".experts." not in name
    )
    experts = sum(
        weight.numel()
        for name, weight in base.backbone.named_parameters()
        if ".experts." in name and "lora_" not in name and weight.dim() >= 2
    )
    config = base.model.config.get_text_config(decoder=True)
    total = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    used = _first(config, "num_experts_per_tok", "top_k_experts", "num_experts_per_token")
    return int(linear + experts * (used / total if used and total else 1.0))


def _first(config: Any, *names: str) -> int | None:
    """The first of these settings that the configuration has."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the device's peak operations per second: in bfloat16 on a known GPU its data sheet's, else measured."""
    on_gpu = device.type == "cuda" and dtype == torch.bfloat16
    if on_gpu and (known := known_peak(torch.cuda.get_device_name(device))) is not None:
        return known
    size = _PRODUCT_SIZE if device.type == "cpu" else 8 * _PRODUCT_SIZE
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(_NUM_PRODUCTS):
        started = time.perf_counter()
        float((a @ b)[0, 0])  # reading a number waits until the device is done
        times.append(time.perf_counter() - started)
    return float(2 * size**3 / min(times))


def known_peak(gpu: str) -> float | None:
    """Return the peak of a GPU from its data sheet, or `None`. The first entry whose words are in its name counts."""
    return next((peak for name, peak in _GPU_PEAKS.items() if re.search(rf"\b{name}\b", gpu)), None)
