"""What a journal says by now: a head of a few fields, and the lines that still count.

Reading a journal and writing it fold the same records, so a run that goes on knows what a resumed one would read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from art.asynchronous.journal.lines import Span

VERSION = 1


@dataclass(slots=True)
class Head:
    """The first line of a compacted journal."""

    identity: dict[str, Any]
    """What must not change between runs."""
    version: int = VERSION
    """Form of the file."""
    next_number: int = 0
    next_position: int = 0
    chooser_state: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] | None = None
    """A `PendingStep`."""

    def record(self) -> dict[str, Any]:
        return {"event": "opened", **asdict(self)}


class JournalState:
    """Folds records. Keeps no content of rollouts in memory, only where their lines are."""

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self.head = Head(dict(identity))
        self.groups: dict[int, list[Span]] = {}
        """Lines of groups that are not trained yet: `started` first, then what ended."""
        self.evaluations: dict[int, list[Span]] = {}
        """Lines of evaluations under way, by step: `evaluation_begun` first."""

    def fold(self, record: Mapping[str, Any], span: Span) -> None:
        """Add a record, which lies at `span` in the file."""
        event = record["event"]
        if (chooser_state := record.get("chooser_state")) is not None:
            self.head.chooser_state = dict(chooser_state)
        if event == "opened":
            self.head = Head(**{key: value for key, value in record.items() if key != "event"})
        elif event == "started":
            plan = record["plan"]
            self.head.next_number = max(self.head.next_number, plan["number"] + 1)
            self.head.next_position = max(self.head.next_position, plan["position"] + 1)
            self.groups[plan["number"]] = [span]
            if "replaces" in record:
                self.groups.pop(record["replaces"], None)
        elif event == "rollout_ended":
            lines = self.evaluations if "evaluation" in record else self.groups
            if (known := lines.get(record.get("evaluation", record.get("group")))) is not None:
                known.append(span)  # else it was late, and its group has left
        elif event == "group_ended":
            if (known := self.groups.pop(record["group"], None)) is not None and record["groups"]:
                self.groups[record["group"]] = [known[0], span]
        elif event == "step_begun":
            self.head.pending = dict(record["pending"])
        elif event == "step_ended":
            self.head.pending = None
            for number in record["numbers"]:
                self.groups.pop(number, None)
        elif event == "evaluation_begun":
            self.evaluations.setdefault(record["step"], [span])
        elif event == "evaluation_ended":
            self.evaluations.pop(record["step"], None)

    def spans(self) -> list[list[Span]]:
        """Return the lists of lines that count. A compaction moves the lines, and changes the lists in place."""
        return [*self.groups.values(), *self.evaluations.values()]

    @property
    def live_bytes(self) -> int:
        return sum(span.length for spans in self.spans() for span in spans)
