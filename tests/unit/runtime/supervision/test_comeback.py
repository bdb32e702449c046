"""The pauses before a child is started again."""

from __future__ import annotations

import asyncio

from art.runtime.supervision.process import LONGEST_PAUSE_S, Comeback


def fail(comeback: Comeback, times: int) -> list[float]:
    """Let some starts fail; return the pause after each."""
    pauses = []
    for _ in range(times):
        comeback.note_failed_start()
        pauses.append(comeback.pause_s)
    return pauses


def test_pauses_double_up_to_the_longest() -> None:
    assert fail(Comeback(50.0), 5) == [50.0, 100.0, 200.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert fail(Comeback(1.0), 3000)[-1] == LONGEST_PAUSE_S


def test_failed_starts_are_counted_in_a_row() -> None:
    comeback = Comeback(1.0)
    fail(comeback, 2)
    comeback.note_up()
    fail(comeback, 1)
    assert comeback.num_failed_starts == 1


def test_a_child_that_dies_as_soon_as_it_is_up_waits_longer_each_time() -> None:
    comeback, pauses = Comeback(1.0), []
    for _ in range(4):
        comeback.note_up()
        comeback.note_death()
        pauses.append(comeback.pause_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0]


async def test_a_death_after_a_while_has_no_pause() -> None:
    comeback = Comeback(1.0)
    fail(comeback, 3)
    comeback.note_up()
    await asyncio.sleep(2.1)  # longer than `SOON_S`; a busy machine only makes it longer
    comeback.note_death()
    assert comeback.pause_s == 0.0


async def test_a_pause_ends_when_somebody_asks() -> None:
    comeback = Comeback(200.0)
    comeback.note_failed_start()
    pausing = asyncio.create_task(comeback.pause())
    await asyncio.sleep(0)
    assert "It is started again in 200 s" in comeback.describe_next()
    comeback.hurry()
    await pausing  # not after minutes
    assert comeback.pause_s == 0.0
