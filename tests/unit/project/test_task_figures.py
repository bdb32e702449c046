"""The benchmark `tasks`: what it measures from outside, what it keeps, and the pages that it writes into."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.learnt.baselines import measure_baselines
from benchmarks.learnt.blocks import ROOT, pages, renewed
from benchmarks.learnt.policies import POLICIES
from benchmarks.learnt.process_tree import MeasuredCommand
from benchmarks.learnt.results import Baseline, HeldOut, SeedResult, Settings, TaskResults, read_all
from benchmarks.learnt.runs import Plan, measure
from benchmarks.learnt.tables import block, row_of_seed, row_of_task

SETTINGS = Settings(evaluate=400)
FAKE_ART = """
import json, sys
words = dict(zip(sys.argv[3::2], sys.argv[4::2]))
seed = int(words["--seed"])
assert words["--held-out"] == "400"
if seed == 13:
    sys.exit("no luck today")
found = {"metric": "win", "stopped": None, "rewards": [0.1, 0.2], "headlines": [0.0, 1.0],
         "evaluation_before": 0.5, "interval_before": [0.4, 0.6], "evaluation": 0.8, "interval": [0.7, seed / 10]}
with open(words["--json"], "w") as file:
    json.dump(found, file)
"""
"""A program that answers like `art train`; seed 13 fails."""


def seed_result(seed: int, after: float) -> SeedResult:
    return SeedResult(
        seed=seed, metric="win", before=HeldOut(mean=0.5, low=0.4, high=0.6),
        after=HeldOut(mean=after, low=after - 0.1, high=after + 0.1), rewards=[0.1, 0.2], headlines=[0.5, after],
        wall_s=10, cpu_s=20, peak_memory_bytes=10**9, command="art train game", environment={"machine": {}, "commit": "c"},
    )  # fmt: skip


def finish(command: MeasuredCommand) -> None:
    deadline = time.monotonic() + 120
    while not command.poll():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_time_and_memory_of_a_child_count_although_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.learnt.process_tree.LOOK_S", 0.0)
    work = "import time; held = bytearray(80_000_000)\nwhile time.process_time() < 0.4: pass"
    parent = textwrap.dedent(
        f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {work!r}])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # the kernel keeps its times to itself
        time.sleep(2)
        """
    )
    command = MeasuredCommand([sys.executable, "-c", parent], log=tmp_path / "log.txt")
    finish(command)
    assert command.usage.cpu_s >= 0.35
    assert command.usage.peak_memory_bytes > 80_000_000


def test_a_command_is_ended_with_what_measures_it(tmp_path: Path) -> None:
    command = MeasuredCommand([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log.txt")
    command.end()
    assert command.poll()
    assert command.exit_code == -signal.SIGTERM
    measures = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from benchmarks.learnt.process_tree import MeasuredCommand
        command = MeasuredCommand([sys.executable, "-c", "import time; time.sleep(60)"], log=Path({str(tmp_path)!r}, "log"))
        print(command.pid, flush=True)
        time.sleep(60)
        """
    )
    measuring = subprocess.Popen([sys.executable, "-c", measures], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert measuring.stdout is not None
    measured = psutil.Process(int(measuring.stdout.readline()))
    measuring.kill()
    measuring.wait()
    psutil.wait_procs([measured], timeout=60)
    assert not measured.is_running()


def test_seeds_that_ended_are_kept_when_another_fails(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE_ART)
    plans = [Plan("game", seed, SETTINGS) for seed in (9, 13, 8)]
    with pytest.raises(RuntimeError, match=r"(?s)art train game --held-out 400 --seed 13 ended with.*no luck today"):
        measure(plans, tmp_path, jobs=2, program=[sys.executable, str(fake)])
    [results] = read_all(tmp_path)
    assert [one.seed for one in results.seeds] == [8, 9]
    assert results.seeds[0].after == HeldOut(mean=0.8, low=0.7, high=0.8)
    assert results.seeds[0].command == "art train game --held-out 400 --seed 8"


def test_a_seed_replaces_itself_only(tmp_path: Path) -> None:
    results = TaskResults.open(tmp_path, "game", SETTINGS)
    for seed, after in ((2, 0.7), (1, 0.8), (2, 0.9)):
        results = results.put(seed_result(seed, after), tmp_path)
    again = TaskResults.open(tmp_path, "game", SETTINGS)
    assert again == results
    assert [(one.seed, one.after.mean) for one in again.seeds] == [(1, 0.8), (2, 0.9)]


def test_learnt_means_that_the_intervals_are_apart() -> None:
    results = TaskResults(task="game", settings=SETTINGS, seeds=[seed_result(1, 0.75), seed_result(2, 0.69)])
    assert [one.is_learnt for one in results.seeds] == [True, False]
    assert row_of_task(results)["intervals apart"] == "1 of 2 seeds"
    assert row_of_task(results)["after"] == "0.72 (0.69 to 0.75)"
    assert row_of_seed(results.seeds[0])["before"] == "0.500 (0.400 to 0.600)"


def test_a_page_gets_the_tables_that_it_asks_for() -> None:
    small = seed_result(1, 0.8).model_copy(update={"form": {"size": 3}})
    results = [TaskResults(task="game", settings=SETTINGS, seeds=[small])]
    page = ROOT / "docs" / "tasks.md"

    def renew(text: str) -> str:
        return renewed(text, page, "learnt", lambda page, name: block(results, page, name))

    new = renew("a\n<!-- learnt -->\nold\n<!-- /learnt -->\nb\n<!-- learnt game -->\n<!-- /learnt -->\nc\n")
    assert "old" not in new
    assert "| game | win |  |  |  | 0.50 | 0.80 | 1 of 1 seeds |" in new
    assert "](images/tasks/game.png)" in new
    assert "The tiny model got the form `size=3`." in new
    assert new.endswith("<!-- /learnt -->\nc\n")
    assert renew(new) == new
    with pytest.raises(ValueError, match="no results of 'chess'; there are game"):
        renew("<!-- learnt chess -->\n<!-- /learnt -->")


@pytest.mark.parametrize("name", list(POLICIES))
async def test_the_best_script_is_better_than_chance(name: str) -> None:
    measured = await measure_baselines(name, count=20)
    assert measured["rule"].mean > 0.8
    assert measured["random"].mean < 0.75
    assert measured["constant"].mean <= measured["rule"].mean


def test_baselines_are_kept_beside_the_seeds(tmp_path: Path) -> None:
    results = TaskResults.open(tmp_path, "game", SETTINGS).put(seed_result(1, 0.8), tmp_path)
    chance = Baseline(about="any move", mean=0.1, low=0.0, high=0.2)
    results.put_baselines(dict.fromkeys(("random", "constant", "rule"), chance), tmp_path)
    [again] = read_all(tmp_path)
    assert again.put(seed_result(2, 0.9), tmp_path).baselines["random"] == chance
    assert row_of_task(again)["fixed answer"] == "0.10"


def test_tables_in_pages_are_current() -> None:
    results = read_all()
    for page in pages():
        text = page.read_text()
        new = renewed(text, page, "learnt", lambda page, name: block(results, page, name))
        assert new == text, f"{page}: renew it with: python -m benchmarks tasks --table"
