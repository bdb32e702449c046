"""What a key may be used for."""

from __future__ import annotations

from typing import Literal

KeyScope = Literal["infer", "train", "admin"]
"""`infer`: sample from models and read what was recorded. `train`: register models, train them, manage their
checkpoints. `admin`: all of it, and what touches the machine: devices, paths, addresses and flags of engines."""
