"""The gallery: a card for each ready task, whose figures are those of the result files."""

from __future__ import annotations

import re
import shlex

import pytest

pytest.importorskip("psutil")

from art.cli.main import build_parser
from art.task import get_task
from art_recipes.training.task_training import check_judge
from benchmarks.learnt.results import HeldOut, SeedResult, Settings, TaskResults
from tests.support.notebooks import SOURCES
from tools.pages.tasks import NOT_MEASURED, figures, ready_tasks, render_page


def seed_result(seed: int, after: float) -> SeedResult:
    return SeedResult(
        seed=seed, metric="win", before=HeldOut(mean=0.5, low=0.4, high=0.6),
        after=HeldOut(mean=after, low=after - 0.1, high=after + 0.1), rewards=[0.1], headlines=[0.5], wall_s=10,
        cpu_s=90, peak_memory_bytes=10**9, command="art train game", environment={},
    )  # fmt: skip


def test_a_card_claims_no_more_than_its_worst_seed() -> None:
    results = TaskResults(
        task="game", settings=Settings(evaluate=400), seeds=[seed_result(1, 0.9), seed_result(2, 0.6)]
    )
    assert figures(results).startswith(
        "**win: 0.60 or more after training in each of 2 seeds** (1, 2); not shown to be learnt in seed 2. 1.5 minutes of "
        "CPU time.\n\n| random | fixed answer | best script | before | after |"
    )
    assert "| 0.50 (0.50 to 0.50) | 0.75 (0.60 to 0.90) |" in figures(results)
    assert figures(None) == NOT_MEASURED


def test_every_ready_task_has_a_card_with_its_command() -> None:
    page = render_page()
    names = [name for name, _ in ready_tasks()]
    assert "tic_tac_toe" in names
    for name in names:
        card = page.partition(f"\n### {name}\n")[2].partition("</div>")[0]
        needs_judge = get_task(name).needs_judge
        assert (f"`art train {name} --judge " if needs_judge else f"`art train {name}`") in card
        assert (f"`art judge serve --task {name} " in card) == needs_judge
        assert get_task(name).description[1:] in card


def test_the_commands_of_a_task_without_a_reward_are_accepted() -> None:
    card = render_page().partition("\n### chat_rubric\n")[2].partition("</div>")[0]
    commands = [shlex.split(command)[1:] for command in re.findall(r"`(art [^`]*)`", card)]
    judge, training = (build_parser(words).parse_args(words) for words in commands)
    assert training.judge_url == f"http://127.0.0.1:{judge.port}/v1"
    check_judge(get_task(training.task), training.judge)


def test_every_notebook_is_linked() -> None:
    page = render_page()
    assert [source.stem for source in SOURCES if f"notebooks/{source.stem}.ipynb)" not in page] == []
