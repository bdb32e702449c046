"""The language-model head in bfloat16: its errors against float64, its time, and how near it is to the sampler.

One table compares ways to compute log-probs from bfloat16 hidden states and a bfloat16 head, and the gradient of each:

    float32     both converted to float32 first
    bfloat16    the trainer's way: bfloat16 products, float32 sums (on CPU: the same numbers, multiplied in float32)
    rounded     logits are rounded to bfloat16, as transformers does, and vLLM unless its `head_dtype` is float32

The other rows are pairs of a sampler and a trainer whose hidden states differ by noise, as those of two correct
bfloat16 implementations do: the root mean square and the largest difference of a sampled token's log-prob, in nats. The
noise is scaled so that the pair of float32 heads differs by 0.03 nats.

    python -m benchmarks head --quick
    python -m benchmarks head --head-targets 256
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from art.trainer.logprobs import Head, TargetRows, target_logprobs
from benchmarks.report import Cell, Result
from benchmarks.timing import alternate, main_clock, median, ratio

_SHAPE, _QUICK_SHAPE = (151_936, 2560), (8192, 256)
_PAIR_NATS = 0.03
_BLOCK = 32
"""Rows of float64 logits at a time."""


@dataclass(frozen=True, slots=True)
class Work:
    hidden: Tensor  # [N, H] bfloat16
    weight: Tensor  # [V, H] bfloat16
    token_ids: Tensor  # [N]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--head-targets", type=int, help="log-probs to compute (default: 128)")


def run(args: argparse.Namespace) -> Result:
    num_targets = args.head_targets or (32 if args.quick else 128)
    vocab_size, hidden_size = _QUICK_SHAPE if args.quick else _SHAPE
    torch.set_num_threads(1)
    work = make_work(num_targets, vocab_size, hidden_size, args.device)
    weights = {"float32": work.weight.float(), "bfloat16": work.weight}
    contenders = {name: _timed(work, weight) for name, weight in weights.items()}
    timings = alternate(contenders, repeats=args.repeats, device=args.device, label="head")
    exact = _exact(work)
    rows: list[dict[str, Cell]] = []
    for name, weight in weights.items():
        rows.append(
            {
                "way": name,
                **_errors(work, weight, exact),
                "us per log-prob": 1e6 * median(timings[name], main_clock(args.device)) / num_targets,
                "time ratio": ratio(timings["float32"], timings[name], main_clock(args.device)),
            }
        )
    rows.append({"way": "rounded", **_differences(exact[0], _logprobs(work.hidden, work, is_rounded=True))})
    return Result(
        summary=f"{num_targets} log-probs with the gradients of log-probs and entropies, a vocabulary of "
        f"{vocab_size:,} and a hidden size of {hidden_size:,}, on {args.device}.",
        rows=[dict.fromkeys(rows[0], "") | row for row in rows + _pairs(work)],
        notes=[
            "rms, max: of a log-prob in nats, against float64, or between the two of a pair",
            "gradient, entropy gradient: |g - g'| / |g'| over all rows, g' in float64; cosine: 1 - cos(g, g')",
            "time ratio: of float32 by this way; on a CPU bfloat16 is multiplied as float32, so it cannot gain there",
        ],
    )


def make_work(count: int, vocab_size: int, hidden_size: int, device: str) -> Work:
    """Distributions from flat to certain, with tokens drawn from them."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5).bfloat16().to(device)
    likely = torch.randint(0, vocab_size, (count,), generator=generator).to(device)
    peak = torch.linspace(5, 20, count, device=device)[:, None]
    noise = torch.randn(count, hidden_size, generator=generator).to(device)
    hidden = (noise + peak * weight[likely].float()).bfloat16()
    head = weight.float().T
    drawn = [torch.multinomial((part.float() @ head).softmax(-1), 1) for part in hidden.split(_BLOCK)]
    return Work(hidden, weight, torch.cat(drawn)[:, 0])


def _rows(work: Work) -> TargetRows:
    index = torch.arange(len(work.token_ids), device=work.hidden.device)
    return TargetRows(
        queries=index, temperatures=torch.ones(len(index), device=index.device), order=index, rows=index,
        token_ids=work.token_ids, starts=list(range(len(index) + 1)),
    )  # fmt: skip


def _timed(work: Work, weight: Tensor) -> Callable[[int], object]:
    leaf = work.hidden.clone().to(weight.dtype).requires_grad_()
    rows = _rows(work)

    def once(_: int) -> object:
        target_logprobs(leaf, Head(weight, None), rows)[0].sum().backward()
        return None

    return once


def _errors(work: Work, weight: Tensor, exact: tuple[Tensor, Tensor, Tensor]) -> dict[str, Cell]:
    leaf = work.hidden.clone().to(weight.dtype).requires_grad_()
    logprobs, entropy = target_logprobs(leaf, Head(weight, None), _rows(work), entropy_gradient=True)
    gradient, of_entropy = (
        torch.autograd.grad(value.sum(), leaf, retain_graph=True)[0].double() for value in (logprobs, entropy)
    )
    expected, right, right_of_entropy = exact
    return {
        **_differences(expected, logprobs.detach()),
        "gradient": float((gradient - right).norm() / right.norm()),
        "cosine": float(1 - torch.nn.functional.cosine_similarity(gradient.flatten(), right.flatten(), dim=0)),
        "entropy gradient": float((of_entropy - right_of_entropy).norm() / right_of_entropy.norm()),
    }


def _exact(work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [N], and the gradients [N, H] of log-probs and entropies, in float64."""
    weight, parts = work.weight.double(), []
    for hidden, token_ids in zip(work.hidden.double().split(_BLOCK), work.token_ids.split(_BLOCK), strict=True):
        p = (hidden @ weight.T).log_softmax(-1)
        logprobs = p.gather(1, token_ids[:, None])[:, 0]
        entropy = -(p.exp() * p).sum(-1, keepdim=True)
        gradient = weight[token_ids] - p.exp() @ weight
        parts.append((logprobs, gradient, -(p.exp() * (p + entropy)) @ weight))
    logprobs, gradient, of_entropy = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, gradient, of_entropy


def _logprobs(hidden: Tensor, work: Work, *, is_rounded: bool) -> Tensor:
    """Log-probs [N] from logits in float64, or rounded to bfloat16 and then normalised in float64."""
    found = []
    for part, token_ids in zip(hidden.double().split(_BLOCK), work.token_ids.split(_BLOCK), strict=True):
        logits = part @ work.weight.double().T
        if is_rounded:
            logits = logits.bfloat16().double()
        found.append(logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0])
    return torch.cat(found)


def _pairs(work: Work) -> list[dict[str, Cell]]:
    """Differences between trainers and samplers whose hidden states are not quite the same."""
    noise = torch.randn(work.hidden.shape, generator=torch.Generator().manual_seed(1)).to(work.hidden.device)
    hidden = work.hidden.float()

    def sampler(scale: float, *, is_rounded: bool) -> Tensor:
        return _logprobs((hidden + scale * noise).bfloat16(), work, is_rounded=is_rounded)

    trainers = {name: _logprobs(work.hidden, work, is_rounded=name == "rounded") for name in ("float32", "rounded")}
    trial = 0.05
    scale = trial * _PAIR_NATS / float((sampler(trial, is_rounded=False) - trainers["float32"]).square().mean().sqrt())
    samplers = {name: sampler(scale, is_rounded=name == "rounded") for name in ("float32", "rounded")}
    return [
        {"way": f"sampler {sampler_name}, trainer {name}", **_differences(sampled, trained)}
        for sampler_name, sampled in samplers.items()
        for name, trained in trainers.items()
    ]


def _differences(one: Tensor, other: Tensor) -> dict[str, Cell]:
    difference = (one.double() - other.double()).abs()
    return {"rms": float(difference.square().mean().sqrt()), "max": float(difference.max())}
