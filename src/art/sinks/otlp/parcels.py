"""Splits what a sink has to send into requests of a bounded size, and sends them so that nothing good is lost.

A collector may refuse a whole request for one item in it. A refused request is halved until the item is found; only
that is lost. What a collector has accepted is remembered, so that a repeated delivery continues after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from art.sinks.sink import Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")
_HOPELESS = 4
"""Items refused one by one, with none accepted, after which the rest of a parcel counts as refused."""


@dataclass(frozen=True, slots=True)
class Parcel(Generic[T]):
    """Items for one request."""

    items: Sequence[T]
    send: Callable[[Sequence[T]], tuple[int, str]]
    """Sends items. It returns how many were rejected of an accepted request, and why; it raises `Refused` for all."""


def pack(
    items: Iterable[T],
    send: Callable[[Sequence[T]], tuple[int, str]],
    size_of: Callable[[T], int],
    *,
    max_bytes: int,
    max_items: int,
) -> Iterator[Parcel[T]]:
    """Put items into parcels of at most `max_bytes` and `max_items`. A larger item gets a parcel of its own."""
    parcel: list[T] = []
    num_bytes = 0
    for item in items:
        size = size_of(item)
        if parcel and (num_bytes + size > max_bytes or len(parcel) == max_items):
            yield Parcel(parcel, send)
            parcel, num_bytes = [], 0
        parcel.append(item)
        num_bytes += size
    if parcel:
        yield Parcel(parcel, send)


@dataclass(slots=True)
class Counts:
    """What became of the items of one parcel."""

    accepted: int = 0
    lost: int = 0


@dataclass(slots=True)
class Progress:
    """What was sent of one delivery, kept while the delivery is repeated after an error."""

    key: object
    """Tells which delivery it is."""
    num_parcels: int = 0
    """Parcels that are done with."""
    num_accepted: int = 0
    num_lost: int = 0
    reasons: list[str] = field(default_factory=list)

    def send_all(self, parcels: Iterable[Parcel[T]]) -> None:
        """Send the parcels that are not done with. They must be the same, in the same order, each time.

        Raises:
            Refused: all are done with, and some items were refused.
            Exception: a parcel could not be sent now; call this again.
        """
        for number, parcel in enumerate(parcels):
            if number >= self.num_parcels:
                self._send(parcel.items, parcel.send, counts := Counts())
                self.num_parcels += 1
                self.num_accepted += counts.accepted
                self.num_lost += counts.lost
        if self.num_lost:
            reasons = "; ".join(dict.fromkeys(self.reasons))
            raise Refused(f"{self.num_lost} of {self.num_lost + self.num_accepted}: {reasons}", num_lost=self.num_lost)

    def _send(self, items: Sequence[T], send: Callable[[Sequence[T]], tuple[int, str]], counts: Counts) -> None:
        if counts.lost >= _HOPELESS and not counts.accepted:
            counts.lost += len(items)
            return
        try:
            num_rejected, reason = send(items)
        except Refused as error:
            if len(items) > 1:
                middle = len(items) // 2
                self._send(items[:middle], send, counts)
                self._send(items[middle:], send, counts)
                return
            num_rejected, reason = 1, str(error)
        counts.lost += min(num_rejected, len(items))
        counts.accepted += max(len(items) - num_rejected, 0)
        if num_rejected:
            self.reasons.append(reason or "rejected without a reason")
