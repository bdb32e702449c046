"""What a custom loss is written with: `from art.losses import LossInputs, LossOutput`. See docs/objectives.md.

This module loads torch, so `import art` does not import it.
"""

from art.trainer.losses import (
    LossInputs,
    LossOutput,
    log_ratio,
    mean_per_sample,
    sum_per_sample,
    unclipped,
)

__all__ = ["LossInputs", "LossOutput", "log_ratio", "mean_per_sample", "sum_per_sample", "unclipped"]
