"""The scale of an adapter for programs that know no rsLoRA."""

from __future__ import annotations

import json
import math
from pathlib import Path


def write_plain_scale(file: Path) -> None:
    """Write the scale of a rsLoRA into an `adapter_config.json` as an alpha that is divided by the rank."""
    config = json.loads(file.read_bytes())
    if config.get("use_rslora"):
        config |= {"lora_alpha": config["lora_alpha"] * math.sqrt(config["r"]), "use_rslora": False}
        file.write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
