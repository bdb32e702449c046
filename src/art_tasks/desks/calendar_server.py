"""An MCP server with a calendar of one week, in memory.

`python -m art_tasks.desks.calendar_server` uses stdio, with `--http` HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, timedelta
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError  # the text of other errors does not reach the agent

from art_tasks.desks.calendar_jobs import CLOSES, MONDAY, OPENS, PEOPLE
from art_tasks.desks.rollout_states import RolloutStates


@dataclass
class Event:
    """An event of the calendar. Tools return its fields as they are."""

    id: int
    title: str
    start: str
    """YYYY-MM-DD HH:MM"""
    minutes: int
    people: list[str]

    @property
    def begin(self) -> datetime:
        return datetime.fromisoformat(self.start)

    @property
    def end(self) -> datetime:
        return self.begin + timedelta(minutes=self.minutes)


EVENTS = [
    Event(1, "planning", "2030-01-07 09:00", 60, ["ann", "bob", "cleo", "dan"]),
    Event(2, "interview", "2030-01-07 11:00", 90, ["ann", "dan"]),
    Event(3, "design review", "2030-01-08 14:00", 60, ["bob", "cleo"]),
    Event(4, "dentist", "2030-01-08 09:30", 45, ["cleo"]),
    Event(5, "customer call", "2030-01-09 10:00", 30, ["ann", "bob"]),
    Event(6, "retrospective", "2030-01-11 15:00", 60, ["ann", "bob", "cleo", "dan"]),
]

server = MCPServer(
    "calendar",
    instructions=f"The calendar of {', '.join(PEOPLE)}. Today is Monday, {MONDAY}. Work is from 9:00 to 17:00.",
    log_level="WARNING",
)


def open_calendar(events: Sequence[Event] = EVENTS) -> dict[int, Event]:
    """Return a calendar's events by id."""
    return {event.id: event for event in events}


states: RolloutStates[dict[int, Event]] = RolloutStates(open_calendar)
events = states.current
"""Returns the events of this rollout's calendar, by id."""


# Asynchronous tools run one after the other on the event loop, so calendars need no lock.
@server.tool()
async def list_events(day: str, person: str | None = None) -> list[dict[str, Any]]:
    """Events of a day (YYYY-MM-DD), of one person or of all."""
    on = parse_day(day)
    if person is not None:
        check_people([person])
    matches = [e for e in events().values() if e.begin.date() == on and (person is None or person in e.people)]
    return [asdict(event) for event in sorted(matches, key=lambda event: event.begin)]


@server.tool()
async def search_events(text: str) -> list[dict[str, Any]]:
    """Events whose title contains the text."""
    return [asdict(event) for event in events().values() if text.lower() in event.title.lower()]


@server.tool()
async def find_free_times(day: str, minutes: int, people: list[str]) -> list[str]:
    """Starts, every half hour, at which all these people are free for this many minutes."""
    on = parse_day(day)
    check_people(people)
    if not 0 < minutes <= (CLOSES - OPENS) * 60:
        raise ToolError(f"an event has from 1 to {(CLOSES - OPENS) * 60} minutes, not {minutes}")
    starts = []
    start = datetime(on.year, on.month, on.day, OPENS)
    while start + timedelta(minutes=minutes) <= start.replace(hour=CLOSES, minute=0):
        if not clashes(start, minutes, people):
            starts.append(f"{start:%Y-%m-%d %H:%M}")
        start += timedelta(minutes=30)
    return starts


@server.tool()
async def create_event(title: str, start: str, minutes: int, people: list[str]) -> dict[str, Any]:
    """Make an event. `start` is YYYY-MM-DD HH:MM. Fails if one of the people is busy then."""
    event = Event(max(events(), default=0) + 1, title, start, minutes, people)
    check_event(event)
    events()[event.id] = event
    return asdict(event)


@server.tool()
async def move_event(id: int, start: str) -> dict[str, Any]:
    """Give an event another start, YYYY-MM-DD HH:MM. Fails if one of its people is busy then."""
    old = find_event(id)
    moved = Event(id, old.title, start, old.minutes, old.people)
    check_event(moved)
    events()[id] = moved
    return asdict(moved)


@server.tool()
async def cancel_event(id: int) -> str:
    """Delete an event."""
    return f"cancelled: {events().pop(find_event(id).id).title}"


@server.resource("calendar://people", description="The people of this calendar", mime_type="text/plain")
def people_resource() -> str:
    return "\n".join(PEOPLE)


def parse_day(day: str) -> date:
    try:
        return date.fromisoformat(day)
    except ValueError:
        raise ToolError(f"a day is YYYY-MM-DD, not {day!r}") from None


def find_event(event_id: int) -> Event:
    """Return an event of this rollout's calendar, or tell the agent that there is none with this id."""
    if event_id not in events():
        raise ToolError(f"there is no event {event_id}")
    return events()[event_id]


def check_people(people: list[str]) -> None:
    if unknown := sorted(set(people) - set(PEOPLE)):
        raise ToolError(f"unknown: {', '.join(unknown)}; the calendar is of {', '.join(PEOPLE)}")


def check_event(event: Event) -> None:
    """Tell the agent if an event cannot be in the calendar: wrong start, length or people, or one is busy then."""
    try:
        begin = event.begin
    except ValueError:
        raise ToolError(f"a start is YYYY-MM-DD HH:MM, not {event.start!r}") from None
    if not 0 < event.minutes <= (CLOSES - OPENS) * 60 or not event.people:
        raise ToolError(f"an event has people and from 1 to {(CLOSES - OPENS) * 60} minutes")
    check_people(event.people)
    if busy := clashes(begin, event.minutes, event.people, but=event.id):
        raise ToolError(f"busy then: {', '.join(f'{other.title} (event {other.id})' for other in busy)}")


def clashes(begin: datetime, minutes: int, people: list[str], but: int | None = None) -> list[Event]:
    """Return the events, other than `but`, that one of the people has in these minutes."""
    end = begin + timedelta(minutes=minutes)
    return [
        other
        for other in events().values()
        if other.id != but and set(other.people) & set(people) and other.begin < end and begin < other.end
    ]


def main() -> None:
    states.serve(server, __doc__, 8021)


if __name__ == "__main__":
    main()
