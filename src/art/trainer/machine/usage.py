"""How well a step used its device: the arithmetic that it needs, and the device's peak speed."""

from __future__ import annotations

import functools
import re
import time
from typing import Any

import torch

from art.kernels.layer_kinds import head_dims
from art.trainer.policy.base_model import BaseModel
from art.trainer.policy.policy import Policy
from art.trainer.step.step_metrics import StepRecord

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
