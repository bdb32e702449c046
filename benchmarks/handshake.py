"""How far correct pairs of trainer and engine are apart, by depth and dtype: the ground of the handshake's bounds.

    python -m benchmarks handshake --json handshake.json

The models are random ones of the Qwen3 and Llama architecture, with small to exaggerated logits.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch

from art.config import EngineConfig, LoraConfig, TrainerConfig
from art.engines.torch.embedded import TorchEngine
from art.runtime.publish import largest_gap, rms_gap
from art.storage import checkpoints
from art.trainer.trainer import Trainer
from benchmarks.in_process import InProcessEngine
from benchmarks.report import Cell, Result

CASES = {
    "bfloat16": [("qwen3", 12, 0.02), ("qwen3", 36, 0.02), ("qwen3", 36, 0.06), ("llama", 36, 0.06)],
    "float32": [("qwen3", 36, 0.02), ("qwen3", 36, 0.06)],
}
"""The models of each dtype: architecture, number of layers, and `initializer_range`, which sets the size of logits."""
VOCAB, HIDDEN, HEAD_DIM = 4096, 256, 64


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    rows = []
    for dtype, shapes in CASES.items():
        for family, layers, init in shapes[:1] if args.quick else shapes:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(asyncio.run(_measure(Path(folder), family, 2 if args.quick else layers, init, dtype)))
    return Result(
        summary="Gaps of log-probs between trainer and embedded engine, in nats (root mean squares over 63 tokens).",
        rows=rows,
        notes=[
            "`loud`: gap under a loud test adapter by its effect, worst kind of layer; 1 if the engine ignores it.",
            "`loud / base`: that gap by the gap of the base model.",
            "`another`: gap to a base model of another seed.",
        ],
    )


async def _measure(folder: Path, family: str, num_layers: int, init: float, dtype: str) -> dict[str, Cell]:
    settings: dict[str, Any] = {"device": "cpu", "dtype": dtype, "num_threads": 1}
    paths = [_save(folder / str(seed), family, num_layers, init, seed) for seed in range(2)]
    Trainer(str(paths[0]), TrainerConfig(**settings)).write_loud_adapters(folder / "loud", LoraConfig(rank=8))
    engine, other = (
        InProcessEngine(TorchEngine.load(str(path), EngineConfig(**settings, kv_cache_tokens=1024))) for path in paths
    )
    worst, times = 0.0, 0.0
    for path in (folder / "loud").iterdir():
        probe = checkpoints.read_probe(path)
        base = await engine.score(probe.token_ids, None)
        await engine.load_adapter("loud", path)
        gap = rms_gap(await engine.score(probe.token_ids, "loud"), probe.logprobs)
        await engine.unload_adapter("loud")
        noise = rms_gap(base, probe.base_logprobs)
        worst, times = max(worst, gap / rms_gap(probe.logprobs, probe.base_logprobs)), max(times, gap / noise)
    single = largest_gap(base, probe.base_logprobs)
    another = rms_gap(await other.score(probe.token_ids, None), probe.base_logprobs)
    return {
        "model": family, "layers": num_layers, "init": init, "dtype": dtype, "base": f"{noise:.2g}",
        "base, one token": f"{single:.2g}", "loud / base": f"{times:.1f}", "loud": f"{worst:.1g}",
        "another": f"{another:.2g}",
    }  # fmt: skip


def _save(folder: Path, family: str, num_layers: int, init: float, seed: int) -> Path:
    import transformers

    kinds: dict[str, Any] = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}
    config = kinds[family](
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=num_layers,
        num_attention_heads=HIDDEN // HEAD_DIM, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=init, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        head_dim=HEAD_DIM,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
