"""Rollouts of other programs on the server: announced, recorded, finished, trained, forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from art.errors import ConflictError, InvalidRequestError, NotFoundError
from art.protocol.rollouts import RolloutQuery, RolloutUpdate
from art.record.conversations import forget_older
from art.record.recorder import exchange_id_at, new_exchange_id
from tests.support.gateway import Bench, open_bench, user


def update(**fields: object) -> RolloutUpdate:
    return RolloutUpdate.model_validate(fields)


async def test_the_first_exchange_creates_a_rollout(bench: Bench) -> None:
    bench.answers("one", "two")
    await bench.chat(user("hi"), rollout_id="r1")
    await bench.chat(user("hi"))
    status = bench.gateway.rollouts.find("r1", None)
    assert status is not None
    assert (status.project, status.model, status.outcome, status.num_exchanges) == ("games", "games/agent", None, 1)
    assert (status.first_policy_version, status.last_policy_version) == (3, 3)


async def test_a_rollout_is_announced_recorded_and_finished(bench: Bench) -> None:
    rollouts = bench.gateway.rollouts
    await rollouts.put("r1", update(project="games", group_id="g1", metadata={"level": 3, "hard": True}), None)
    bench.answers("one")
    await bench.chat(user("hi"), rollout_id="r1")
    done = await rollouts.put("r1", update(reward=0.5, metrics={"turns": 1}), None)
    assert (done.model, done.group_id, done.reward, done.outcome) == ("games/agent", "g1", 0.5, "ok")
    assert (done.metrics, done.metadata) == ({"turns": 1.0}, {"level": 3, "hard": True})
    assert await rollouts.put("r1", update(reward=0.5, metrics={"turns": 1}), None) == done  # once more, nothing new
    with pytest.raises(ConflictError, match="would change its `reward`"):
        await rollouts.put("r1", update(reward=0.6), None)
    with pytest.raises(ConflictError, match="an id of its own"):
        await bench.chat(user("hi"), rollout_id="r1")


async def test_everything_survives_a_restart(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with open_bench(tmp_path, tokenizer_dir) as bench:
        bench.answers("one")
        await bench.chat(user("hi"), rollout_id="r1")
        before = await bench.gateway.rollouts.put("r1", update(reward=1.0, group_id="g"), None)
    async with open_bench(tmp_path, tokenizer_dir) as bench:
        record = await bench.gateway.rollouts.get("r1", "games")
        assert record.model_dump(exclude={"histories"}) == before.model_dump()
        assert [history["messages_and_choices"][1]["message"]["content"] for history in record.histories] == ["one"]


async def test_projects_may_use_the_same_rollout_id(bench: Bench) -> None:
    rollouts = bench.gateway.rollouts
    bench.answers("one")
    await bench.chat(user("hi"), rollout_id="r1")
    other = await rollouts.put("r1", update(reward=-1.0), "other")  # by a key of another project
    assert (other.project, other.num_exchanges) == ("other", 0)
    mine = await rollouts.get("r1", "games")
    assert mine.reward is None
    assert (await rollouts.get("r1", "other")).histories == []
    with pytest.raises(InvalidRequestError, match="set `project` to one of games, other"):
        await rollouts.get("r1", None)
    with pytest.raises(InvalidRequestError, match="belongs to one project; got games, other"):
        await rollouts.put("r1", update(reward=1.0, project="games"), "other")
    with pytest.raises(InvalidRequestError, match="belongs to one project"):
        await rollouts.put("r2", update(reward=1.0, model="games/agent"), "other")
    with pytest.raises(NotFoundError):
        await rollouts.get("r3", "games")
    assert [r.project for r in (await rollouts.page(RolloutQuery(project="other"))).rollouts] == ["other"]


async def test_a_new_rollout_needs_a_project(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="name its project with"):
        await bench.gateway.rollouts.put("r1", update(reward=1.0), None)
    with pytest.raises(InvalidRequestError, match="`rollout_id` must be"):
        await bench.gateway.rollouts.put("../r1", update(reward=1.0, project="games"), None)


async def test_an_unknown_model_name_means_the_announced_model(bench: Bench) -> None:
    bench.answers("one", "two")
    with pytest.raises(NotFoundError):
        await bench.chat(user("hi"), rollout_id="r1", model="gpt-99")
    await bench.gateway.rollouts.put("r1", update(model="games/agent"), None)
    answer = await bench.chat(user("hi"), rollout_id="r1", model="gpt-99")
    assert (answer["model"], bench.exchange(answer).name) == ("gpt-99", "agent")
    with pytest.raises(NotFoundError):  # a step that does not exist is not guessed
        await bench.chat(user("hi"), rollout_id="r1", model="games/agent@99")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"outcome": "ok"}, "needs a `reward`"),
        ({"outcome": "infra_fault", "reward": 0.0}, "has no reward"),
        ({"error": "boom"}, "is for outcome 'infra_fault'"),
        ({"reward": float("nan")}, "finite"),
        ({"model": "agent"}, "pattern"),
        ({"rewards": 1.0}, "Extra inputs"),
    ],
)
def test_contradictory_updates_are_refused(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        update(**fields)


async def test_rollouts_are_listed_by_group_state_and_change(bench: Bench) -> None:
    rollouts = bench.gateway.rollouts
    for i in range(5):
        await rollouts.put(f"r{i}", update(model="games/agent", group_id=f"g{i % 2}"), None)
    first = await rollouts.page(RolloutQuery(limit=3))
    assert [r.rollout_id for r in first.rollouts] == ["r0", "r1", "r2"]
    rest = await rollouts.page(RolloutQuery(since=first.next_since))
    assert [r.rollout_id for r in rest.rollouts] == ["r3", "r4"]
    await rollouts.put("r1", update(outcome="infra_fault", error="tool down"), None)
    await rollouts.put("r0", update(reward=1.0), None)
    news = await rollouts.page(RolloutQuery(since=rest.next_since))
    assert [r.rollout_id for r in news.rollouts] == ["r1", "r0"]  # in the order of their changes
    nothing = await rollouts.page(RolloutQuery(since=news.next_since))
    assert (nothing.rollouts, nothing.next_since) == ([], news.next_since)

    async def ids(**query: object) -> list[str]:
        return [r.rollout_id for r in (await rollouts.page(RolloutQuery.model_validate(query))).rollouts]

    assert await ids(group_id="g1") == ["r3", "r1"]
    assert await ids(finished=True) == ["r1", "r0"]
    assert await ids(finished=False, group_id="g0") == ["r2", "r4"]
    assert await ids(outcome="infra_fault") == ["r1"]
    assert await ids(model="games/other") == []


async def test_trained_rollouts_are_marked_once(bench: Bench) -> None:
    rollouts = bench.gateway.rollouts
    bench.answers("a", "b", "c")
    ids = []
    for name in ("done", "running"):
        answer = await bench.chat(user("hi"), rollout_id=name)
        ids.append(answer["choices"][0]["exchange_id"])
    await rollouts.put("done", update(reward=1.0), None)
    for job in ("job-1", "job-2"):
        await rollouts.mark_trained(ids, job, "games")
    assert [r.rollout_id for r in (await rollouts.page(RolloutQuery(trained=True))).rollouts] == ["done"]
    assert (await rollouts.get("done", None)).trained_by == "job-1"
    assert (await rollouts.get("running", None)).trained_by is None
    await bench.database.run(lambda db: rollouts.unmark_trained(db, "job-1"))
    assert (await rollouts.get("done", None)).trained_by is None


async def test_a_job_marks_no_rollouts_of_another_project(bench: Bench) -> None:
    rollouts = bench.gateway.rollouts
    bench.answers("a")
    answer = await bench.chat(user("hi"), rollout_id="done")
    await rollouts.put("done", update(reward=1.0), None)
    await rollouts.mark_trained([answer["choices"][0]["exchange_id"]], "job-1", "mail")
    assert (await rollouts.get("done", None)).trained_by is None


async def test_pages_do_not_skip_rollouts_that_are_marked_together(bench: Bench) -> None:
    rollouts = bench.gateway.rollouts
    ids = []
    for i in range(5):
        bench.answers("a")
        ids.append((await bench.chat(user("hi"), rollout_id=f"r{i}"))["choices"][0]["exchange_id"])
        await rollouts.put(f"r{i}", update(reward=1.0), None)

    async def pages(since: int, **query: object) -> list[str]:
        ids: list[str] = []
        while (page := await rollouts.page(RolloutQuery(since=since, limit=2, **query))).rollouts:  # type: ignore[arg-type]
            ids += [rollout.rollout_id for rollout in page.rollouts]
            since = page.next_since
        return ids

    everything = ["r0", "r1", "r2", "r3", "r4"]
    since = (await rollouts.page(RolloutQuery())).next_since
    await rollouts.mark_trained(ids, "job-1", "games")
    assert await pages(since, trained=True) == everything
    await bench.database.run(lambda db: rollouts.unmark_trained(db, "job-1"))
    assert await pages(since, trained=False) == everything


async def forget(bench: Bench, age_s: float, *needed: str) -> tuple[int, int]:
    return await forget_older(bench.recorder, age_s, lambda db: needed)


async def test_old_exchanges_are_deleted_unless_a_newer_one_continues_them(bench: Bench) -> None:
    bench.answers("one", "two", "three")
    old = await bench.chat(user("hi"), rollout_id="old")
    await bench.gateway.rollouts.put("old", update(reward=1.0), None)
    first = await bench.chat(user("hello"), rollout_id="kept")
    assert new_exchange_id() > exchange_id_at(time.time() - 1) > exchange_id_at(time.time() - 2)
    assert await forget(bench, 3600) == (0, 0)
    cutoff = time.time()
    answer = {"role": "assistant", "content": "two"}
    second = await bench.chat(user("hello"), answer, user("more"), rollout_id="kept")
    assert bench.exchange(second).parent_id == bench.exchange(first).id

    assert await forget(bench, time.time() - cutoff) == (1, 1)
    assert bench.gateway.rollouts.find("old", None) is None
    with pytest.raises(NotFoundError):
        bench.exchange(old)
    assert bench.exchange(second).parent_id == bench.exchange(first).id
    record = await bench.gateway.rollouts.get("kept", None)
    assert record.num_exchanges == 2
    assert await forget(bench, -3600, bench.exchange(second).id) == (0, 0), (
        "a job needs the second, which continues the first"
    )
    assert bench.exchange(second).parent_id == bench.exchange(first).id
    bench.forget()  # everything else is gone an hour later
    assert await forget(bench, -3600, "ex_of_a_job_before") == (2, 1)
