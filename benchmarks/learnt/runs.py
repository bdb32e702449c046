"""Runs of `art train`, each in a fresh data directory, measured from outside."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.task import get_task
from art.task.options import changed_options
from art.testing.judge import ScriptedJudge, grade_messages
from benchmarks.learnt.process_tree import MeasuredCommand
from benchmarks.learnt.results import JUDGE_URL, HeldOut, SeedResult, Settings, TaskResults
from benchmarks.report import environment

POLL_S = 0.2
"""Seconds between two questions whether a run has ended."""
ART = (sys.executable, "-m", "art.cli.main")
"""The program `art` of this environment."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `art train` that is to be made."""

    task: str
    seed: int
    settings: Settings

    def words(self, judge_url: str = JUDGE_URL) -> list[str]:
        """What a user types after `art`."""
        return ["train", self.task, *self.settings.arguments(judge_url), "--seed", str(self.seed)]

    def make_judge(self) -> ScriptedJudge | None:
        """Make the judge that `Judge.command` starts; `None` for a task with a reward of its own."""
        if (judge := self.settings.judge) is None:
            return None
        task = get_task(self.task, self.settings.options, is_tiny=True)
        grade = grade_messages(task.score_messages)
        return ScriptedJudge(grade, noise=judge.noise, position_bias=judge.position_bias)


def measure(plans: Sequence[Plan], folder: Path, *, jobs: int, program: Sequence[str] = ART) -> None:
    """Run all plans, `jobs` at once. What has ended is kept even if others fail.

    Raises:
        RuntimeError: runs failed; the message has the last lines of each.
    """
    for plan in plans:
        TaskResults.open(folder, plan.task, plan.settings)  # other settings are refused before hours of work
    waiting, running, failures = deque(plans), [], list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Running(waiting.popleft(), program))
            for one in [one for one in running if one.command.poll()]:
                running.remove(one)
                with one.cleaned():
                    try:
                        result = one.result()
                    except RuntimeError as error:
                        failures.append(str(error))
                        continue
                    TaskResults.open(folder, one.plan.task, one.plan.settings).put(result, folder)
                    print(_line(one.plan, result), file=sys.stderr, flush=True)
            time.sleep(POLL_S)
    finally:
        for one in running:
            with one.cleaned():
                one.command.end()
    if failures:
        raise RuntimeError("\n\n".join(failures))


class Running:
    """A run of `art train` in a fresh data directory."""

    def __init__(self, plan: Plan, program: Sequence[str]) -> None:
        self.plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="art-benchmark-"))
        self._summary_file = self.folder / "summary.json"
        self._environment = environment("cpu", [])
        places = ["--data-dir", str(self.folder / "data"), "--json", str(self._summary_file)]
        self._open = contextlib.ExitStack()
        judge = plan.make_judge()
        words = plan.words() if judge is None else plan.words(self._open.enter_context(judge).base_url)
        self.command = MeasuredCommand([*program, *words, *places], log=self.folder / "log.txt")

    @contextlib.contextmanager
    def cleaned(self) -> Iterator[None]:
        """Stop the judge and remove the data directory after the body."""
        try:
            yield
        finally:
            self._open.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def result(self) -> SeedResult:
        """Return what the ended run found.

        Raises:
            RuntimeError: it failed.
        """
        shown = shlex.join(["art", *self.plan.words()])
        if not self._summary_file.exists():
            lines = self.command.log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{shown} ended with status {self.command.exit_code}:\n{lines}")
        summary: dict[str, Any] = json.loads(self._summary_file.read_text())
        usage = self.command.usage
        about = {key: value for key, value in self._environment.items() if key != "command"}
        return SeedResult(
            seed=self.plan.seed, metric=summary["metric"], form=self._form(summary), stopped=summary["stopped"],
            before=_held_out(summary, "_before"), after=_held_out(summary, ""),
            rewards=summary["rewards"], headlines=summary["headlines"],
            wall_s=usage.wall_s, cpu_s=usage.cpu_s, peak_memory_bytes=usage.peak_memory_bytes,
            command=shown, environment=about,
        )  # fmt: skip

    def _form(self, summary: dict[str, Any]) -> dict[str, Any]:
        if not summary.get("options"):
            return {}
        return changed_options(get_task(self.plan.task, self.plan.settings.options, is_tiny=True).options)


def _held_out(summary: dict[str, Any], when: str) -> HeldOut:
    low, high = summary[f"interval{when}"]
    return HeldOut(mean=summary[f"evaluation{when}"], low=low, high=high)


def _line(plan: Plan, result: SeedResult) -> str:
    verdict = "learnt" if result.is_learnt else "not shown to be learnt"
    return (
        f"{plan.task} seed {plan.seed}: {result.metric} {result.before.text} -> {result.after.text}, {verdict}, "
        f"{result.wall_s:.0f} s, {result.cpu_s:.0f} CPU s, {result.peak_memory_bytes / 1e9:.1f} GB"
    )
