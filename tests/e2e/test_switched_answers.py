"""Answers over several policy versions, with a real engine and trainer: each token is trained by its own version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from art.config import ModelSettings, ServerConfig, TrainConfig, TrainerConfig
from art.credit.samples import PlannedAnswer, PlannedSample, build_samples
from art.protocol.chat_completions import parse_chat_request
from art.protocol.training import JobStatus, RegisterRequest, TrainRequest
from art.record.recorder import Exchange
from art.runtime.runtime import Runtime
from art.trainer.step.micro_batch import StepProgress
from art.trainer.step.plans import Measurer
from art.trainer.trainer import Trainer

PROMPT = {"role": "user", "content": "say yes, no or maybe"}
AGAIN = {"role": "user", "content": "and again"}
_NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 200}
LONG_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "long", "schema": {"type": "object", "properties": {"a": _NUMBERS}, "required": ["a"]}},
}
"""A form that makes the tiny model write long answers."""
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Runtime]:
    runtime = Runtime(tmp_path_factory.mktemp("data"), ServerConfig())
    await runtime.start()
    settings = ModelSettings()
    await runtime.registration.register(
        RegisterRequest(project="p", name="m", base_model=str(tiny_model), settings=settings)
    )
    yield runtime
    await runtime.close()


async def ask(runtime: Runtime, *messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    chat = parse_chat_request({"model": "p/m", "messages": [PROMPT, *messages], **fields})
    choices: list[dict[str, Any]] = (await runtime.gateway.complete(chat, switches=True))["choices"]
    return choices


async def train(runtime: Runtime, job_id: str, conversations: list[list[dict[str, Any]]]) -> JobStatus:
    """Train a group of conversations: choices, with `AGAIN` between them."""
    trajectories = []
    for number, choices in enumerate(conversations):
        items: list[dict[str, Any]] = [PROMPT]
        for choice in choices:
            items += [AGAIN] * (len(items) > 1) + [{"choice": choice}]
        trajectories.append({"reward": float(number % 2), "histories": [{"items": items}]})
    config = TrainConfig(learning_rate=3e-3)
    request = TrainRequest.model_validate(
        {"job_id": job_id, "groups": [{"trajectories": trajectories}], "config": config}
    )
    job = await runtime.training.train("p", "m", request)
    async with asyncio.timeout(60):
        while job.state in ("queued", "running"):
            job = await runtime.jobs.wait(job.job_id, 5.0)
    assert (job.state, job.trained) == ("succeeded", True), job
    return job


async def long_answers(runtime: Runtime, until: asyncio.Task[Any]) -> list[dict[str, Any]]:
    """Keep sampling long answers until a task has ended, and then the last of them."""
    choices: list[dict[str, Any]] = []
    while not until.done():
        choices += await ask(runtime, response_format=LONG_FORM, max_tokens=600, n=4)
    return choices


def trainer_logprobs(runtime: Runtime, tiny_model: Path, exchange: Exchange) -> np.ndarray:
    """Log-prob of each token of an answer by the trainer, under the checkpoint of the version that sampled it."""
    trainer = Trainer(str(tiny_model), TrainerConfig(device="cpu", dtype="float32", num_threads=1))
    count = len(exchange.completion_token_ids)
    planned = PlannedSample(
        sample_id="s", rollout_id="r", weight=1.0, share=None, policy_version=exchange.policy_version,
        answers=[PlannedAnswer(exchange_id=exchange.id, num_tokens=count, advantages=[1.0])],
    )  # fmt: skip
    (sample,) = build_samples([planned], runtime.gateway.recorder)
    ((path,), _, _) = trainer._check([sample])
    versions, logprobs = path.policy_versions, np.full(count, np.nan)
    assert [int(version) for version in versions] == [v for v, n in exchange.segments for _ in range(n)]
    for version in set(versions.tolist()):
        loaded = trainer._resident.load(runtime.data_dir.model("p", "m").checkpoint(version))
        (measured,) = Measurer(loaded.policy, trainer._batcher, StepProgress()).add_stream([path], "policy", "own")
        logprobs = np.where(versions == version, measured.streams["own"], logprobs)
    return logprobs


@in_module_loop
async def test_mixed_versions_in_one_answer_and_in_one_rollout_are_trained_exactly(
    runtime: Runtime, tiny_model: Path
) -> None:
    first = await ask(runtime, n=8, max_tokens=8)
    job = asyncio.create_task(train(runtime, "job-first", [[choice] for choice in first]))
    switched: list[dict[str, Any]] = []
    for number in range(2, 6):
        switched += [choice for choice in await long_answers(runtime, job) if "segments" in choice["exchange"]]
        await job
        if len(switched) >= 2:
            break
        more = await ask(runtime, n=8, max_tokens=8)
        job = asyncio.create_task(train(runtime, f"job-number-{number}", [[choice] for choice in more]))
    assert len(switched) >= 2, "no answer was under way while a step was published"
    exchanges = runtime.gateway.recorder.get(choice["exchange_id"] for choice in switched[:2])
    for exchange in exchanges:
        assert sum(count for _, count in exchange.segments) == len(exchange.completion_token_ids)
        own = await asyncio.to_thread(trainer_logprobs, runtime, tiny_model, exchange)
        np.testing.assert_allclose(own, exchange.sampling_logprobs, atol=2e-4)

    # A second turn by a newer version than the first, in rollouts that begin with both kinds of answers.
    conversations = []
    for choice in [*first[:4], *switched[:2]]:
        second = await ask(runtime, choice["message"], AGAIN, max_tokens=8)
        assert second[0]["exchange"]["policy_version"] > choice["exchange"]["policy_version"]
        conversations.append([choice, *second])
    step = (await runtime.models.status("p", "m")).step
    metrics = (await train(runtime, "job-mixed", conversations)).metrics
    assert metrics["offpolicy/stale_rollouts_checked"] > 0
    assert metrics["offpolicy/mismatch_masked_share"] == 0
    assert metrics["offpolicy/mismatch_noise"] < metrics["offpolicy/mismatch_noise_allowed"] < 1e-3
    tokens = [
        step - version
        for choice, second in conversations
        for version, count in [
            *choice["exchange"].get(
                "segments", [(choice["exchange"]["policy_version"], choice["exchange"]["completion_tokens"])]
            ),
            (second["exchange"]["policy_version"], second["exchange"]["completion_tokens"]),
        ]
        for _ in range(count)
    ]
    assert metrics["offpolicy/mean_staleness"] == pytest.approx(np.mean(tokens), rel=1e-6)
    assert metrics["offpolicy/max_staleness"] == max(tokens)
