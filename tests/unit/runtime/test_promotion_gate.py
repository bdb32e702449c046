"""The gate before a promotion: what it reads from the log, what it decides, and what it remembers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from art.errors import ConfigError, ConflictError, InvalidRequestError, PromotionError
from art.protocol.promotions import Gate, MeasuredScores, PromotionRecord
from art.runtime.model_checkpoints import logged_scores
from art.storage.jsonl import append_lines
from art.storage.layout import DataDir
from tests.unit.runtime.test_promotion import EVERY_OLD_ONE, Server


@pytest.fixture
async def server(tmp_path: Path) -> Server:
    server = await Server(tmp_path).start()
    await server.add_model()
    return server


def log(server: Server, step: int, rewards: dict[str, float], *, split: str = "val") -> None:
    """Write an evaluation as `model.log` does: a group of one rollout for each scenario."""
    rows = [
        {"trajectories": [{"reward": reward, "metadata": {"scenario_id": name}, "metrics": {"win": reward > 0.5}}]}
        for name, reward in rewards.items()
    ]
    append_lines(server.models.data_dir.model("p", "agent").trajectories(split, step), rows)


def rewards(mean: float, *, num: int = 40, seed: int = 0) -> dict[str, float]:
    rng = random.Random(seed)
    return {f"game-{i}": mean + rng.gauss(0, 0.1) for i in range(num)}


def measured(reference: list[list[float]], candidate: list[list[float]]) -> MeasuredScores:
    """Scores that a caller has measured, against step 0."""
    return MeasuredScores(source="games", reference_step=0, reference=reference, candidate=candidate)


async def history(server: Server) -> list[PromotionRecord]:
    return (await server.promotions.history("p", "agent")).promotions


async def test_a_better_checkpoint_passes_and_an_equal_one_does_not(server: Server) -> None:
    log(server, 0, rewards(0.3))
    log(server, 2, rewards(0.6, seed=1))
    first = await server.promote(2, gate=Gate(require=0.02), note="first one")
    assert first.verdict is not None
    assert first.verdict.passed
    assert (first.verdict.reference_step, first.verdict.num_scenarios, first.verdict.look) == (0, 40, 1)
    assert first.verdict.difference == pytest.approx(0.3, abs=0.05)

    log(server, 3, rewards(0.6, seed=2))
    with pytest.raises(PromotionError, match=r"step 3 of p/agent is not promoted.*on 40 scenarios, a difference of"):
        await server.promote(3, gate=Gate(require=0.02))
    assert server.models.by_key["p/agent"].promoted_step == 2

    log(server, 4, rewards(0.9, seed=3))
    last = await server.promote(4, gate=Gate(require=0.02))
    assert last.verdict is not None
    assert (last.previous_step, last.verdict.reference_step, last.verdict.look) == (2, 2, 2)
    decisions = [(one.step, one.previous_step, one.decision, one.key_id, one.note) for one in await history(server)]
    assert decisions == [
        (2, None, "passed", "key-1", "first one"), (3, 2, "refused", "key-1", ""), (4, 2, "passed", "key-1", "")
    ]  # fmt: skip


async def test_a_gain_below_what_is_required_is_refused_with_the_figures(server: Server) -> None:
    log(server, 0, rewards(0.3))
    log(server, 1, rewards(0.5, seed=1))
    with pytest.raises(
        PromotionError, match=r"\+0\.\d{3} that is above \+0\.\d{3} with 97\.50% confidence\. More than"
    ):
        await server.promote(1, gate=Gate(require=0.4))
    with pytest.raises(
        PromotionError, match=r"may be chance.*art promote p/agent@1 --require 0.19 --task TASK --held-out"
    ):
        await server.promote(1, gate=Gate(require=0.19))


async def test_the_same_evidence_is_one_look_and_other_evidence_another(server: Server) -> None:
    log(server, 0, rewards(0.3))
    log(server, 1, rewards(0.3, seed=1))
    for require in (0.05, 0.02, 0.02):
        with pytest.raises(PromotionError):
            await server.promote(1, gate=Gate(require=require))
    for seed in (2, 3):
        values = [[value] for value in rewards(0.3, seed=seed).values()]
        scores = measured(values, values)
        with pytest.raises(PromotionError):
            await server.promote(1, gate=Gate(require=0, measured=scores))
    looks = [one.verdict.look for one in await history(server) if one.verdict is not None]
    assert looks == [1, 1, 1, 2, 3]

    await server.promote(2)
    with pytest.raises(PromotionError):
        await server.promote(1, gate=Gate(require=0, measured=scores.model_copy(update={"reference_step": 2})))
    verdict = (await history(server))[-1].verdict
    assert verdict is not None
    assert verdict.look == 1, "a new reference, a new count"


async def test_choosing_the_best_of_many_logged_steps_costs_as_many_looks(server: Server) -> None:
    for step in range(5):
        log(server, step, rewards(0.3 if step == 0 else 0.9, seed=step))
    promotion = await server.promote(3, gate=Gate(require=0))
    assert promotion.verdict is not None
    assert promotion.verdict.look == 4
    assert promotion.verdict.confidence == pytest.approx(1 - 0.05 / 20)
    back = await server.promote(1, gate=Gate(require=-1.0))
    assert back.verdict is not None
    assert back.verdict.look == 4, "an older step could be any of the others"


async def test_too_few_common_scenarios_are_no_evidence(server: Server) -> None:
    log(server, 0, rewards(0.1, num=40))
    log(server, 1, {name: value for name, value in rewards(0.9).items() if name in ("game-1", "game-2")})
    log(server, 1, {"another": 0.9})
    with pytest.raises(
        PromotionError, match=r"2 scenarios were measured with both.*step 0 has 40 and step 1 3.*least 10"
    ):
        await server.promote(1, gate=Gate(require=0))
    with pytest.raises(PromotionError, match="0 scenarios were measured with both"):
        await server.promote(1, gate=Gate(require=0, split="test"))
    values = [[value] for value in rewards(0.3).values()]
    with pytest.raises(PromotionError):
        await server.promote(1, gate=Gate(require=0, measured=measured(values, values)))
    last = (await history(server))[-1].verdict
    assert last is not None
    assert last.look == 1, "what had no figures was no look"


async def test_rewards_of_degrees_need_thirty_scenarios(server: Server) -> None:
    """A candidate that gains 0.05 in most scenarios and loses 1 in a few often shows no loss in ten of them."""
    gains = [[0.05 + 0.001 * i] for i in range(30)]
    none = [[0.0]] * 30
    with pytest.raises(PromotionError, match=r"29 scenarios were measured with both.*or 30 unless"):
        await server.promote(1, gate=Gate(require=0, measured=measured(none[:29], gains[:29])))
    assert (await server.promote(1, gate=Gate(require=0, measured=measured(none, gains)))).step == 1
    wins = [[1.0]] * 10
    scores = measured(none[:10], wins).model_copy(update={"reference_step": 1})
    assert (await server.promote(2, gate=Gate(require=0, measured=scores))).step == 2


async def test_what_is_promoted_is_not_compared_with_itself(server: Server) -> None:
    await server.promote(2, note="good")
    log(server, 2, rewards(0.6))
    again = await server.promote(2, gate=Gate(require=0))
    assert (again.step, again.previous_step, again.verdict) == (2, 2, None)
    assert (await server.promote(2)).previous_step == 2
    assert [one.note for one in await history(server)] == ["good"]


async def test_what_was_learnt_from_is_no_evidence(server: Server) -> None:
    with pytest.raises(ConfigError, match="held-out split such as 'val'"):
        await server.promote(1, gate=Gate(require=0, split="train"))
    with pytest.raises(InvalidRequestError, match="split"):
        await server.promote(1, gate=Gate(require=0, split="../../etc"))
    assert await history(server) == []


async def test_force_promotes_and_is_remembered(server: Server) -> None:
    await server.promote(2)
    forced = await server.promote(1, gate=Gate(require=0), force=True, note="a leak in step 2")
    assert forced.verdict is not None
    assert not forced.verdict.passed
    assert server.models.by_key["p/agent"].promoted_step == 1
    assert [(one.decision, one.note) for one in await history(server)] == [
        ("ungated", ""), ("forced", "a leak in step 2")
    ]  # fmt: skip
    assert await server.checkpoints.delete("p", "agent", EVERY_OLD_ONE) == [0, 2, 3]


async def test_scores_against_another_reference_are_refused(server: Server) -> None:
    await server.promote(2)
    scores = measured([[0.0]] * 20, [[1.0]] * 20)
    with pytest.raises(ConflictError, match="compare with step 0, but step 2"):
        await server.promote(3, gate=Gate(require=0, measured=scores))
    right = scores.model_copy(update={"reference_step": 2})
    assert (await server.promote(3, gate=Gate(require=0, measured=right))).step == 3


async def test_the_history_survives_a_restart(server: Server, tmp_path: Path) -> None:
    await server.promote(2, note="good")
    restarted = await Server(tmp_path).start()
    assert [(one.step, one.note) for one in await history(restarted)] == [(2, "good")]
    assert restarted.models.by_key["p/agent"].promoted_step == 2


def test_rollouts_that_failed_by_no_fault_of_the_policy_are_left_out(tmp_path: Path) -> None:
    path = DataDir(tmp_path).model("p", "agent").trajectories("val", 1)
    asked = [{"role": "user", "content": "7 + 5?"}, {"role": "assistant", "content": "12"}]
    append_lines(
        path,
        [
            {"trajectories": [{"reward": 1.0, "metadata": {"scenario_id": 7}}, {"reward": 0.0, "metadata": {"scenario_id": 7}}]},
            {"trajectories": [{"reward": 0.0, "metadata": {"scenario_id": "b", "outcome": "infra_fault"}}]},
            {"trajectories": [{"reward": 0.5, "metadata": {"scenario_id": "b", "outcome": "policy_fault"}}]},
            {"trajectories": [{"reward": float("nan"), "metadata": {"scenario_id": "c"}}], "metadata": {}},
            {"trajectories": [{"reward": 0.25, "metrics": {"win": True}}], "metadata": {"scenario_id": "of the group"}},
            {"trajectories": [{"reward": 0.75, "messages_and_choices": asked}]},
            {"trajectories": [{"reward": 0.25, "messages_and_choices": asked[:1]}]},
        ],
    )  # fmt: skip
    values = logged_scores(path, "reward")
    (prompt,) = values.keys() - {"7", "b", "of the group"}
    assert values == {"7": [1.0, 0.0], "b": [0.5], "of the group": [0.25], prompt: [0.75, 0.25]}
    assert logged_scores(path, "win") == {"of the group": [1.0]}
    assert logged_scores(path.with_name("0009.jsonl"), "reward") == {}
