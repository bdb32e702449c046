"""The gate on stale rollouts of real training: the embedded engine samples, the trainer trains them some steps later.

A random model learns a task on which every step moves the policy: a token earns its share of the reward if it is in
one half of the vocabulary. Answers of the policy of step s are trained by step s + lag. Beside each honest step, the
same step is tried with answers of wrong samplers, and thrown away.

    python -m benchmarks gate_stale --json gate_stale.json
    python -m benchmarks gate_stale --quick
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from art.config import EngineConfig, LoraConfig, TrainConfig, TrainerConfig
from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.errors import TrainingError
from art.protocol.calls import Train
from art.protocol.samples import StepResult, TrainingSample
from art.trainer.trainer import Trainer
from benchmarks.gate import write_model
from benchmarks.in_process import drain
from benchmarks.report import Cell, Result

_WARM, _BARE, _CHANGED, _LATER = "temperature 1.5", "adapter not applied", "a changed token", "weights of a later step"
WRONG = (_WARM, _BARE, _CHANGED, _LATER)
GROUPS, SIZE, PROMPT = 8, 8, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How fast the policy moves."""

    name: str
    learning_rate: float
    num_minibatches: int


TRAININGS = (
    Training(name="3e-3, 4 mini-batches", learning_rate=3e-3, num_minibatches=4),
    Training(name="3e-3, 1 mini-batch", learning_rate=3e-3, num_minibatches=1),
    Training(name="3e-4, 4 mini-batches", learning_rate=3e-4, num_minibatches=4),
)


def run(args: argparse.Namespace) -> Result:
    lags, num_steps = ((1,), 2) if args.quick else ((1, 4), 4)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, 2)
        rows = list(stale_rows(model, lags=lags, num_steps=num_steps, tokens=32))
    return Result(
        summary="Steps that train rollouts of an older policy, in float32: what the gate masks, which steps it stops.",
        rows=rows,
        notes=[
            f"{GROUPS} groups of {SIZE} rollouts of 32 tokens; with 4 mini-batches the gate judges a quarter of them",
            "KL to the sampler: mean over the steps that were not stopped, in nats",
            f"{_LATER}: of the step after the one that the record names. {_BARE}: at the first of the steps this is "
            "right, since a fresh adapter changes nothing",
        ],
    )


def stale_rows(model: Path, *, lags: tuple[int, ...], num_steps: int, tokens: int) -> Iterator[dict[str, Cell]]:
    """Rows of the table: one per way of training, staleness and sampler."""
    for training in TRAININGS:
        for lag in lags:
            run = Run(model, model.parent / "run", training, lag, tokens)
            yield from run.rows(num_steps)
            shutil.rmtree(run.folder)


class Run:
    """One training run whose rollouts are `lag` steps old when they are trained."""

    def __init__(self, model: Path, folder: Path, training: Training, lag: int, tokens: int) -> None:
        self.folder, self.training, self.lag = folder, training, lag
        self._tokens = tokens
        self._config = TrainConfig(learning_rate=training.learning_rate, num_minibatches=training.num_minibatches)
        self._engine = TorchEngine.load(str(model), EngineConfig(device="cpu", max_context=1024, num_threads=1))
        self._trainer = Trainer(str(model), TrainerConfig(device="cpu", num_threads=1))
        self._trainer.init_checkpoint(self._path(0), LoraConfig(rank=8))

    def rows(self, num_steps: int) -> Iterator[dict[str, Cell]]:
        outcomes: dict[str, list[StepResult | TrainingError]] = {name: [] for name in ("honest", *WRONG)}
        batches: deque[list[TrainingSample]] = deque()
        for step in range(num_steps + self.lag):
            self._engine.load_adapter(str(step), self._path(step))
            batches.append(self._sample(step))
            if step < self.lag:  # the steps before the first stale one: trained on answers of their own
                self._train(step, batches[-1])
                continue
            samples = batches.popleft()
            for name in WRONG:
                wrong = self._sample(step - self.lag, name)
                outcomes[name].append(self._train(step, wrong, trial=True))
            outcomes["honest"].append(self._train(step, samples))
        for name, results in outcomes.items():
            yield self._row(name, results)

    def _row(self, name: str, results: list[StepResult | TrainingError]) -> dict[str, Cell]:
        done = [result.metrics for result in results if isinstance(result, StepResult)]
        stopped = len(results) - len(done)

        def mean(metric: str) -> str:
            values = [metrics[metric] for metrics in done if metric in metrics]
            return f"{np.mean(values):.2g}" if values else "-"

        masked = mean("offpolicy/mismatch_masked_share")
        return {
            "training": self.training.name,
            "staleness": self.lag,
            "sampler": name,
            "KL to the sampler": mean("offpolicy/first_update_kl"),
            "masked": masked if masked == "-" else f"{100 * float(masked):.2g} %",
            "steps stopped": f"{stopped} of {len(results)}",
        }

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:04d}"

    def _train(self, step: int, samples: list[TrainingSample], *, trial: bool = False) -> StepResult | TrainingError:
        """Make a step, or with `trial` try it. The result is the error if the gate stops the step."""
        target = self._path(step + 1).with_name("trial") if trial else self._path(step + 1)
        call = Train(
            samples=samples,
            config=self._config,
            from_checkpoint=self._path(step),
            to_checkpoint=target,
            job_id=f"{step} {trial}",
            references={other: self._path(other) for other in range(step)},
            probe_gap=2e-6,  # what a handshake of such a pair measures in float32
        )
        try:
            return self._trainer.train(call)
        except TrainingError as error:
            if not trial:  # go on without the gate, so that later steps exist
                self._trainer.train(replace(call, config=self._config.model_copy(update={"mismatch": None})))
            return error
        finally:
            if trial:
                shutil.rmtree(target, ignore_errors=True)

    def _sample(self, version: int, wrong: str | None = None) -> list[TrainingSample]:
        """Answers of the policy `version`, as records say; with `wrong` by another sampler."""
        rng = np.random.default_rng(version)
        vocab = self._engine.info().vocab_size
        prompts = rng.integers(0, vocab, (GROUPS, PROMPT)).tolist()
        adapter: str | None = str(version)
        if wrong == _BARE:
            adapter = None
        elif wrong == _LATER:
            adapter = str(version + 1)
        temperature = 1.5 if wrong == _WARM else 1.0
        for number in range(GROUPS * SIZE):
            request = GenerateRequest(
                request_id=str(number),
                adapter=adapter,
                prompt_token_ids=prompts[number // SIZE],
                max_tokens=self._tokens,
                stop_token_ids=(),
                seed=1000 * version + number,
                temperature=temperature,
            )
            self._engine.submit(request, stream=False)
        answers: dict[int, tuple[list[int], list[float]]] = {}
        for output in drain(self._engine):
            assert output.chunk is not None
            answers[int(output.request_id)] = (output.chunk.token_ids, output.chunk.logprobs)
        samples = self._graded([answers[number] for number in range(GROUPS * SIZE)], prompts, version, vocab)
        if wrong != _CHANGED:
            return samples
        return [
            replace(sample, token_ids=[*sample.token_ids[:PROMPT], (int(sample.token_ids[PROMPT]) + 7) % vocab,
                                       *sample.token_ids[PROMPT + 1 :]])
            for sample in samples
        ]  # fmt: skip

    def _graded(
        self, answers: list[tuple[list[int], list[float]]], prompts: list[list[int]], version: int, vocab: int
    ) -> list[TrainingSample]:
        rewards = np.asarray([np.mean([token < vocab // 2 for token in tokens]) for tokens, _ in answers])
        advantages = rewards - rewards.reshape(GROUPS, SIZE).mean(1).repeat(SIZE)
        samples = []
        for number, (tokens, logprobs) in enumerate(answers):
            blank = [0.0] * PROMPT
            samples.append(
                TrainingSample(
                    sample_id=str(number),
                    rollout_id=str(number),
                    group_id=str(number // SIZE),
                    token_ids=prompts[number // SIZE] + tokens,
                    loss_mask=[False] * PROMPT + [True] * len(tokens),
                    sampling_logprobs=blank + logprobs,
                    advantages=blank + [float(advantages[number])] * len(tokens),
                    policy_version=version,
                )
            )
        return samples


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["gate_stale", *sys.argv[1:]])
