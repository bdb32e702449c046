"""False alarms and power of the mismatch gate: which rollouts it masks, by their length, and which steps it stops.

Simulated steps of rollouts of one length go through the product's own gate:

    right    log-ratios of a correct pair: Gaussian noise, heavy tails (Student's t with 3 degrees of freedom) and noise
             that neighbouring tokens share, all of the same root mean square
    wrong    a sampler that is another policy. Tokens are drawn from its distributions over a vocabulary; those of the
             policy are other distributions over the same one. Both have the noise of a correct pair too
    real     the embedded engine samples from a random model of 12 layers, and the trainer scores its answers over
             prefix trees: correct pairs in float32 and bfloat16

    python -m benchmarks gate --json gate.json
    python -m benchmarks gate --quick
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from art.config import EngineConfig, MismatchConfig, TrainerConfig
from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.protocol.samples import plain_sample
from art.trainer.gate import Gate, GateVerdict, LogRatioSums, Noise
from art.trainer.policy.base_model import load_base_model, run_backbone
from art.trainer.step.micro_batch import split_micro_batches, target_logprobs_in_order
from art.trainer.tree import check_sample
from benchmarks.in_process import drain
from benchmarks.report import Cell, Result

Array = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]
"""Draws the log-ratios [R, n] of R rollouts of n tokens."""

LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
ROLLOUTS = (16, 128)
NOISE = {"float32": (1e-5,), "bfloat16": (0.032, 0.045)}
"""Noise of a correct pair in nats per token: measured with layers of a 4B model, and a KL of 0.001."""
STEPS = 8
_STEP_KL = 5e-4
"""KL divergence of one training step in the rows of stale samplers."""
_VOCAB = 1024


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gate-tokens", type=int, help="tokens to simulate per cell (default: 1,000,000)")


def run(args: argparse.Namespace) -> Result:
    tokens = args.gate_tokens or (20_000 if args.quick else 1_000_000)
    lengths = LENGTHS[:9:4] if args.quick else LENGTHS
    policies = Policies.make(32 if args.quick else 1024)
    rows = [_row(case, lengths, tokens) for case in (*right_pairs(), *wrong_samplers(policies))]
    with tempfile.TemporaryDirectory() as folder:
        shape = (2, 8, 16) if args.quick else (12, 64, 256)
        rows += [_real_row(Path(folder), dtype, lengths, shape) for dtype in NOISE]
    return Result(
        summary="Share of masked rollouts / share of stopped steps, in percent, by the tokens of a rollout.",
        rows=rows,
        notes=[
            f"each cell: at least 4 steps, and at least {tokens:,} tokens or 20,000 rollouts",
            "a step is stopped if more than half of its rollouts are masked, or if all together are shifted",
            "KL: mean of -log(policy / sampler) over sampled tokens, in nats; rms: root mean square of log(policy / "
            "sampler)",
            f"stale: each step changes the logits in the same direction, by a KL of {_STEP_KL} alone; wandering: each "
            "in a direction of its own",
            "top_p: the engine reports log-probs of the distribution that it drew from. If it reports those of the "
            "whole vocabulary, all ratios are 1 and no gate can see it",
            "where the rms is above 0.02 (float32) or 0.1 (bfloat16), the step has the finding `sampler_noise` as well",
            "real: shorter rollouts are parts of one long answer; -: there is no rollout of this length",
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    dtype: str
    rollouts: int
    draw: Draw
    drift: Draw | None = None
    """What training has changed since the rollouts were sampled; `None` for fresh rollouts."""


# -- correct pairs --


def right_pairs() -> Iterator[Case]:
    for dtype, levels in NOISE.items():
        for rms in levels:
            for name, noise in (("Gaussian", _gaussian), ("heavy tails", _heavy), ("shared errors", _shared)):
                for rollouts in ROLLOUTS:
                    title = f"right: {name}, rms {rms:g}"
                    yield Case(name=title, dtype=dtype, rollouts=rollouts, draw=_with_noise(noise, rms))


def _with_noise(noise: Draw, rms: float) -> Draw:
    """Noise of two distributions that differ by it: its mean is minus their KL divergence."""
    return lambda rng, shape: rms * noise(rng, shape) - rms**2 / 2


def _gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return rng.standard_normal(shape)


def _heavy(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return rng.standard_t(3, shape) / np.sqrt(3)


def _shared(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Each error is the mean of the last 3 draws, so that means of long rollouts scatter 1.7 times as much."""
    draws = rng.standard_normal((shape[0], shape[1] + 2))
    return (draws[:, :-2] + draws[:, 1:-1] + draws[:, 2:]) / np.sqrt(3)


# -- wrong samplers --


@dataclass(frozen=True, slots=True)
class Policies:
    """Distributions over a vocabulary at many positions, as natural text has them: few tokens are open."""

    logits: Array  # [P, V]
    directions: Array  # [8, P, V] changes of the logits, of which a step makes one

    @classmethod
    def make(cls, num_positions: int) -> Policies:
        rng = np.random.default_rng(0)
        sharpness = rng.gamma(2.0, 2.0, (num_positions, 1)) + 1.0  # positions differ in how sure the policy is
        hidden, head = rng.standard_normal((num_positions, 32)), rng.standard_normal((32, _VOCAB)) / np.sqrt(32)
        moves = rng.standard_normal((STEPS, 32, 32)) / np.sqrt(32)
        directions = np.stack([hidden @ move @ head for move in moves])
        return cls(sharpness * (hidden @ head), directions)

    def log_probs(self, change: Array | float = 0.0, temperature: float = 1.0) -> Array:
        scaled = torch.from_numpy((self.logits + change) / temperature)
        return torch.log_softmax(scaled, dim=-1).numpy()

    def moved(self, direction: Array, kl: float) -> Array:
        """`direction`, scaled so that the sampler's distribution is this far from the policy's, in nats per token."""
        policy, low, high = self.log_probs(), 0.0, 10.0
        for _ in range(25):
            middle = (low + high) / 2
            sampler = self.log_probs(middle * direction)
            found = float((np.exp(sampler) * (sampler - policy)).sum(-1).mean())
            low, high = (middle, high) if found < kl else (low, middle)
        return low * direction


def wrong_samplers(policies: Policies) -> Iterator[Case]:
    policy, one = policies.log_probs(), policies.directions[0]
    wandering = np.stack([policies.moved(each, _STEP_KL) for each in policies.directions]).sum(0)
    stale = {
        "stale by 1 step": policies.log_probs(policies.moved(one, _STEP_KL)),
        f"stale by {STEPS} steps": policies.log_probs(STEPS * policies.moved(one, _STEP_KL)),
        f"stale by {STEPS} steps, wandering": policies.log_probs(wandering),
    }
    drift = _of_sampler(_ratios(stale[f"stale by {STEPS} steps"], policy), _nothing)
    yield from _stale_cases(stale, policy)
    samplers: dict[str, Array] = {
        **{f"{name}, recorded as fresh": sampler for name, sampler in stale.items()},
        "adapter not applied, KL 0.3": policies.log_probs(policies.moved(one, 0.3)),
        **{f"temperature {t:g} recorded as 1": policies.log_probs(temperature=t) for t in (0.9, 1.1, 1.5)},
        "top_p 0.95 not recorded": _top_p(policy, 0.95),
    }
    for name, sampler in samplers.items():
        ratios = _ratios(sampler, policy)
        for dtype, levels in NOISE.items():
            for rollouts in ROLLOUTS:
                draw = _of_sampler(ratios, _with_noise(_gaussian, levels[-1]))
                yield Case(name=f"wrong: {name}", dtype=dtype, rollouts=rollouts, draw=draw)
                if "fresh" not in name and rollouts == ROLLOUTS[-1]:
                    title = f"wrong: {name}; stale by {STEPS} steps"
                    yield Case(name=title, dtype=dtype, rollouts=rollouts, draw=draw, drift=drift)
    unlikely = np.random.default_rng(1).permutation((policy - policy.max(-1, keepdims=True)).ravel())[:100_000]
    for dtype, levels in NOISE.items():
        draw = _one_wrong(unlikely, _with_noise(_gaussian, levels[-1]))
        yield Case(name="wrong: one token of each rollout", dtype=dtype, rollouts=ROLLOUTS[-1], draw=draw)


def _stale_cases(stale: dict[str, Array], policy: Array) -> Iterator[Case]:
    """Correct pairs whose rollouts are stale, and are recorded as such."""
    for name, sampler in stale.items():
        drift = _of_sampler(_ratios(sampler, policy), _nothing)
        for dtype, levels in NOISE.items():
            draw = _with_noise(_gaussian, levels[-1])
            yield Case(name=f"right: {name}", dtype=dtype, rollouts=ROLLOUTS[-1], draw=draw, drift=drift)


def _nothing(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.zeros(shape)


def _top_p(log_probs: Array, top_p: float) -> Array:
    """The distribution over the most likely tokens that together have `top_p`; -inf for the others."""
    order = np.argsort(-log_probs, axis=-1)
    ordered = np.take_along_axis(log_probs, order, -1)
    before = np.cumsum(np.exp(ordered), -1) - np.exp(ordered)
    kept = np.empty_like(log_probs)
    np.put_along_axis(kept, order, np.where(before < top_p, ordered, -np.inf), -1)
    return kept - np.log(np.exp(kept).sum(-1, keepdims=True))


def _ratios(sampler: Array, policy: Array) -> Array:
    """log policy - log sampler of tokens that `sampler` draws, many from each position, shuffled."""
    rng = np.random.default_rng(2)
    sums = np.cumsum(np.exp(sampler), -1)
    draws = rng.random((len(sampler), 64)) * sums[:, -1:]
    tokens = np.stack([np.searchsorted(row, drawn, side="right") for row, drawn in zip(sums, draws, strict=True)])
    return rng.permutation(np.take_along_axis(policy - sampler, tokens.clip(max=_VOCAB - 1), -1).ravel())


def _of_sampler(ratios: Array, noise: Draw) -> Draw:
    return lambda rng, shape: rng.choice(ratios, shape) + noise(rng, shape)


def _one_wrong(unlikely: Array, noise: Draw) -> Draw:
    """A correct pair, but one token of each rollout was exchanged for any other of the vocabulary."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
        log_ratio = noise(rng, shape)
        log_ratio[np.arange(shape[0]), rng.integers(shape[1], size=shape[0])] += rng.choice(unlikely, shape[0])
        return log_ratio

    return draw


# -- judging --


def _row(case: Case, lengths: tuple[int, ...], tokens: int) -> dict[str, Cell]:
    rng = np.random.default_rng(3)
    sample = case.draw(rng, (256, 200))
    row = _head(case.name, case.dtype, case.rollouts, sample)
    for length in lengths:
        num_steps = max(4, min(tokens // length, 20_000) // case.rollouts)
        shape = (case.rollouts, length)
        steps = ((case.draw(rng, shape), case.drift and case.drift(rng, shape)) for _ in range(num_steps))
        row[_tokens(length)] = _judge_all(steps, case.dtype)
    return row


def _head(name: str, dtype: str, rollouts: int, log_ratio: Array) -> dict[str, Cell]:
    kl, rms = float(-log_ratio.mean()), float(np.sqrt((log_ratio**2).mean()))
    return {"sampler": name, "number type": dtype, "rollouts": rollouts, "KL": f"{kl:.2g}", "rms": f"{rms:.2g}"}


def _tokens(length: int) -> str:
    return f"{length:,} token" + ("s" if length > 1 else "")


def _judge_all(steps: Iterator[tuple[Array, Array | None]], dtype: str) -> str:
    verdicts = [judge(log_ratio, dtype, drift) for log_ratio, drift in steps]
    masked = sum(v.num_masked for v in verdicts) / sum(v.num_judged for v in verdicts)
    shares = [(v.num_masked + v.num_suspected) / v.num_judged for v in verdicts]
    stopped = sum(v.is_shifted or s > MismatchConfig().abort for v, s in zip(verdicts, shares, strict=True))
    return f"{_percent(masked)} / {_percent(stopped / len(verdicts))}"


def judge(log_ratio: Array, dtype: str, drift: Array | None = None) -> GateVerdict:
    """The verdict of the product's gate on R rollouts with the log-ratios [R, n].

    `drift`: what training has added to them since; every 16th rollout, and at least 8, are compared without it.
    """
    noise = Noise(trainer=dtype, engine=dtype)
    num, length = log_ratio.shape
    names, rollouts = {str(index): index for index in range(num)}, np.repeat(np.arange(num), length)
    stale, checked = np.full(num, drift is not None), np.zeros(num, dtype=np.bool_)
    if drift is not None:
        checked[: max(8, num // 16)] = True
        log_ratio = np.where(checked[:, None], log_ratio, log_ratio + drift)
    gate = Gate(MismatchConfig(), noise, names, stale, checked)
    return gate.judge(LogRatioSums.collect(log_ratio.ravel(), rollouts, num, limit=gate.limit))


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.995 else "100"


# -- a real pair --


def _real_row(folder: Path, dtype: str, lengths: tuple[int, ...], shape: tuple[int, int, int]) -> dict[str, Cell]:
    log_ratio = measure_pair(folder / "model", dtype, *shape)
    row = _head(f"real: engine and trainer, {shape[0]} layers", dtype, len(log_ratio), log_ratio)
    for length in lengths:
        parts = log_ratio.shape[1] // length
        cut = log_ratio[:, : parts * length].reshape(-1, length) if parts else None
        row[_tokens(length)] = "-" if cut is None else _judge_all(iter([(cut, None)]), dtype)
    return row


def measure_pair(model: Path, dtype: str, num_layers: int, num_answers: int, num_tokens: int) -> Array:
    """Sample answers with the embedded engine and score them with the trainer, in `dtype`; [answers, tokens]."""
    if not model.exists():
        write_model(model, num_layers)
    config = EngineConfig.model_validate({"device": "cpu", "dtype": dtype, "max_context": 1024, "num_threads": 1})
    engine = TorchEngine.load(str(model), config)
    prompts = [[(37 * i // 4 + 11 * j) % _VOCAB for j in range(24)] for i in range(num_answers)]  # groups of 4
    for i, prompt in enumerate(prompts):
        engine.submit(
            GenerateRequest(
                request_id=str(i),
                adapter=None,
                prompt_token_ids=prompt,
                max_tokens=num_tokens,
                stop_token_ids=(),
                seed=i,
            ),
            stream=False,
        )
    answers: dict[str, tuple[list[int], list[float]]] = {str(i): ([], []) for i in range(num_answers)}
    for output in drain(engine):
        assert output.chunk is not None
        answers[output.request_id][0].extend(output.chunk.token_ids)
        answers[output.request_id][1].extend(output.chunk.logprobs)
    base = load_base_model(str(model), TrainerConfig(device="cpu", dtype=dtype, num_threads=1))
    samples = [plain_sample(prompt + answers[str(i)][0], str(i)) for i, prompt in enumerate(prompts)]
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=base.vocab_size))]
    scored = np.zeros((num_answers, num_tokens))
    with torch.no_grad():
        for micro_batch in split_micro_batches(paths, base, max_tokens=2048):
            logprobs = target_logprobs_in_order(micro_batch, base, lambda layout: run_backbone(base, layout))
            ends = np.cumsum([len(path.query_positions) for path in micro_batch.paths])
            for path, part in zip(micro_batch.paths, np.split(logprobs, ends[:-1]), strict=True):
                scored[int(path.sample.sample_id)] = part[-num_tokens:]
    return scored - np.asarray([answers[str(i)][1] for i in range(num_answers)])


def write_model(folder: Path, num_layers: int) -> None:
    """A random model whose answers are about as sure of themselves as natural text is."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=_VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
        initializer_range=0.06, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.5)  # logits of a standard deviation of 3.4
    model.save_pretrained(folder)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["gate", *sys.argv[1:]])
