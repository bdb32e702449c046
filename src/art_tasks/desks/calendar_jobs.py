"""Jobs for the calendar: questions and changes about a week of four people, drawn with the week from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date, datetime, timedelta
from typing import Any, ClassVar

from art_tasks.desks.server_task import RUBRIC, Call, Case, DeskJob, LocalServer, ServerTask, field_job, planned_job

PEOPLE = ["ann", "bob", "cleo", "dan"]
MONDAY = date(2030, 1, 7)
"""First day of the week, and today for the agent: the same in every rollout."""
DAYS = [str(MONDAY + timedelta(days=i)) for i in range(5)]
OPENS, CLOSES = 9, 17
"""Hours between which people work."""
QUESTIONS = ((3, "When is the {}?", "start", "title"), (2, "How many minutes is the {}?", "minutes", "id"))
"""Difficulty, text, the field that answers, and the one that a beginner reads."""
_TITLES = [
    "planning", "interview", "design review", "dentist", "customer call", "retrospective", "budget round", "workshop",
    "lunch talk", "training", "fire drill", "code review", "standup", "quarter review", "site visit", "press call",
    "photo shoot", "tax meeting", "tea tasting", "team outing",
]  # fmt: skip
Week = list[dict[str, Any]]
"""Events as rows: id, title, start (YYYY-MM-DD HH:MM), minutes, people."""


def question_job(title: str, question: tuple[int, str, str, str], titles: Sequence[str]) -> DeskJob:
    difficulty, task, field, other = question
    slips = [("search_events", {"text": wrong}) for wrong in titles if wrong != title]
    return field_job(task.format(title), difficulty, ("search_events", {"text": title}), field, other, slips)


def first_event_job(person: str, day: str) -> DeskJob:
    slips: list[Call] = [("list_events", {"day": day, "person": wrong}) for wrong in PEOPLE if wrong != person]
    slips += [("list_events", {"day": wrong, "person": person}) for wrong in DAYS if wrong != day]
    call = ("list_events", {"day": day, "person": person})
    return field_job(f"First event of {person} on {day}?", 3, call, "title", "start", slips)


def cancel_job(event: int, events: Sequence[int]) -> DeskJob:
    return DeskJob(
        task=f"Cancel event {event}.", difficulty=1, call=("cancel_event", {"id": event}),
        answer=lambda result: result.removeprefix("cancelled: "), mistaken=lambda result: "cancelled",
        slips=tuple(("cancel_event", {"id": wrong}) for wrong in events if wrong != event),
    )  # fmt: skip


def move_job(event: int, start: str, events: Sequence[int]) -> DeskJob:
    day, clock = start.split()
    slips: list[Call] = [("move_event", {"id": wrong, "start": start}) for wrong in events if wrong != event]
    slips += [("move_event", {"id": event, "start": f"{wrong} {clock}"}) for wrong in DAYS if wrong != day]
    call = ("move_event", {"id": event, "start": start})
    return field_job(f"Move event {event} to {start}.", 3, call, "start", "title", slips)


def draw_week(rng: random.Random) -> Week:
    """Draw six events of which no two that share a person overlap."""
    week: Week = []
    titles = rng.sample(_TITLES, 6)
    while len(week) < 6:
        minutes = rng.choice((30, 45, 60, 90))
        people = sorted(rng.sample(PEOPLE, rng.randrange(1, 5)))
        start = f"{rng.choice(DAYS)} {rng.randrange(OPENS, CLOSES - 1):02}:{rng.choice(('00', '30'))}"
        if is_free(week, start, minutes, people):
            week.append(
                {"id": len(week) + 1, "title": titles[len(week)], "start": start, "minutes": minutes, "people": people}
            )
    return week


def is_free(week: Week, start: str, minutes: int, people: Sequence[str], but: int | None = None) -> bool:
    """Whether none of the people has an event, other than `but`, in these minutes."""
    begin = datetime.fromisoformat(start)
    end = begin + timedelta(minutes=minutes)
    for event in week:
        other = datetime.fromisoformat(event["start"])
        overlaps = other < end and begin < other + timedelta(minutes=event["minutes"])
        if event["id"] != but and overlaps and set(people) & set(event["people"]):
            return False
    return True


def _question_case(rng: random.Random, week: Week) -> Case:
    event, question = rng.choice(week), rng.choice(QUESTIONS)
    return _case(week, question_job(event["title"], question, _TITLES), week, event[question[2]])


def _first_case(rng: random.Random, week: Week) -> Case:
    event = rng.choice(week)
    person, day = rng.choice(event["people"]), event["start"][:10]
    first = min((e for e in week if person in e["people"] and e["start"].startswith(day)), key=lambda e: e["start"])
    return _case(week, first_event_job(person, day), week, first["title"])


def _cancel_case(rng: random.Random, week: Week) -> Case:
    event = rng.choice(week)
    job = cancel_job(event["id"], range(1, 8))
    return _case(week, job, [e for e in week if e is not event], event["title"])


def _move_case(rng: random.Random, week: Week) -> Case:
    event = rng.choice(week)
    start = _free_start(rng, week, event)
    return _case(week, move_job(event["id"], start, range(1, 7)), _moved(week, event, start), start)


def _cancel_by_title_case(rng: random.Random, week: Week) -> Case:
    event = rng.choice(week)
    task = f"Cancel the {event['title']}. At what time would it have begun?"
    job = planned_job(task, 4, [_find(event), ("cancel_event", {"id": event["id"]})], event["start"])
    return _case(week, job, [e for e in week if e is not event], event["start"][11:])


def _move_by_title_case(rng: random.Random, week: Week) -> Case:
    event = rng.choice(week)
    start = _free_start(rng, week, event)
    job = planned_job(
        f"Move the {event['title']} to {start}. How many minutes does it take?", 4,
        [_find(event), ("move_event", {"id": event["id"], "start": start})], str(event["minutes"]),
    )  # fmt: skip
    return _case(week, job, _moved(week, event, start), event["minutes"])


def _book_case(rng: random.Random, week: Week) -> Case:
    """Ask for a new event at the first time at which all are free."""
    day, minutes = rng.choice(DAYS), rng.choice((30, 60, 90))
    people = sorted(rng.sample(PEOPLE, rng.randrange(2, 4)))
    title = rng.choice([title for title in _TITLES if title not in {e["title"] for e in week}])
    half_hours = [f"{day} {hour:02}:{half}" for hour in range(OPENS, CLOSES) for half in ("00", "30")]
    start = next(start for start in half_hours if is_free(week, start, minutes, people))
    made = {"id": 7, "title": title, "start": start, "minutes": minutes, "people": people}
    asked = {"day": day, "minutes": minutes, "people": people}
    job = planned_job(
        f"Book {title!r} for {minutes} minutes on {day} with {', '.join(people)}, at the first half hour at which all "
        "are free. When does it begin?", 5,
        [("find_free_times", asked), ("create_event", {k: v for k, v in made.items() if k != "id"})], start,
    )  # fmt: skip
    return _case(week, job, [*week, made], start[11:])


def _cancel_all_case(rng: random.Random, week: Week) -> Case:
    event = rng.choice(week)
    person, day = rng.choice(event["people"]), event["start"][:10]
    gone = sorted((e for e in week if person in e["people"] and e["start"].startswith(day)), key=lambda e: e["start"])
    calls: list[Call] = [("list_events", {"day": day, "person": person})]
    calls += [("cancel_event", {"id": e["id"]}) for e in gone]
    job = planned_job(f"Cancel all events of {person} on {day}. How many were there?", 5, calls, str(len(gone)))
    return _case(week, job, [e for e in week if e not in gone], len(gone))


def _free_start(rng: random.Random, week: Week, event: dict[str, Any]) -> str:
    """Draw another full hour at which the people of an event are free."""
    starts = [
        f"{day} {hour:02}:00"
        for day in DAYS
        for hour in range(OPENS, CLOSES - 1)
        if f"{day} {hour:02}:00" != event["start"]
    ]
    return rng.choice(
        [start for start in starts if is_free(week, start, event["minutes"], event["people"], event["id"])]
    )


def _find(event: dict[str, Any]) -> Call:
    return ("search_events", {"text": event["title"]})


def _moved(week: Week, event: dict[str, Any], start: str) -> Week:
    return [e | {"start": start} if e is event else e for e in week]


def _case(week: Week, job: DeskJob, end: Week, answer: object) -> Case:
    return Case(job=job, start=week, end=end, answer=str(answer), changes=end != week)


_KINDS: tuple[tuple[int, Callable[[random.Random, Week], Case]], ...] = (
    (1, _cancel_case), (2, _question_case), (3, _first_case), (3, _move_case), (4, _cancel_by_title_case),
    (4, _move_by_title_case), (5, _book_case), (5, _cancel_all_case),
)  # fmt: skip


class Calendar(ServerTask):
    """A task: answer questions about a week, and change it, with the six tools of an MCP server.

    A tiny model does jobs of one call; plans of several calls are beyond it.
    """

    name: ClassVar[str] = "calendar"
    description: ClassVar[str] = (
        "answer questions about a week's events, and change them, with the tools of an MCP server"
    )
    rubric: ClassVar[str | None] = RUBRIC.format(
        subject="the calendar", right="for the right event, person, day and time", result="the start or the title"
    )
    server: ClassVar[LocalServer] = LocalServer("calendar_server")

    def draw_case(self, rng: random.Random, max_difficulty: int) -> Case:
        week = draw_week(rng)
        return rng.choice([kind for level, kind in _KINDS if level <= max_difficulty])(rng, week)

    def open_state(self, rows: list[dict[str, Any]]) -> dict[int, Any]:
        week: dict[int, Any] = self.server.module.open_calendar([self.server.module.Event(**row) for row in rows])
        return week

    def rows_of(self, state: dict[int, Any]) -> list[dict[str, Any]]:
        return [asdict(state[key]) | {"people": sorted(state[key].people)} for key in sorted(state)]
