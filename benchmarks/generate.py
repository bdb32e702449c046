"""Tokens per second of the embedded engine, transformers' `generate` and vLLM.

All sample from the same model, 64 new tokens behind prompts of 200 tokens (a large model on a CPU may be given less of
both), for 1, 16 and 64 requests at once. Times are
end to end, prompts included, with one thread. All prompts have the same length and no two are alike, which suits
`generate` best: it needs no padding, and nobody can share anything. The last load of a model is what reinforcement
learning asks for, 8 samples of each prompt. Engine and vLLM also return the log-prob of every token, `generate` does
not. With a LoRA adapter active (peft for transformers), and for the engine and vLLM once more without one.

vLLM takes part if it is installed, or if ART_VLLM_PYTHON names an interpreter that has it. It is a server that is asked
over HTTP, as ART does it; its processes compute beside each other, so that its wall time may be below its CPU time.

    python -m benchmarks generate --repeats 5             the small model
    python -m benchmarks generate --models 30M            another size
    python -m benchmarks generate --models "0.6 B" --rivals vLLM           fewer at a time, where memory is short
    python -m benchmarks generate --device cuda           bfloat16 on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers

from art.config import EngineConfig, VllmConfig
from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.engines.vllm.command import installed_vllm_python
from benchmarks.in_process import drain
from benchmarks.models import LORA, QUICK_MODELS, ModelFiles, choose_dtype, load_peft_model, model_files
from benchmarks.report import Cell, Result, middle
from benchmarks.timing import alternate, main_clock, median, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ["1.2 M"]
PROMPT_TOKENS = 200
NEW_TOKENS = 64
LOADS = [(1, 1), (16, 1), (64, 1), (8, 8)]
"""(different prompts, samples of each) that are asked for at once."""

_MIN_REQUESTS = 4
"""Fewer requests at once are repeated, one after the other, until they are so many: a time that is worth measuring."""

_MAX_CONTEXT = 512
_ADAPTER = "benchmark@1"
_ENGINE, _GENERATE, _VLLM = "ART", "generate + peft", "vLLM"
_ENGINE_BASE, _VLLM_BASE = "ART, no adapter", "vLLM, no adapter"
_RIVALS = {_GENERATE: _ENGINE, _VLLM: _ENGINE, _VLLM_BASE: _ENGINE_BASE}
"""What each is compared with: the engine at the same work."""
_COLORS = {
    _ENGINE: "tab:green",
    _ENGINE_BASE: "lightgreen",
    _GENERATE: "tab:blue",
    _VLLM: "tab:orange",
    _VLLM_BASE: "navajowhite",
}

Prompts = list[list[int]]
Contender = Callable[[Prompts, int], None]
"""Prompts, and how many tokens to sample behind each."""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loads", type=_loads, default=LOADS, metavar="1,16,8x8", help="requests at once (default: all)"
    )
    group.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help=f"(default: {PROMPT_TOKENS})")
    group.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help=f"(default: {NEW_TOKENS})")
    group.add_argument(
        "--rivals", type=_rivals, default=list(_RIVALS), metavar="NAMES",
        help=f"who takes part beside ART, separated by ';' of {'; '.join(_RIVALS)} (default: all)",
    )  # fmt: skip


def _loads(text: str) -> list[tuple[int, int]]:
    try:
        parts = [tuple(map(int, word.split("x"))) for word in text.split(",")]
        return [(part[0], part[1] if len(part) > 1 else 1) for part in parts]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like '1,16,8x8'") from None


def _rivals(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    if unknown := [name for name in names if name not in _RIVALS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {'; '.join(_RIVALS)}")
    return names


def run(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    dtype = choose_dtype(args)
    rows: list[dict[str, Cell]] = []
    gaps = []
    for name in args.models or (QUICK_MODELS if args.quick else MODELS):
        with model_files(name, args.device) as files, ExitStack() as stack:
            engine = load_engine(files, args.device, dtype)
            ours: dict[str, Contender] = {
                _ENGINE: partial(_run_engine, engine, adapter=_ADAPTER),
                _ENGINE_BASE: partial(_run_engine, engine, adapter=None),
            }
            contenders = {mine: ours[mine] for mine in ours if mine in {_RIVALS[rival] for rival in args.rivals}}
            if _GENERATE in args.rivals:
                model = _load_generate(files, args.device, dtype)
                gaps.append(f"{name}: {_largest_gap(engine, model, files):.1e}")
                contenders[_GENERATE] = partial(_run_generate, model, device=args.device)
            if (python := installed_vllm_python()) is not None:
                for rival, adapter in ((_VLLM, _ADAPTER), (_VLLM_BASE, None)):
                    if rival in args.rivals:
                        contenders[rival] = stack.enter_context(_vllm(files, args.device, dtype, python, adapter))
            for load in args.loads:
                rows += _compare(contenders, files, load, args)
    return Result(
        summary=f"End to end in {dtype} on {args.device}: {args.prompt_tokens} prompt tokens, {args.new_tokens} new, "
        "one thread.",
        rows=rows,
        notes=[
            "ratio: time by that of ART at the same work, round by round; above 1 ART is faster",
            "CPU: of all processes that take part",
            *[f"difference of a token's log-prob between ART and transformers at most, in nats: {gap}" for gap in gaps],
            *([] if installed_vllm_python() else ["vLLM is not installed: it did not take part"]),
        ],
        clock="wall" if main_clock(args.device) == "wall_s" else "CPU",
    )


def load_engine(files: ModelFiles, device: str, dtype: str) -> TorchEngine:
    config = {"device": device, "dtype": dtype, "max_context": _MAX_CONTEXT, "num_threads": 1}
    engine = TorchEngine.load(str(files.base), EngineConfig.model_validate(config))
    engine.load_adapter(_ADAPTER, files.adapter)
    return engine


def _load_generate(files: ModelFiles, device: str, dtype: str) -> Any:
    model = load_peft_model(files, device=device, dtype=dtype, is_trainable=False)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    return model


def _compare(
    contenders: dict[str, Contender], files: ModelFiles, load: tuple[int, int], args: argparse.Namespace
) -> list[dict[str, Cell]]:
    """One row for each contender."""
    num_prompts, num_samples = load
    at_once = num_prompts * num_samples
    times = max(1, _MIN_REQUESTS // at_once)

    def repeat(contender: Contender, number: int) -> None:
        for prompts in _prompts(files, load, number, times, args.prompt_tokens):
            contender(prompts, args.new_tokens)

    timings = alternate(
        {name: lambda number, run=run: repeat(run, number) for name, run in contenders.items()},  # type: ignore[misc]
        repeats=args.repeats,
        device=args.device,
        label=f"{files.name}, {at_once} requests",
    )
    tokens = at_once * times * args.new_tokens
    rows: list[dict[str, Cell]] = []
    for name, found in timings.items():
        ours = timings[_RIVALS.get(name, name)]
        rows.append(
            {
                "model": files.name,
                "requests at once": f"{at_once}" if num_samples == 1 else f"{at_once} ({num_prompts} prompts)",
                "engine": name,
                "tokens/s": _speed(tokens / median(found, "wall_s")),
                "tokens/CPU s": _speed(tokens / median(found, "cpu_s")),
                "ratio, wall": ratio(found, ours, "wall_s") if name in _RIVALS else 1,
                "ratio, CPU": ratio(found, ours, "cpu_s") if name in _RIVALS else 1,
            }
        )
    return rows


def _speed(tokens_per_s: float) -> float:
    return round(tokens_per_s) if tokens_per_s >= 100 else round(tokens_per_s, 1)


def _prompts(
    files: ModelFiles, load: tuple[int, int], number: int, times: int, prompt_tokens: int
) -> Iterator[Prompts]:
    """New ones in each round, the same for all contenders: an engine would find older ones in its cache."""
    rng = random.Random(f"{load} {number}")
    for _ in range(times):
        different = [[rng.randrange(files.vocab_size) for _ in range(prompt_tokens)] for _ in range(load[0])]
        yield [prompt for prompt in different for _ in range(load[1])]


def _requests(prompts: Prompts, new_tokens: int, adapter: str | None) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(i),
            adapter=adapter,
            prompt_token_ids=prompt,
            max_tokens=new_tokens,
            stop_token_ids=(),
            seed=i,
        )
        for i, prompt in enumerate(prompts)
    ]


def _run_engine(engine: TorchEngine, prompts: Prompts, new_tokens: int, *, adapter: str | None) -> None:
    for request in _requests(prompts, new_tokens, adapter):
        engine.submit(request, stream=False)
    sampled = sum(len(output.chunk.token_ids) for output in drain(engine) if output.chunk is not None)
    assert sampled == len(prompts) * new_tokens


def _run_generate(model: Any, prompts: Prompts, new_tokens: int, *, device: str) -> None:
    ids = torch.tensor(prompts, device=device)
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens)
    assert output.shape == (len(prompts), ids.shape[1] + new_tokens)


@contextmanager
def _vllm(files: ModelFiles, device: str, dtype: str, python: str, adapter: str | None) -> Iterator[Contender]:
    """A server of its own: one that has seen no adapter serves the base model without any of their cost."""
    from art.engines.vllm.start import start_engine

    settings = {"device": device, "dtype": dtype, "max_context": _MAX_CONTEXT, "max_running": 64, "num_threads": 1}
    with asyncio.Runner() as runner:
        engine, server = runner.run(
            start_engine(str(files.base), VllmConfig.model_validate(settings), lora_rank=LORA.rank, python=python)
        )
        assert server is not None

        async def complete(request: GenerateRequest) -> int:
            return sum([len(chunk.token_ids) async for chunk in engine.generate(request, stream=False)])

        async def sample(prompts: Prompts, new_tokens: int) -> None:
            sampled: Sequence[int] = await asyncio.gather(*map(complete, _requests(prompts, new_tokens, adapter)))
            assert sum(sampled) == len(prompts) * new_tokens

        try:
            if adapter is not None:
                runner.run(engine.load_adapter(adapter, files.adapter))
            yield lambda prompts, new_tokens: runner.run(sample(prompts, new_tokens))
        finally:
            runner.run(engine.close())
            runner.run(server.close())


def _largest_gap(engine: TorchEngine, model: Any, files: ModelFiles) -> float:
    """Of the log-probs of one sequence, in nats: the two must compute the same."""
    (sequence,) = next(_prompts(files, (1, 1), -1, 1, PROMPT_TOKENS))
    engine.submit_score("score", sequence, _ADAPTER)
    (output,) = drain(engine)
    assert output.logprobs is not None
    ids = torch.tensor([sequence], device=model.device)
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float((torch.tensor(output.logprobs) - logprobs.cpu()).abs().max())


def draw(result: Result) -> Figure:
    """Tokens per second by load, one panel for each model."""
    from matplotlib.figure import Figure

    speed = "tokens/s" if result.clock == "wall" else "tokens/CPU s"
    models = list(dict.fromkeys(str(row["model"]) for row in result.rows))
    figure = Figure(figsize=(5.5 * len(models), 3.8), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        rows = [row for row in result.rows if row["model"] == model]
        loads = list(dict.fromkeys(str(row["requests at once"]) for row in rows))
        engines = list(dict.fromkeys(str(row["engine"]) for row in rows))
        for number, engine in enumerate(engines):
            heights = [middle(row[speed]) for row in rows if row["engine"] == engine]
            places = [place + number / (len(engines) + 1) for place in range(len(loads))]
            axes.bar(places, heights, width=1 / (len(engines) + 1), label=engine, color=_COLORS[engine], align="edge")
        axes.set_xticks([place + 0.5 * len(engines) / (len(engines) + 1) for place in range(len(loads))], loads)
        axes.set(title=model, xlabel="requests at once", ylabel=speed)
    figure.axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["generate", *sys.argv[1:]])
