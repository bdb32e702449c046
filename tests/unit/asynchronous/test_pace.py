"""The law of the pace: nothing is ever too old, every step is full, and the training always comes to its end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.asynchronous.pace import Pace
from art.errors import ConfigError


@dataclass
class Run:
    """Drives a pace with rollouts and steps that end in a random order."""

    pace: Pace
    rng: random.Random
    lost: float = 0.0
    """Share of groups that end without anything to train on."""
    skipped: float = 0.0
    """Share of steps that make no checkpoint."""
    slow: float = 0.0
    """Chance that the oldest running group is passed over when one of the running groups ends."""
    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    """Checkpoint that each step started from, and its groups."""
    staleness: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    started: dict[int, int] = field(default_factory=dict)
    """Version with which each group started."""

    def run(self, max_events: int = 20_000) -> None:
        for _ in range(max_events):
            while self.pace.may_start():
                version = self.pace.version
                self.started[self.pace.start()] = version
                self.assert_feasible()
            if (numbers := self.pace.next_step()) is not None:
                self._begin(numbers)
            elif self.pace.step == self.pace.last_step and not self.pace.is_training:
                return
            else:
                self._event()
            self.assert_feasible()
        raise AssertionError("the training did not come to its end")

    def _begin(self, numbers: list[int]) -> None:
        pace = self.pace
        assert len(set(numbers)) == len(numbers) == pace.groups_per_step
        assert numbers == sorted(numbers)
        self.staleness.update(pace.step - self.started[number] for number in numbers)
        self.steps.append((pace.step, numbers))
        pace.begin(numbers)

    def _event(self) -> None:
        pace, rng = self.pace, self.rng
        running = pace.running
        assert running or pace.is_training, "nothing runs and nothing may start: a deadlock"
        if pace.is_training and (not running or rng.random() < 0.2):
            self.ended["steps"] += 1
            if rng.random() < self.skipped:
                self.ended["skipped"] += 1
                pace.skip()
            else:
                pace.publish(pace.version + 1)
            return
        if len(running) > 1 and rng.random() < self.slow:
            running = running[1:]
        number = rng.choice(running)
        if rng.random() < self.lost:
            self.ended["lost"] += 1
            pace.lose(number)
        else:
            pace.finish(number)

    def assert_feasible(self) -> None:
        """Steps from the next on, full and in turn, can train every outstanding group in time (computed the slow way)."""
        pace = self.pace
        dues = sorted(self.started[number] + pace.max_staleness for number in [*pace.running, *pace.finished])
        for index, due in enumerate(dues):
            assert pace.step + index // pace.groups_per_step <= due


paces = st.builds(Pace, groups_per_step=st.integers(1, 6), max_staleness=st.integers(0, 4), step=st.integers(0, 5))


@given(paces, st.integers(1, 8), st.integers(), st.sampled_from([0.0, 0.3, 0.9]))
def test_nothing_is_too_old_and_the_training_ends(pace: Pace, steps: int, seed: int, slow: float) -> None:
    rng = random.Random(seed)
    pace.last_step, first = pace.step + steps, pace.step
    lost, skipped = (rng.choice([0.0, 0.2, 0.6]) for _ in range(2))
    run = Run(pace, rng, lost, skipped, slow)
    run.run()
    assert max(run.staleness) <= pace.max_staleness
    assert [step for step, _ in run.steps if step == first + steps - 1], "the last step was never begun"
    assert pace.version == first + steps
    trained = [number for _, numbers in run.steps for number in numbers]
    assert len(trained) == len(set(trained))
    assert len(trained) + run.ended["lost"] == pace.next_number, "a group was thrown away"
    assert len(run.steps) == steps + run.ended["skipped"]


@given(paces, st.integers(1, 8), st.integers(), st.sampled_from([0.0, 0.9]))
def test_an_undisturbed_run_trains_exactly_the_first_groups(pace: Pace, steps: int, seed: int, slow: float) -> None:
    pace.last_step = pace.step + steps
    run = Run(pace, random.Random(seed), slow=slow)
    run.run()
    assert sorted(number for _, numbers in run.steps for number in numbers) == list(range(steps * pace.groups_per_step))


@given(st.integers(1, 6), st.integers(1, 8), st.integers())
def test_without_staleness_it_is_the_plain_loop(groups_per_step: int, steps: int, seed: int) -> None:
    pace = Pace(groups_per_step=groups_per_step, max_staleness=0, last_step=steps)
    run = Run(pace, random.Random(seed))
    run.run()
    assert run.steps == [
        (step, list(range(step * groups_per_step, (step + 1) * groups_per_step))) for step in range(steps)
    ]
    assert set(run.staleness) == {0}


def test_the_example_of_the_module() -> None:
    pace = Pace(groups_per_step=2, max_staleness=1)
    assert [pace.start() for _ in range(4)] == [0, 1, 2, 3]
    assert not pace.may_start()
    with pytest.raises(ConfigError, match="no group may start"):
        pace.start()
    pace.finish(0)
    assert pace.next_step() is None
    pace.finish(1)
    assert pace.next_step() == [0, 1]
    pace.begin([0, 1])
    assert not pace.may_start()
    assert pace.next_step() is None
    pace.publish(1)
    assert [pace.start() for _ in range(2)] == [4, 5]
    assert not pace.may_start()


def test_a_step_waits_for_groups_that_are_due() -> None:
    pace = Pace(groups_per_step=2, max_staleness=1)
    for _ in range(4):
        pace.start()
    pace.finish(1)
    pace.finish(3)
    pace.begin([1, 3])
    pace.publish(1)
    assert [pace.start(), pace.start()] == [4, 5]
    pace.finish(4)
    pace.finish(5)
    assert pace.next_step() is None  # 0 and 2 are due now, though two younger groups have finished
    pace.finish(0)
    pace.lose(2)
    assert pace.next_step() == [0, 4]


def test_a_step_does_not_take_young_groups_if_the_old_ones_could_then_not_all_be_trained() -> None:
    pace = Pace(groups_per_step=2, max_staleness=2)
    for _ in range(6):
        pace.start()
    pace.finish(0)
    pace.finish(1)
    pace.begin([0, 1])
    pace.publish(1)
    young = [pace.start(), pace.start()]
    for number in young:
        pace.finish(number)
    assert pace.next_step() is None  # 2 to 5 are due in step 2, which takes only two of them
    pace.finish(5)
    pace.finish(3)
    assert pace.next_step() == [3, 5]


def test_a_lost_group_is_replaced() -> None:
    pace = Pace(groups_per_step=1, max_staleness=0, last_step=1)
    pace.lose(pace.start())
    assert pace.start() == 1
    pace.finish(1)
    assert pace.next_step() == [1]
    pace.begin([1])
    pace.publish(1)
    assert not pace.may_start()
    assert pace.next_step() is None


def test_a_skipped_step_is_repeated_from_the_same_checkpoint() -> None:
    pace = Pace(groups_per_step=1, max_staleness=0)
    pace.finish(pace.start())
    pace.begin([0])
    pace.skip()
    assert (pace.version, pace.step) == (0, 0)
    assert pace.start() == 1


def test_groups_of_an_earlier_run_are_taken_up_if_they_can_be_trained_in_time() -> None:
    pace = Pace(groups_per_step=2, max_staleness=1, step=4, next_number=12)
    assert not pace.restore(5, 2)
    assert pace.restore(8, 3)
    assert pace.restore(9, 3)
    assert not pace.restore(10, 3)  # three groups that are due in step 4, which takes two
    assert pace.restore(11, 4)
    assert not pace.restore(13, 5)  # from a checkpoint that was not published
    assert pace.outstanding == 3
    assert pace.start() == 12
    assert not pace.may_start()


def test_who_else_trains_the_model_is_told() -> None:
    pace = Pace(groups_per_step=1, max_staleness=1)
    with pytest.raises(ConfigError, match="checkpoint 1 was published"):
        pace.publish(1)
    pace.finish(pace.start())
    pace.begin([0])
    with pytest.raises(ConfigError, match="expected 1"):
        pace.publish(2)
    with pytest.raises(ConfigError, match="under way"):
        pace.begin([])


@pytest.mark.parametrize("bad", [{"groups_per_step": 0}, {"max_staleness": -1}])
def test_sizes_that_make_no_sense(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="groups_per_step >= 1"):
        Pace(**{"groups_per_step": 1, "max_staleness": 0} | bad)


def test_ten_thousand_groups_are_paced_at_once() -> None:
    pace = Pace(groups_per_step=2_000, max_staleness=4)
    while pace.may_start():
        pace.start()
    assert pace.outstanding == 10_000
    rng = random.Random(0)
    for number in rng.sample(pace.running, 10_000):
        pace.finish(number)
    assert pace.next_step() == list(range(2_000))
