"""Tokens per second of the embedded engine against transformers' `generate`.

Both sample from the same model with the same LoRA adapter active (peft for transformers), 64 new tokens behind prompts
of 200 tokens, for 1, 16 and 64 requests at once. Times are end to end, prompts included, in this process with one
thread. All prompts have the same length and no two are alike, which suits `generate` best: it needs no padding, and
the engine shares nothing. The last row of a model is what reinforcement learning asks for, 8 samples of each prompt.
The engine also returns the log-prob of every token, `generate` does not.

    python -m benchmarks generation --repeats 5           the small model
    python -m benchmarks generation --models 30M          another size
    python -m benchmarks generation --device cuda         bfloat16 on a GPU
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from art.config import EngineConfig
from art.engine import GenerateRequest
from art.engines.torch.engine import Output, TorchEngine
from benchmarks.models import QUICK_MODELS, ModelFiles, choose_dtype, load_peft_model, model_files
from benchmarks.report import Cell, Result
from benchmarks.timing import alternate, main_clock, median, ratio

MODELS = ["1.2 M"]
PROMPT_TOKENS = 200
NEW_TOKENS = 64
LOADS = [(1, 1), (16, 1), (64, 1), (8, 8)]
"""(different prompts, samples of each) that are asked for at once."""

_MIN_REQUESTS = 4
"""Fewer requests at once are repeated, one after the other, until they are so many: a time that is worth measuring."""

_ADAPTER = "benchmark@1"

Prompts = list[list[int]]


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    dtype = choose_dtype(args)
    rows: list[dict[str, Cell]] = []
    gaps = []
    for name in args.models or (QUICK_MODELS if args.quick else MODELS):
        with model_files(name, args.device) as files:
            engine, model = load_engine(files, args.device, dtype), _load_generate(files, args.device, dtype)
            gaps.append(f"{name}: {_largest_gap(engine, model, files):.1e}")
            rows += [_compare(engine, model, files, load, args) for load in LOADS]
    return Result(
        summary=f"End to end in {dtype} on {args.device}: {PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new, with LoRA.",
        rows=rows,
        notes=[
            "ratio: time of `generate` by time of the engine, above 1 the engine is faster",
            f"largest difference of a token's log-prob between the two, in nats: {', '.join(gaps)}",
        ],
    )


def load_engine(files: ModelFiles, device: str, dtype: str) -> TorchEngine:
    config = EngineConfig.model_validate({"device": device, "dtype": dtype, "max_context": 512, "num_threads": 1})
    engine = TorchEngine.load(str(files.base), config)
    engine.load_adapter(_ADAPTER, files.adapter)
    return engine


def _load_generate(files: ModelFiles, device: str, dtype: str) -> Any:
    model = load_peft_model(files, device=device, dtype=dtype, is_trainable=False)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, pad_token_id=0
    )
    return model


def _compare(
    engine: TorchEngine, model: Any, files: ModelFiles, load: tuple[int, int], args: argparse.Namespace
) -> dict[str, Cell]:
    num_prompts, num_samples = load
    at_once = num_prompts * num_samples
    times = max(1, _MIN_REQUESTS // at_once)

    def run_engine(number: int) -> None:
        for prompts in _prompts(files, load, number, times):
            _run_engine(engine, prompts)

    def run_generate(number: int) -> None:
        for prompts in _prompts(files, load, number, times):
            _run_generate(model, prompts, args.device)

    contenders = {"engine": run_engine, "generate": run_generate}
    label = f"{files.name}, {at_once} requests"
    timings = alternate(contenders, repeats=args.repeats, device=args.device, label=label)
    tokens = at_once * times * NEW_TOKENS
    clock = main_clock(args.device)
    second = "s" if clock == "wall_s" else "CPU s"
    return {
        "model": files.name,
        "requests at once": f"{at_once}" if num_samples == 1 else f"{at_once} ({num_prompts} prompts)",
        f"engine, tokens/{second}": round(tokens / median(timings["engine"], clock)),
        f"generate, tokens/{second}": round(tokens / median(timings["generate"], clock)),
        "ratio, CPU time": ratio(timings["generate"], timings["engine"], "cpu_s"),
        "ratio, wall time": ratio(timings["generate"], timings["engine"], "wall_s"),
    }


def _prompts(files: ModelFiles, load: tuple[int, int], number: int, times: int) -> Iterator[Prompts]:
    """New ones in each round, the same for all contenders: the engine would find older ones in its cache."""
    rng = random.Random(f"{load} {number}")
    for _ in range(times):
        different = [[rng.randrange(files.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(load[0])]
        yield [prompt for prompt in different for _ in range(load[1])]


def _run_engine(engine: TorchEngine, prompts: Prompts) -> None:
    for i, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=str(i),
            adapter=_ADAPTER,
            prompt_token_ids=prompt,
            max_tokens=NEW_TOKENS,
            stop_token_ids=(),
            seed=i,
        )
        engine.submit(request, stream=False)
    sampled = sum(len(output.chunk.token_ids) for output in _drain(engine) if output.chunk is not None)
    assert sampled == len(prompts) * NEW_TOKENS


def _run_generate(model: Any, prompts: Prompts, device: str) -> None:
    ids = torch.tensor(prompts, device=device)
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert output.shape == (len(prompts), PROMPT_TOKENS + NEW_TOKENS)


def _drain(engine: TorchEngine) -> Iterator[Output]:
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            yield output


def _largest_gap(engine: TorchEngine, model: Any, files: ModelFiles) -> float:
    """Of the log-probs of one sequence, in nats: the two must compute the same."""
    (sequence,) = next(_prompts(files, (1, 1), -1, 1))
    engine.submit_score("score", sequence, _ADAPTER)
    (output,) = _drain(engine)
    assert output.logprobs is not None
    ids = torch.tensor([sequence], device=model.device)
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float((torch.tensor(output.logprobs) - logprobs.cpu()).abs().max())
