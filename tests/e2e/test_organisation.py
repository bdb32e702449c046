"""A server as an organisation runs it: promotion with a gate, usage that survives `kill -9`, quotas."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest

import art
from art.client.client import ServerClient
from art.errors import PromotionError, QuotaError
from art.protocol.promotions import Gate, PromotionRecord
from art.protocol.usage_report import ProjectUsage, Quota
from art.storage.lock import lock_holder

HELLO = [{"role": "user", "content": "hello"}]


def evaluation(wins: float, num: int = 40) -> list[art.TrajectoryGroup]:
    """Held-out rollouts of `num` scenarios, of which a share is won."""
    return [
        art.TrajectoryGroup(
            [
                art.Trajectory(
                    messages_and_choices=[{"role": "user", "content": f"game {i}"}],
                    reward=float(i < wins * num),
                    metadata={"scenario_id": f"game-{i}"},
                )
            ]
        )
        for i in range(num)
    ]


async def usage(client: ServerClient) -> ProjectUsage:
    (project,) = (await client.usage(project="shop")).projects
    return project


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_promotion_usage_and_quotas_of_a_real_server(tmp_path: Path, tiny_model: Path) -> None:
    async with art.LocalBackend(path=tmp_path) as backend:
        model = art.TrainableModel(name="agent", project="shop", base_model=str(tiny_model), report_metrics=[])
        await model.register(backend)
        address = (tmp_path / "logs" / "address.txt").read_text().strip()
        async with ServerClient(address, model.inference_api_key) as client:
            await _train_a_step(model)
            assert await model.get_step() == 1
            await _promote(model, backend)
            await _use(model, client, tmp_path)
            await _refuse(model, client)


async def _train_a_step(model: art.TrainableModel) -> None:
    """Train on answers that are rewarded for their length, so that the rewards of a group differ."""
    chat = model.openai_client().chat.completions

    async def rollout(seed: int) -> art.Trajectory:
        trajectory = art.Trajectory(messages_and_choices=list(HELLO))
        answer = await chat.create(model=model.get_inference_name(), messages=HELLO, seed=seed, max_tokens=12)  # type: ignore[arg-type]
        trajectory.messages_and_choices.append(answer.choices[0])
        trajectory.reward = float(seed)
        return trajectory

    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(seed) for seed in range(4))], pbar_desc=None
    )
    await model.train(groups)


async def _promote(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    await model.log(evaluation(0.25), split="val", step=0)
    await model.log(evaluation(0.75), split="val", step=1)
    assert await model.promote(1, require=0.02) == "shop/agent@promoted"
    with pytest.raises(PromotionError, match="step 0 of shop/agent is not promoted"):
        await model.promote(0, require=0.02)
    records: list[PromotionRecord] = await backend.checkpoints.promotions(model)
    assert [(one.step, one.decision) for one in records] == [(1, "passed"), (0, "refused")]
    passed, refused = (one.verdict for one in records)
    assert passed is not None
    assert refused is not None
    assert passed.difference == pytest.approx(0.5)
    assert refused.difference == pytest.approx(-0.5)
    equal = Gate(require=0.0)
    await model.log(evaluation(0.75), split="test", step=1)
    await model.log(evaluation(0.75), split="test", step=0)
    with pytest.raises(PromotionError, match=r"difference of \+0.000"):
        await backend.checkpoints.promote(model, 0, gate=equal.model_copy(update={"split": "test"}))


async def _use(model: art.TrainableModel, client: ServerClient, data_dir: Path) -> None:
    chat = model.openai_client().chat.completions
    before = await usage(client)
    assert before.steps == 1
    assert before.training_s > 0
    assert before.completion > 0
    answers = [await chat.create(model="shop/agent@promoted", messages=HELLO, max_tokens=9) for _ in range(3)]  # type: ignore[arg-type]
    counted = [answer.usage for answer in answers]
    pid = lock_holder(art_data(data_dir))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    after = await usage(client)  # of the next server, which `LocalBackend` starts
    assert after.prompt - before.prompt == sum(one.prompt_tokens for one in counted if one is not None)
    assert after.completion - before.completion == sum(one.completion_tokens for one in counted if one is not None)
    assert (after.steps, after.training_s) == (before.steps, before.training_s)


def art_data(data_dir: Path) -> Path:
    return data_dir / "server.lock"


async def _refuse(model: art.TrainableModel, client: ServerClient) -> None:
    await client.set_quota("shop", Quota(tokens=1, steps=1))
    chat = model.openai_client().chat.completions
    with pytest.raises(
        openai.RateLimitError, match=r"project shop has used .* of 1 tokens in .* \(quota `tokens`\)"
    ) as said:
        await chat.create(model="shop/agent", messages=HELLO)  # type: ignore[arg-type]
    assert (said.value.code, said.value.response.headers["x-should-retry"]) == ("quota_exceeded", "false")
    trained = [art.Trajectory(messages_and_choices=[*HELLO, {"role": "assistant", "content": "hi"}])]
    with pytest.raises(QuotaError, match=r"1 training steps of 1 training steps"):
        await model.train_sft(trained)
    await client.set_quota("shop", Quota())
    await chat.create(model="shop/agent", messages=HELLO, max_tokens=2)  # type: ignore[arg-type]
    assert (await usage(client)).quota is None
