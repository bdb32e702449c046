"""Projects take turns; inside one the first to come is first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from art.runtime.jobs.queue import FairQueue


def drain(queue: FairQueue) -> list[str]:
    return list(iter(queue.take, None))


def filled(*jobs: str) -> FairQueue:
    queue = FairQueue()
    for job in jobs:
        queue.put(job[0], job)
    return queue


def test_projects_take_turns() -> None:
    assert drain(filled("a1", "a2", "a3", "b1", "c1", "b2")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_had_a_turn_lets_others_go_first() -> None:
    queue = filled("a1", "a2", "a3")
    assert queue.take() == "a1"
    queue.put("b", "b1")
    assert queue.places() == {"b1": 1, "a2": 2, "a3": 3}
    assert queue.remove("a2")
    assert not queue.remove("a2")
    assert drain(queue) == ["b1", "a3"]


@given(st.lists(st.one_of(st.sampled_from("abcd"), st.none()), max_size=40))
def test_nobody_waits_for_more_than_one_turn_of_each_other_project(events: list[str | None]) -> None:
    """A letter puts a job of that project, `None` takes one."""
    queue, put = FairQueue(), Counter[str]()
    waited: dict[str, Counter[str]] = {}
    order: list[str] = []
    for project in [*events, *[None] * len(events)]:
        if project is not None:
            put[project] += 1
            queue.put(project, f"{project}{put[project]:02d}")
            continue
        places = queue.places()
        job = queue.take()
        assert job == min(places, key=places.__getitem__, default=None)
        if job is None:
            continue
        order.append(job)
        heads = {other[0] for other in places} - {job[0]}
        waited.pop(job[0], None)
        for other in heads:
            turns = waited.setdefault(other, Counter())
            turns[job[0]] += 1
            assert turns[job[0]] <= 1, f"{other} was overtaken twice by {job[0]}: {order}"
    for project, count in put.items():
        assert [job for job in order if job[0] == project] == [f"{project}{i:02d}" for i in range(1, count + 1)]
