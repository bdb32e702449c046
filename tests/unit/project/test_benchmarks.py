"""The benchmarks run: tiny models and sizes, one round each. What they measure here says nothing."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import __main__ as command
from benchmarks import (
    client_overhead,
    constraints,
    gate,
    gateway_overhead,
    generate,
    grammar,
    growth,
    grpo_loops,
    grpo_step,
    head,
    logprobs,
    pipeline,
    real_shapes,
    step_profile,
    token_file,
    train_step,
)
from benchmarks.grpo_loops import GENERATE, PUBLISH, TOTAL, TRAIN, Work, run_ours
from benchmarks.models import model_files
from benchmarks.report import Result, Spread, markdown
from benchmarks.timing import Timing, alternate, ratio
from tests.support.gateway import make_tokenizer


def options(name: str) -> argparse.Namespace:
    module = {
        m.__name__.rpartition(".")[2]: m
        for m in (
            client_overhead,
            constraints,
            gate,
            gateway_overhead,
            generate,
            grammar,
            growth,
            grpo_step,
            head,
            logprobs,
            real_shapes,
            step_profile,
            token_file,
            train_step,
        )
    }[name]
    return command.make_parser({name: module}).parse_args([name, "--quick", "--repeats", "1"])


def test_the_help_lists_all_benchmarks() -> None:
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in command.ALL}
    shown = command.make_parser(modules, options_of=command.DEFAULT).format_help()
    assert not [name for name in command.ALL if f"\n  {name} " not in shown]


def test_train_step_compares_the_same_gradient(tmp_path: Path) -> None:
    args = options("train_step")
    args.workloads = "extended"
    result = train_step.run(args)
    cells = {row["way"]: row for row in result.rows}
    # Per turn the history, the observation and the answer, less the last token of each request.
    assert cells["one by one"]["tokens"] == sum(32 + 12 * turn + 4 + 8 - 1 for turn in range(12))
    # 12 turns behind the prompt, plus nothing twice.
    assert cells["tree"]["tokens"] == 32 + 12 * 12 - 1
    assert cells["plain row"]["tokens"] == cells["tree"]["tokens"]
    assert float(cells["tree"]["gradient error"]) < 1e-4  # type: ignore[arg-type]
    assert float(cells["padded"]["gradient error"]) < 1e-4  # type: ignore[arg-type]
    picture = command.draw(train_step, result, tmp_path / "train_step.png")
    assert "train_step.png" in picture
    assert (tmp_path / "train_step.png").stat().st_size > 10_000


@pytest.mark.parametrize("stream", [False, True])
def test_gateway_overhead_asks_the_real_gateway(stream: bool, tmp_path: Path) -> None:
    args = options("gateway_overhead")
    args.model, args.stream = str(make_tokenizer(tmp_path)), stream
    args.conversations, args.concurrency, args.turns = 2, 2, 2
    (row,) = gateway_overhead.run(args).rows
    assert row["requests"] == 4
    assert float(str(row["server CPU ms per request"]).split()[0]) > 0


def test_our_side_of_a_grpo_step_trains_what_it_sampled() -> None:
    ours, theirs = multiprocessing.Pipe()
    with model_files("0.1 M") as files:
        work = Work(
            model=files.base,
            device="cpu",
            dtype="float32",
            num_threads=1,
            num_prompts=1,
            prompt_tokens=16,
            vocab_size=files.vocab_size,
            num_rounds=2,
        )
        thread = threading.Thread(target=grpo_loops.serve, args=(run_ours, work, theirs))
        thread.start()
        for number in range(2):
            ours.send(number)
            assert ours.poll(60), "the step did not end"
            times = ours.recv()
            parts = sum(times[part].wall_s for part in (GENERATE, TRAIN, PUBLISH))
            assert 0 < parts <= times[TOTAL].wall_s
        ours.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_grpo_step_of_each_side(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    result = grpo_step.run(options("grpo_step"))
    assert [row["side"] for row in result.rows] == ["ART", "TRL", "TRL tuned"]
    assert {"generate", "train"} <= {part for part, value in result.rows[1].items() if isinstance(value, float)}
    command.draw(grpo_step, result, tmp_path / "grpo_step.png")


def test_contenders_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    contenders = {name: lambda number, name=name: calls.append((name, number)) for name in "ab"}
    timings = alternate(contenders, repeats=2, device="cpu")  # type: ignore[arg-type]
    assert calls == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert [len(timing) for timing in timings.values()] == [2, 2]


def test_a_ratio_is_taken_round_by_round() -> None:
    slow, fast = ([Timing(cpu_s=s, wall_s=1.0) for s in seconds] for seconds in ((2.0, 9.0, 4.0), (1.0, 3.0, 1.0)))
    assert ratio(slow, fast, "cpu_s") == Spread(3.0, 2.0, 4.0)


def test_a_result_becomes_a_table() -> None:
    result = Result(summary="Of what.", rows=[{"way": "tree", "time": Spread(1.0, 0.5, 2.0)}], notes=["a note"])
    lines = markdown("train_step", result).splitlines()
    assert lines[0] == "## train_step"
    assert lines[4:7] == ["| way  | time         |", "|------|--------------|", "| tree | 1 (0.5 to 2) |"]


def test_the_command_writes_table_json_and_plot(tmp_path: Path) -> None:
    assert command.plot_path("growth", None, tmp_path / "growth.json") == tmp_path / "growth.png"
    assert command.plot_path("growth", None, tmp_path / "all.json") == tmp_path / "all.growth.png"
    assert command.plot_path("growth", tmp_path / "x.png", None) == tmp_path / "x.png"
    assert command.plot_path("growth", None, None) is None
    assert json.dumps(command.to_json({}, {}))


@pytest.mark.slow
def test_asynchronous_training_is_compared_with_synchronous(tmp_path: Path) -> None:
    args = command.make_parser({"pipeline": pipeline}).parse_args(["pipeline", "--quick", "--tools", "waiting"])
    result = pipeline.run(args)
    rows = {row["staleness"]: row for row in result.rows}
    assert set(rows) == {0, 2}
    assert all((row["discarded rollouts"], row["groups"]) == (0, 16) for row in rows.values())
    assert rows[0]["staleness of groups"] == "0: 16"
    assert rows[2]["staleness of groups"] == "0: 8, 1: 8"
    assert all(float(row["share of it"].median) > 0.3 for row in rows.values())  # type: ignore[union-attr]
    command.draw(pipeline, result, tmp_path / "pipeline.png")
