"""Which tasks of a folder are for training: by a hash of the name, also in small folders."""

from __future__ import annotations

from collections.abc import Iterable

from art.task import Split, derive_seed

FEWEST_BY_HASH = 30
"""Number of tasks from which the last digit of the hash alone decides, so that further tasks move none."""
_TENTHS: dict[int, Split] = {8: "val", 9: "test"}


def split_names(names: Iterable[str]) -> dict[Split, list[str]]:
    """Divide names into splits, eight tenths for training. Each name is in one.

    With fewer than 30 names, the one with the lowest hash is the test split and the next one the validation split (each
    one tenth, at least one). Two names are for training and test; a single name is for training.
    """
    ordered = sorted(names, key=lambda name: (derive_seed(name), name))
    splits: dict[Split, list[str]] = {"train": [], "val": [], "test": []}
    if len(ordered) >= FEWEST_BY_HASH:
        for name in sorted(ordered):
            splits[_TENTHS.get(derive_seed(name) % 10, "train")].append(name)
        return splits
    num_test = max(len(ordered) // 10, 1) if len(ordered) > 1 else 0
    num_val = num_test if len(ordered) > 2 else 0
    splits["test"], splits["val"] = ordered[:num_test], ordered[num_test : num_test + num_val]
    splits["train"] = sorted(ordered[num_test + num_val :])
    return splits
