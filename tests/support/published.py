"""Small checkpoints that pass the handshake of a fake engine, whose policy is a hash of the adapter's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from art.engine import EngineInfo
from art.errors import NotFoundError
from art.storage import checkpoints
from tests.support.fake_engine import FakeEngine

PROBE_TOKENS = [3, 14, 15, 92, 65, 35, 89]


def adapter_files(seed: int) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {
        name.format("A"): rng.normal(size=(2, 8)).astype(np.float32),
        name.format("B"): rng.normal(size=(8, 2)).astype(np.float32),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    return {checkpoints.ADAPTER_WEIGHTS: save(weights), checkpoints.ADAPTER_CONFIG: json.dumps(config).encode()}


async def make_checkpoint(path: Path, *, adapter: int, probe_of: int | None = None, norm: float | None = None) -> Path:
    """A checkpoint with adapter `adapter` whose probe was measured on adapter `probe_of` (by default the same)."""
    scratch = path.parent / f"scratch-{path.name}"
    scratch.mkdir(parents=True)
    for name, data in adapter_files(adapter if probe_of is None else probe_of).items():
        (scratch / name).write_bytes(data)
    engine = FakeEngine()
    await engine.load_adapter("trained", scratch)
    probe = checkpoints.Probe(
        token_ids=PROBE_TOKENS,
        logprobs=await engine.score(PROBE_TOKENS, "trained"),
        base_logprobs=await engine.score(PROBE_TOKENS, None),
    )
    state = checkpoints.CheckpointState(
        step=1,
        job_id="job",
        base_model="fake",
        lora={},
        config={},
        num_updates=1,
        rng="",
        metrics={} if norm is None else {"loss/adapter_norm": norm},
    )
    files = adapter_files(adapter) | {
        checkpoints.OPTIMIZER: save({}),
        checkpoints.STATE: state.model_dump_json().encode(),
        checkpoints.PROBE: probe.model_dump_json().encode(),
    }
    checkpoints.write_checkpoint(path, files)
    return path


class OnePolicyEngine(FakeEngine):
    """Without a base model beside the policy."""

    async def info(self) -> EngineInfo:
        return replace(await super().info(), one_policy=True)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        if adapter is None:
            raise NotFoundError("there is no base model", param="model")
        return await super().score(token_ids, adapter)
