"""The module from which older code imports helpers of supervised fine-tuning; they are in `art.compat.sft_chunks`."""

from art.compat.sft_chunks import (
    SFTChunk,
    create_lr_schedule,
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
    resolve_sft_batch_size,
    train_sft_from_file,
)

__all__ = [
    "SFTChunk",
    "create_lr_schedule",
    "create_sft_dataset_iterator",
    "get_file_row_count",
    "iterate_file",
    "resolve_sft_batch_size",
    "train_sft_from_file",
]
