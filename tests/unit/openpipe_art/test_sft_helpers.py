"""`art.utils.sft`: chunks, schedules and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError, TrajectoryError
from art.utils.sft import (
    create_lr_schedule,
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
    train_sft_from_file,
)


def said(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "ok"}]}


def numbers(trajectories: Any) -> list[int]:
    return [int(trajectory.messages()[0]["content"]) for trajectory in trajectories]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(said(number)) + "\n\n" for number in range(23)))
    return path


def test_schedules() -> None:
    assert create_lr_schedule(5, 1e-4) == pytest.approx([1e-4, 7.5e-5, 5e-5, 2.5e-5, 0.0])
    assert create_lr_schedule(4, 1.0, "constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert create_lr_schedule(3, 1.0, "cosine", min_lr=0.5) == pytest.approx([1.0, 0.75, 0.5])
    assert create_lr_schedule(7, 1.0, warmup_steps=5, min_lr=0.5)[:5] == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert create_lr_schedule(1, 1.0) == create_lr_schedule(1, 1.0, warmup_steps=1) == [1.0]
    assert create_lr_schedule(0, 1.0) == []
    with pytest.raises(ConfigError, match="'cubic'"):
        create_lr_schedule(1, 1.0, "cubic")  # type: ignore[arg-type]


@pytest.mark.parametrize("initial_step", [0, 3, 12, 15, 24])
def test_chunks_begin_exactly_where_an_interrupted_run_ended(initial_step: int) -> None:
    trajectories = [art.Trajectory(messages_and_choices=said(number)["messages"]) for number in range(23)]

    def batches(begin: int) -> list[tuple[list[int], float]]:
        found = []
        chunks = create_sft_dataset_iterator(
            trajectories, chunk_size=5, epochs=2, batch_size=2, initial_step=begin, show_progress=False
        )
        step = begin
        for chunk in chunks:
            assert (chunk.step, chunk.epoch, chunk.epoch_step) == (step, step // 12, step % 12)
            rates = chunk.config.learning_rate
            assert isinstance(rates, list)
            for i, rate in enumerate(rates):
                found.append((numbers(chunk.trajectories[2 * i : 2 * i + 2]), rate))
            step += len(rates)
        return found

    whole = batches(0)
    assert len(whole) == 24
    assert sorted(number for batch, _ in whole[:12] for number in batch) == list(range(23))
    assert whole[:12] != whole[12:]
    assert batches(initial_step) == whole[initial_step:]


def test_reading_a_file(file: Path) -> None:
    assert get_file_row_count(file) == 23
    assert numbers(iterate_file(file, shuffle_buffer_size=0)) == list(range(23))
    twice = numbers(iterate_file(file, epochs=2, shuffle_buffer_size=5))
    assert sorted(twice) == sorted([*range(23), *range(23)])
    assert twice[:23] != list(range(23))
    assert numbers(iterate_file(file, epochs=2, shuffle_buffer_size=5, initial_skip=30)) == twice[30:]
    for line, what in (
        ("{", "line 24 is not a conversation"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "last"),
    ):
        bad = file.with_name("bad.jsonl")
        bad.write_text(file.read_text().replace("\n\n", "\n") + line + "\n")
        with pytest.raises(TrajectoryError, match=what):
            list(iterate_file(bad))


async def test_training_on_a_file(file: Path) -> None:
    calls: list[tuple[list[int], Any]] = []

    class Model:
        async def train_sft(self, trajectories: Any, config: Any, _config: Any, verbose: bool) -> None:
            calls.append((numbers(trajectories), config))

    await train_sft_from_file(Model(), file, batch_size=2, peak_lr=1e-3)
    await train_sft_from_file(Model(), file, batch_size=2, peak_lr=1e-3, initial_step=3, final_step=5)
    (first, rates), (second, _), (part, middle) = calls
    assert sorted(first + second) == list(range(23))
    assert (len(first), len(second)) == (20, 3)
    assert part == first[6:10]
    assert middle.learning_rate == rates.learning_rate[3:5]
