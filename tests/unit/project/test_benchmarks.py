"""The benchmarks run: tiny models and sizes, one round each. What they measure here says nothing."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from art.trainer.step.step_metrics import StepRecord, count_flops
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
    teaching,
    token_file,
    train_step,
)
from benchmarks.gradients import load_policy
from benchmarks.grpo_loops import COMPLETIONS, GENERATE, PUBLISH, TOTAL, TRAIN, Work, run_ours, write_tokenizer
from benchmarks.memory import extra_peak_bytes
from benchmarks.models import model_files
from benchmarks.pipelines.picture import simulated_arms
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
            teaching,
            token_file,
            train_step,
        )
    }[name]
    return command.make_parser({name: module}).parse_args([name, "--quick", "--repeats", "1"])


def test_the_help_lists_all_benchmarks() -> None:
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in command.ALL}
    shown = command.make_parser(modules, options_of=command.DEFAULT).format_help()
    assert not [name for name in command.ALL if f"\n  {name} " not in shown]


def test_real_shapes_measures_steps() -> None:
    args = options("real_shapes")
    args.models = ["0.1 M window"]
    group, row = real_shapes.run(args).rows
    assert group["tree tokens"] == row["tree tokens"] == 600
    assert 2.5 < float(str(group["effective tokens/s"])) / float(str(group["tokens/s"])) < 3
    for cells in (group, row):
        assert 0 < float(str(cells["share of limit"])) < 1.5
        assert float(str(cells["peak GB"])) > 0


def test_operations_from_shapes_are_those_that_the_trainer_counts() -> None:
    with model_files("0.1 M") as files:
        base = load_policy(files, "cpu", "float32").base
    for samples in real_shapes.make_workloads(300, base.vocab_size).values():
        tree = real_shapes.tree_of(samples, base.vocab_size)
        record = StepRecord(
            num_tree_tokens=len(tree),
            num_visible_keys=int(tree.positions.sum()) + len(tree),
            num_rows=len(set(tree.targets.queries.tolist())),
        )
        needed = real_shapes.needed_operations("0.1 M", tree)
        assert needed == count_flops(base, record)
        assert real_shapes.needed_operations("0.1 M window", tree) < needed


def test_a_profile_lists_operators() -> None:
    args = options("step_profile")
    args.models = ["0.1 M"]
    rows = step_profile.run(args).rows
    assert any("mm" in str(row["operator"]) for row in rows)
    shares = [float(str(row["share"])) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < sum(shares) <= 1


def test_head_compares_errors_and_pairs() -> None:
    result = head.run(options("head"))
    cells = {row["way"]: row for row in result.rows}
    assert cells["bfloat16"]["rms"] == pytest.approx(cells["float32"]["rms"], rel=0.5)
    assert float(cells["float32"]["gradient"]) < 1e-5 < float(cells["bfloat16"]["gradient"]) < 0.01  # type: ignore[arg-type]
    assert float(cells["rounded"]["rms"]) > 100 * float(cells["bfloat16"]["rms"])  # type: ignore[arg-type]
    assert float(cells["sampler float32, trainer float32"]["rms"]) == pytest.approx(0.03, rel=0.2)  # type: ignore[arg-type]


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


def test_growth_counts_what_is_shared(tmp_path: Path) -> None:
    result = growth.run(options("growth"))
    cells = {(row["grows"], row["number"]): row for row in result.rows}
    assert cells["trajectories", 1]["padded tokens ratio"] == 1
    assert cells["trajectories", 4]["tree tokens"] == 64 + 4 * 15
    assert cells["turns", 4]["padded tokens ratio"] == 4  # 4 rows, all as long as the last, which is the whole tree
    command.draw(growth, result, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.slow
def test_grammar_measures_masks_and_an_engine() -> None:
    result = grammar.run(options("grammar"))
    assert {row["grammar"] for row in result.rows} == set(grammar.GRAMMARS)
    assert sum("times its plain" in note for note in result.notes) == 2


def test_generate_samples_with_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "installed_vllm_python", lambda: None)  # its start takes half a minute
    args = options("generate")
    args.loads = [(2, 1), (1, 2)]
    result = generate.run(args)
    assert [row["engine"] for row in result.rows] == ["ART", "ART, no adapter", "generate + peft"] * 2
    assert [row["requests at once"] for row in result.rows] == ["2"] * 3 + ["2 (1 prompts)"] * 3
    assert all(float(str(row["tokens/s"])) > 0 for row in result.rows)
    assert "vLLM is not installed: it did not take part" in result.notes
    command.draw(generate, result, tmp_path / "generate.png")
    assert (tmp_path / "generate.png").stat().st_size > 10_000


@pytest.mark.parametrize("stream", [False, True])
def test_gateway_overhead_asks_the_real_gateway(stream: bool, tmp_path: Path) -> None:
    args = options("gateway_overhead")
    args.model, args.stream = str(make_tokenizer(tmp_path)), stream
    args.conversations, args.concurrency, args.turns = 2, 2, 2
    (row,) = gateway_overhead.run(args).rows
    assert row["requests"] == 4
    assert float(str(row["server CPU ms per request"]).split()[0]) > 0


def test_client_overhead_has_all_clients_ask_the_same_server(tmp_path: Path) -> None:
    args = options("client_overhead")
    args.tokenizer, args.in_flight, args.requests = str(make_tokenizer(tmp_path)), "2", 4
    rows = client_overhead.run(args).rows
    assert [row["client"] for row in rows] == ["aiohttp alone", "openai_client()", "the same, stock"]
    assert all(float(str(row["ms CPU per request"]).split()[0]) > 0 for row in rows)


@pytest.mark.parametrize("way", ["trainer", "chunks", "naive"])
def test_logprobs_of_every_way_are_the_same(way: str) -> None:
    work = logprobs.Work(vocab_size=700, num_targets=300, device="cpu", num_threads=1)
    found, expected = logprobs.measure_way(way, work), logprobs.measure_way("naive", work)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(found.gradient, expected.gradient, atol=1e-4)
    assert found.timing.wall_s > 0


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


def test_prompts_of_a_round_are_words_of_the_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    work = Work(tmp_path, "cpu", "float32", 1, num_prompts=2, prompt_tokens=5, vocab_size=30, num_rounds=1)
    write_tokenizer(tmp_path, work.vocab_size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompt in work.prompts(0):
        assert tokenizer(" ".join(f"w{token}" for token in prompt))["input_ids"] == prompt
        assert tokenizer.eos_token_id not in prompt
    assert work.prompts(0) != work.prompts(1)


@pytest.mark.slow
def test_a_grpo_step_of_each_side(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    result = grpo_step.run(options("grpo_step"))
    assert [row["side"] for row in result.rows] == ["ART", "TRL", "TRL tuned"]
    assert {"generate", "train"} <= {part for part, value in result.rows[1].items() if isinstance(value, float)}
    command.draw(grpo_step, result, tmp_path / "grpo_step.png")


@pytest.mark.slow
def test_constraints_have_masks_and_replays() -> None:
    cells = {row["drawn"]: row for row in constraints.run(options("constraints")).rows}
    assert list(cells) == ["free", "grammar", "top_k", "top_p"]
    assert (cells["free"]["masks"], cells["free"]["gathered"]) == (0, 0)
    assert (
        0 < int(str(cells["grammar"]["masks"])) < int(str(cells["grammar"]["rows"])) < int(str(cells["free"]["rows"]))
    )
    assert cells["top_k"]["gathered"] == cells["top_k"]["rows"] == cells["top_p"]["masks"]
    assert all(int(str(row["replay, tokens/s"])) > 0 for name, row in cells.items() if name != "free")


@pytest.mark.slow
def test_logprobs_in_fresh_processes(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    result = logprobs.run(options("logprobs"))
    assert [row["way"] for row in result.rows] == ["trainer", "TRL", "chunks", "naive"]
    command.draw(logprobs, result, tmp_path / "logprobs.png")


def test_grpo_tokens_count_what_is_computed() -> None:
    """By hand: a prompt of 3 tokens; each completion is computed but for its last token."""
    work = Work(Path(), "cpu", "float32", 1, num_prompts=2, prompt_tokens=3, vocab_size=9, num_rounds=1)
    completions = COMPLETIONS * (grpo_loops.NEW_TOKENS - 1)
    ours, theirs = grpo_step.computed_tokens(work)
    assert ours == 2 * (3 + completions) + 2 * (3 + completions)
    assert theirs == 2 * (8 * 3 + completions) + 2 * 8 * (3 + grpo_loops.NEW_TOKENS)


def test_the_memory_of_an_array_is_seen() -> None:
    assert 60e6 < extra_peak_bytes(lambda: np.ones(8 * 2**20), "cpu") < 100e6


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


def test_the_gate_is_simulated_and_measured() -> None:
    args = options("gate")
    args.gate_tokens = 2000
    result = gate.run(args)
    cells = {(row["sampler"], row["number type"], row["rollouts"]): row for row in result.rows}
    right = [row for row in result.rows if str(row["sampler"]).startswith(("right", "real"))]
    assert all(float(str(row["1 token"]).split(" / ")[0]) < 1.0 for row in right)
    assert cells["wrong: adapter not applied, KL 0.3", "bfloat16", 128]["500 tokens"] == "100 / 100"
    assert float(cells["real: engine and trainer, 2 layers", "float32", 8]["rms"]) < 1e-3


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


def test_simulated_arms_meet_the_same_latencies() -> None:
    synchronous, ahead = simulated_arms()
    assert len(synchronous.rollouts) == len(ahead.rollouts) == 6 * 64
    lengths = [sorted(round(one.ended_s - one.began_s, 6) for one in arm.rollouts) for arm in (synchronous, ahead)]
    assert lengths[0] == lengths[1]
    assert 1.5 < synchronous.wall_s / ahead.wall_s < 3


@pytest.mark.slow
def test_the_token_file_is_weighed() -> None:
    rows = {str(row["workload"]): row for row in token_file.run(options("token_file")).rows}
    assert [row["trained tokens"] for row in rows.values()] == [40, 512, 384]
    assert 7 < float(str(rows["prompt groups"]["bytes per token"])) < 12
    assert isinstance(rows["agents"]["file"], Spread)


def test_teaching_runs_the_pace_and_the_curriculum(monkeypatch: pytest.MonkeyPatch) -> None:
    args = options("teaching")
    monkeypatch.setattr(teaching, "POPULATIONS", teaching.POPULATIONS[:1])
    rows = {row["settings"]: row for row in teaching.run(args).rows}
    share = {name: median_of(row["useful groups, of all"]) for name, row in rows.items()}
    assert share["curriculum"] > share["plain"]


def median_of(cell: object) -> float:
    assert isinstance(cell, Spread)
    return cell.median
