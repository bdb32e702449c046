"""A task with an MCP server: answer questions about the week of four people, and book, move and cancel events.

    user       Move event 2 to 2030-01-10 13:00.
    assistant  move_event(id=2, start="2030-01-10 13:00")      tool  {"id": 2, "title": "interview", ...}
    assistant  complete_task(summary="2030-01-10 13:00")       reward 1

Each scenario has a week of its own: its events are drawn with the job.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any, ClassVar

from art.tasks.desks import calendar_jobs
from art.tasks.desks.cases import Case
from art.tasks.desks.desk_jobs import Job
from art.tasks.desks.local_server import LocalServer
from art.tasks.desks.server_task import ServerTask


class Calendar(ServerTask):
    """A task: answer questions about a week, and change it, with the six tools of an MCP server.

    A tiny model does jobs of one call; plans of several calls are beyond it.
    """

    name: ClassVar[str] = "calendar"
    description: ClassVar[str] = (
        "answer questions about a week's events, and change them, with the tools of an MCP server"
    )
    rubric: ClassVar[str | None] = (
        "A good rollout does exactly what the user asks about the calendar: it makes the change that was asked for and "
        "no other, for the right event, person, day and time, or looks the answer up. It ends with complete_task and a "
        "summary that states the result which the tools returned, such as the start or the title, in few words. Calls "
        "that fail or are not needed make it worse. A wrong change is worse than no change, an answer that no tool "
        "result supports is a guess, and a rollout without complete_task is worst."
    )
    server: ClassVar[LocalServer] = LocalServer("calendar_server", states="calendars")

    def draw_case(self, rng: random.Random, max_difficulty: int) -> Case:
        return calendar_jobs.draw_case(rng, max_difficulty)

    def open_state(self, rows: list[dict[str, Any]]) -> dict[int, Any]:
        week: dict[int, Any] = self.server.module.open_calendar([self.server.module.Event(**row) for row in rows])
        return week

    def rows_of(self, state: dict[int, Any]) -> list[dict[str, Any]]:
        return [asdict(state[key]) | {"people": sorted(state[key].people)} for key in sorted(state)]

    def read_job(self, task: str, messages: list[dict[str, Any]]) -> Job | None:
        return calendar_jobs.read_job(task)
