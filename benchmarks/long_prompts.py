"""Rollouts whose prompts are as long as those of coding agents: what the engine keeps, and what the trainer shares.

A group of rollouts begins with one system prompt of 32,000 tokens. Each takes some turns: an answer, and the result of
a tool. The model is random, so answers have their full length.

    python -m benchmarks long_prompts --json long_prompts.json
    python -m benchmarks long_prompts --models 1.2M --prompt-tokens 8000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import art
from art.config import EngineConfig, ModelSettings, TrainConfig
from art.testing.tiny_model import build_tiny_model
from benchmarks.models import SHAPES
from benchmarks.report import Result, Spread
from benchmarks.timing import progress

ANSWER_TOKENS, RESULT_WORDS = 64, 60


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt-tokens", type=int, help="of the system prompt (default: 32000, with --quick 2000)")
    group.add_argument("--rollouts", type=int, default=4, help="of the group (default: 4)")
    group.add_argument("--turns", type=int, default=3, help="of each rollout (default: 3)")


def run(args: argparse.Namespace) -> Result:
    name = args.models[0] if args.models else "0.1 M" if args.quick else "30 M"
    prompt_tokens = args.prompt_tokens or (2000 if args.quick else 32_000)
    with tempfile.TemporaryDirectory() as folder:
        base = build_random_model(Path(folder), name, 2 * prompt_tokens)
        first, seconds, metrics = asyncio.run(measure(Path(folder), base, prompt_tokens, args))
    computed, submitted = metrics["data/step_trainer_tokens"], metrics["data/step_tokens_unshared"]
    return Result(
        summary=f"A group of {args.rollouts} rollouts of {args.turns} turns after a prompt of {prompt_tokens} tokens, "
        f"random model of {name} weights.",
        rows=[
            {
                "first turn s": first, "later turns s": Spread.of(seconds), "tokens submitted": int(submitted),
                "tokens computed": int(computed), "ratio": submitted / computed, "step s": metrics["bench/step_s"],
                "share of later prompts in the cache": metrics["bench/cached_share"],
            }
        ],
        notes=["later turns: all but the very first one, those of other rollouts too, one after the other"],
        clock="wall",
    )  # fmt: skip


def build_random_model(folder: Path, name: str, context: int) -> Path:
    """A random model with the shape `name`, and the tokenizer of the tiny model."""
    import transformers

    base = build_tiny_model(folder / "model", warm_start_steps=0, context=context)
    tiny = transformers.AutoConfig.from_pretrained(base)
    shape = {**SHAPES[name], "vocab_size": tiny.vocab_size}
    config = transformers.Qwen3Config(
        **shape, max_position_embeddings=context, tie_word_embeddings=True, eos_token_id=tiny.eos_token_id,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(base)
    return base


async def measure(
    folder: Path, base: Path, prompt_tokens: int, args: argparse.Namespace
) -> tuple[float, list[float], dict[str, float]]:
    """Roll out a group and train it. Returns the seconds of the first turn and of the others, and metrics."""
    settings = ModelSettings(engine=EngineConfig(max_context=2 * prompt_tokens))
    seconds: list[float] = []
    cached = asked = 0
    async with art.LocalBackend(path=folder / "data", show_page=False) as backend:
        model = art.TrainableModel(name="agent", project="long", base_model=str(base), settings=settings)
        await model.register(backend)
        client, prompt = model.openai_client(), words(0, prompt_tokens // 3)
        trajectories = []
        with progress("turns", total=args.rollouts * args.turns + 1) as bar:
            for rollout in range(args.rollouts):
                opening: list[Any] = [{"role": "system", "content": prompt}, {"role": "user", "content": "begin"}]
                trajectory = art.Trajectory(messages_and_choices=opening, reward=float(rollout))
                for turn in range(args.turns):
                    started = time.monotonic()
                    completion = await client.chat.completions.create(
                        model=model.get_inference_name(), messages=trajectory.messages(), seed=100 * rollout + turn,
                        max_completion_tokens=ANSWER_TOKENS,
                    )  # fmt: skip
                    seconds.append(time.monotonic() - started)
                    usage = completion.usage
                    assert usage is not None
                    if len(seconds) > 1:
                        details = usage.prompt_tokens_details
                        cached += 0 if details is None else details.cached_tokens or 0
                        asked += usage.prompt_tokens
                    trajectory.messages_and_choices.append(completion.choices[0])
                    if turn + 1 < args.turns:
                        result_of_tool = {"role": "user", "content": words(turn + 1, RESULT_WORDS)}
                        trajectory.messages_and_choices.append(result_of_tool)  # type: ignore[arg-type]
                    bar.update()
                trajectories.append(trajectory)
            started = time.monotonic()
            result = await model.train([art.TrajectoryGroup(trajectories)], TrainConfig(learning_rate=1e-4))
            bar.update()
        step = {"bench/step_s": time.monotonic() - started, "bench/cached_share": cached / max(asked, 1)}
    return seconds[0], seconds[1:], dict(result.metrics) | step


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(("yes", "no", "maybe")) for _ in range(count))


if __name__ == "__main__":
    import sys

    from benchmarks.__main__ import main

    main(["long_prompts", *sys.argv[1:]])
