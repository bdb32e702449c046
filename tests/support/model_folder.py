"""Where a model keeps its log, as programs find it that know nothing but its data directory."""

from __future__ import annotations

from pathlib import Path

import art
from art.storage.layout import DataDir, ModelPaths


def paths_of(model: art.Model) -> ModelPaths:
    return DataDir(Path(model.base_path)).model(model.project, model.name)
