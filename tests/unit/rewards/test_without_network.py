"""The scripted judge and generator, which need no network: right for any task, with errors of any size."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from art.errors import ConfigError, JudgeError
from art.rewards import JudgeSettings, Ruler, params_at, score_group
from art.tasks.tic_tac_toe import TicTacToe
from art.testing.judge import ScriptedJudge, grade_conduct, grade_messages
from art.testing.scripted_server import ScriptedServer
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes import judge_command as judge
from art_recipes.scenarios import Writer, generate_dataset

TASK = """
from art.task import Task
from art.trajectory import Trajectory


class Count(Task):
    name = "count"
    description = "count to three"

    def scenarios(self, split, *, seed, count):
        return [self.scenario(split, seed, index, {}) for index in range(count)]

    async def rollout(self, model, scenario, *, rollout_index=0, step=None):
        raise NotImplementedError

    def score_messages(self, messages):
        return sum(number in messages[-1]["content"] for number in "123") / 3


def backwards(messages):
    return 1 - Count().score_messages(messages)
"""


def rollouts(*answers: str) -> TrajectoryGroup:
    question = {"role": "user", "content": "Count to three."}
    return TrajectoryGroup(
        [Trajectory(messages_and_choices=[question, {"role": "assistant", "content": answer}]) for answer in answers]
    )


def rewards_of(group: TrajectoryGroup) -> list[float]:
    return [trajectory.reward for trajectory in group]


COUNTS = rollouts("1 2", "1 2 3", "nothing", "3")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Run `art judge serve` as a program, yield its address, and end it by Ctrl-C."""
    (tmp_path / "counting.py").write_text(TASK)
    started: list[subprocess.Popen[str]] = []

    def serve(*options: str) -> str:
        command = [sys.executable, "-m", "art.cli.main", "judge", "serve", *options]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/v1", said)
        assert address, process.communicate()[1]
        return address[0]

    yield serve
    for process in started:
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=20)
        assert (process.returncode, complaint) == (0, "")


async def test_the_command_ranks_rollouts_of_a_users_task(served: Callable[..., str], settings: JudgeSettings) -> None:
    ruler = Ruler("openai/judge", extra_litellm_params=params_at(served("--task", "counting:Count")), settings=settings)
    assert rewards_of(await score_group(COUNTS, ruler)) == pytest.approx([2 / 3, 1, 0, 1 / 3])


async def test_the_command_ranks_by_a_function_and_writes_scenarios(settings: JudgeSettings, tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(TASK)
    (tmp_path / "inputs.txt").write_text("one?\n\ntwo?\nthree?\n")
    given = options("--score", f"{tmp_path}/counting.py:backwards", "--inputs", f"{tmp_path}/inputs.txt")
    with ScriptedServer(judge.scripted_models(given)) as server:
        ruler = Ruler("openai/judge", extra_litellm_params=params_at(server.base_url), settings=settings)
        assert rewards_of(await score_group(COUNTS, ruler)) == pytest.approx([1 / 3, 0, 1, 2 / 3])
        dataset = await generate_dataset("count", 3, Writer("generator", base_url=server.base_url, settings=settings))
    assert {scenario.input for scenario in dataset.scenarios} == {"one?", "two?", "three?"}


# -- what a judge goes by --


async def test_noise_and_order_bias_have_the_requested_size(settings: JudgeSettings) -> None:
    groups = [rollouts(*(f"{i} {j}" for j in range(5))) for i in range(20)]

    async def scores(**options: float) -> list[list[float]]:
        with ScriptedJudge(lambda trajectory: 0.5, **options) as judge:  # type: ignore[arg-type]
            ruler = Ruler("openai/j", extra_litellm_params=params_at(judge.base_url), settings=settings)
            return [rewards_of(group) for group in await asyncio.gather(*(score_group(g, ruler) for g in groups))]

    assert {score for group in await scores() for score in group} == {0.5}
    noisy = [score for group in await scores(noise=0.1) for score in group]
    assert statistics.stdev(noisy) == pytest.approx(0.1, rel=0.25)
    assert all(sorted(group) == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7]) for group in await scores(position_bias=0.2))


def said(*answers: str, errors: int = 0) -> dict[str, Any]:
    tools = [{"role": "tool", "tool_call_id": "c", "content": "Error: no"}] * errors
    answered = [{"role": "assistant", "content": answer} for answer in answers]
    return {"id": "t", "context": [{"role": "user", "content": "?"}], "messages": [*tools, *answered]}


def test_the_measure_of_conduct() -> None:
    def score(trajectory: dict[str, Any]) -> float:
        graded = grade_conduct(trajectory)
        assert isinstance(graded, tuple)
        return graded[0]

    long, short, failing, silent = said("word " * 40), said("yes"), said("yes", errors=2), said("")
    assert score(short) > score(long) > score(silent)
    assert score(failing) == pytest.approx(score(short) - 0.2)
    call = {"id": "c", "type": "function", "function": {"name": "complete_task", "arguments": "{}"}}
    done = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert score(done) > score(silent)


def test_games_of_tic_tac_toe_are_scored() -> None:
    def game(board: str, move: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": board}, {"role": "assistant", "content": move}]}

    grade = grade_messages(TicTacToe().score_messages)
    boards = [("XX3\nOO6\n789", "3"), ("XOX\nXOO\nOX9", "9"), ("X23\nOO6\n7X9", "2"), ("XX3\nOO6\n789", "1")]
    assert [grade(game(*board)) for board in boards] == [0.9, 0.6, 0.35, 0.1]


# -- failures --


async def test_failures_have_the_requested_rate(settings: JudgeSettings) -> None:
    grade = grade_conduct
    with ScriptedJudge(grade, fault_rate=0.3, seed=1) as judge:
        ruler = Ruler("openai/j", extra_litellm_params=params_at(judge.base_url), settings=settings)
        for i in range(20):
            await score_group(rollouts(f"{i}", f"{i} 1"), ruler)
        assert 23 <= len(judge.requests) <= 40, "what failed was asked again"
    with ScriptedJudge(grade, fault_rate=1.0) as judge, pytest.raises(JudgeError):
        await score_group(COUNTS, Ruler("openai/j", extra_litellm_params=params_at(judge.base_url), settings=settings))


# -- the command's options --


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    judge.add_serve_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *given])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--task", "benchmarks.games.nim:Nim"], "--task benchmarks.games.nim:Nim: class Nim has no `score_messages"),
        (["--task", "nowhere:Task"], "there is no module 'nowhere'"),
        (["--score", "art.errors:__doc__"], "--score art.errors:__doc__: expected a function"),
        (["--inputs", "no/such/file"], "--inputs no/such/file: cannot be read: No such file"),
        (["--noise", "2"], "--noise must be 0 to 1, got 2.0"),
        (["--fault-rate", "-1"], "--fault-rate must be 0 to 1, got -1.0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        judge.scripted_models(options(*given))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Write five scenarios."}],
        [
            {"role": "system", "content": "You write tasks."},
            {"role": "user", "content": [{"type": "text", "text": "Go"}]},
        ],
        [],
    ],
)
def test_requests_of_other_programs_are_told_what_is_answered(messages: list[Any]) -> None:
    status, answer = judge.scripted_models(options("--noise", "0.1"))({"model": "judge", "messages": messages})
    assert status == 400
    assert "answers only what ART's own judges ask, and with --inputs FILE what" in answer["error"]["message"]


def test_a_port_in_use_is_reported() -> None:
    with ScriptedServer(lambda body: (200, {})) as server:
        port = server.base_url.split(":")[2].removesuffix("/v1")
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there"):
            judge.serve(options("--port", port))
