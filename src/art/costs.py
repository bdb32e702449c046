"""The ledger: every booking of money, tokens and device time, by source.

    ledger.book("judge/ruler", usd=0.002, prompt_tokens=900, completion_tokens=80)
    ledger.close("train", step=3)             ends a row of the history; "train" becomes the first part of its sources
    ledger.totals()                           {"train/judge/ruler": Amount(usd=0.002, ...)}

With a path, `book` appends a line to that file before it returns, and the file is all that a ledger knows. A killed run
therefore forgets nothing, a continued run counts nothing twice, and two processes can share the file. A row of the
history has the bookings since the row before it.

    {"source": "judge/ruler", "usd": 0.002, "priced": 1, "prompt_tokens": 900, "completion_tokens": 80}
    {"source": "policy", "prompt_tokens": 5000, "completion_tokens": 700, "counters": [5000, 0, 700]}
    {"closed": "train", "step": 3}

A row of the history that has a name (`row_id`) is ended once, and what its trajectories report is booked once, even if
the process is killed in between and does it again.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from art.errors import BudgetError, ConfigError
from art.storage.jsonl import append_lines, read_rows_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The sum of one or more bookings, which are the entries of a `Ledger`."""

    usd: float = 0.0
    """Cost of the bookings whose price is known."""
    priced: int = 0
    """Number of bookings whose price is known."""
    unpriced: int = 0
    """Number of bookings whose price is not known."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens` that came from a prefix cache."""
    completion_tokens: int = 0
    seconds: float = 0.0
    """Device time."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def to_row(self) -> dict[str, Any]:
        """The fields that are not 0, for JSON."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Amount:
        """Make an amount from what `to_row` returned. Unknown keys, and values that are no numbers, are ignored."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: row[name] for name in names if isinstance(row.get(name), (int, float))})

    def tokens(self) -> dict[str, int]:
        """Token counts by kind, without zeros."""
        kinds = {"prompt": self.prompt_tokens, "cached": self.cached_tokens, "completion": self.completion_tokens}
        return {kind: count for kind, count in kinds.items() if count}

    def describe(self, name: str) -> str:
        """Write a line about a source, e.g. `judge/ruler        0.0020 USD  900 prompt, 80 completion tokens`."""
        money = f"{self.usd:>10.4f} USD" if self.priced else f"{'no price':>14}"
        used = ", ".join(f"{count:,} {kind}" for kind, count in self.tokens().items())
        parts = [f"{used} tokens"] if used else []
        if self.seconds:
            parts.append(f"{self.seconds:,.1f} s")
        if self.unpriced:
            why = "" if importlib.util.find_spec("litellm") else "; litellm, which knows prices, is not installed"
            parts.append(f"the price of {self.unpriced} requests is not known{why}")
        return "  ".join([f"{name:<28} {money}", *parts])


def name_row(step: Mapping[str, Amount], total: Mapping[str, Amount]) -> dict[str, float]:
    """Name the costs of a step, and of everything so far, as metrics.

    Example: 0.1 USD of `train/judge/ruler` and 0.2 of `gpu/trainer` give `costs/train/judge/ruler`,
    `costs/train/judge` and `costs/train` of 0.1, `costs/gpu/trainer` and `costs/gpu` of 0.2, and `costs/all` of 0.3.
    """
    usd: defaultdict[str, float] = defaultdict(float)
    others: dict[str, float] = {}
    for amounts, costs, tokens, seconds in (
        (step, "costs", "data/step_tokens", "time/step_s"),
        (total, "costs/cum", "data/cum/tokens", "time/cum/s"),
    ):
        for source, amount in amounts.items():
            if amount.priced:
                for name in (*accumulate(source.split("/"), "{}/{}".format), "all"):
                    usd[f"{costs}/{name}"] += amount.usd
            others |= {f"{tokens}/{source}/{kind}": float(count) for kind, count in amount.tokens().items()}
            if amount.seconds:
                others[f"{seconds}/{source}"] = amount.seconds
    return {**usd, **others}


logger = logging.getLogger(__name__)

SHARED = frozenset({"gpu", "generator"})
"""First parts of sources that belong to neither `train` nor `eval`: rented machines, and writing scenarios."""
CONTEXTS = frozenset({"train", "eval"})
"""First parts of sources that already say what they belong to. They get no other first part."""
_SOURCE = re.compile(r"[\w.-]+(/[\w.-]+)*")
_RESERVED = frozenset({"cum", "all"})


class Ledger:
    """Records what was spent on what, and raises when a budget is spent. Threads may share a ledger."""

    def __init__(self, max_usd: float | None = None, *, path: Path | None = None) -> None:
        """
        Args:
            max_usd: the budget. `check` raises once it is spent. Callers check before each request and each step, so
                requests under way can exceed it a little.
            path: a file of JSON lines, created by the first booking. Without a path, bookings end with the process.
        """
        if max_usd is not None and not max_usd >= 0:
            raise ConfigError(f"a budget must be 0 USD or more, got {max_usd}")
        self.max_usd = max_usd
        self.path = path
        self._lock = threading.RLock()
        self._offset = 0
        self._open: defaultdict[str, Amount] = defaultdict(Amount)
        """Amounts since the last row, by source."""
        self._closed: defaultdict[str, Amount] = defaultdict(Amount)
        """Amounts in earlier rows, by split and source."""
        self._by_step: defaultdict[int, defaultdict[str, Amount]] = defaultdict(lambda: defaultdict(Amount))
        self._counters: Sequence[int] = (0, 0, 0)
        self._direct: set[str] = set()
        """Sources that book for themselves. What trajectories report about them must not be booked again."""
        self._warned: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        """Names of open rows, and the sources that were booked for them by `book_reported`."""
        self._last_row: tuple[str, dict[str, Amount]] | None = None
        """Name of the last row that was ended, if it has one, and its amounts."""
        self._read()
        self._direct |= self._open.keys() - {source for _, source in self._reported}

    def __deepcopy__(self, memo: Any) -> Ledger:
        return self  # copies of a model or its settings spend the same money

    def __reduce__(self) -> Any:
        """Pickle the ledger for a worker, whose bookings come back to the file of this one.

        Raises:
            ConfigError: it has no file, so bookings could not come back.
        """
        if self.path is None:
            raise ConfigError("a ledger without `path` cannot go to a worker: use `model.costs`, or give it a file")
        return _ledger_in_worker, (self.max_usd, self.path, self.spent_usd)

    # -- booking --

    def book(
        self, source: str, *, usd: float | None = None, priced: bool = True, prompt_tokens: int = 0,
        cached_tokens: int = 0, completion_tokens: int = 0, seconds: float = 0.0, row_id: str | None = None,
    ) -> None:  # fmt: skip
        """Add one booking: money, tokens or device time that `source` used.

        Args:
            source: a path such as `judge/ruler`. Metrics have a sum for each of its parts.
            usd: the cost; `None` if it is not known.
            priced: false if nobody charges, as for a policy's tokens on your own machine.
            row_id: name of the row of the history that the booking was made for.

        Raises:
            ConfigError: `source` is not a path, or `usd` is not a finite number.
        """
        parts = source.split("/")
        if not _SOURCE.fullmatch(source) or _RESERVED & set(parts):
            raise ConfigError(
                f"a source of costs is a path like 'judge/ruler', without {sorted(_RESERVED)}; got {source!r}"
            )
        if usd is not None and not math.isfinite(usd):
            raise ConfigError(f"costs of {source!r} must be a finite number of USD, got {usd}")
        amount = Amount(
            usd=usd or 0.0, priced=int(usd is not None), unpriced=int(usd is None and priced),
            prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, completion_tokens=completion_tokens,
            seconds=seconds,
        )  # fmt: skip
        with self._lock:
            if amount.unpriced and self.max_usd is not None and source not in self._warned:
                self._warned.add(source)
                logger.warning("the price of %s is not known, so it does not count towards the budget", source)
            self._direct.add(source)
            self._write({"source": source, **amount.to_row(), **({} if row_id is None else {"row_id": row_id})})

    def book_reported(self, costs: Mapping[str, float], row_id: str | None = None) -> None:
        """Book costs that trajectories report, by source. Sources that book for themselves are skipped.

        Args:
            row_id: name of the row that the trajectories belong to. Each source is booked once for it.
        """
        with self._lock:
            self._read()
            if row_id is not None and self._last_row is not None and self._last_row[0] == row_id:
                return
            for source, usd in costs.items():
                is_booked = row_id is not None and (row_id, source) in self._reported
                if usd and math.isfinite(usd) and not is_booked and source not in self._direct:
                    self.book(source, usd=usd, row_id=row_id)
                    self._direct.discard(source)

    def book_counters(self, counters: Sequence[int], price: Callable[[int, int, int], float | None]) -> None:
        """Book the policy's tokens that a server counted since the last booking.

        Args:
            counters: prompt, cached and completion tokens since the server began. A counter that fell belongs to a
                new server.
            price: USD for a number of prompt, cached and completion tokens; `None` if nobody charges.
        """
        with self._lock:
            self._read()
            grown = [new - old if new >= old else new for new, old in zip(counters, self._counters, strict=True)]
            if not any(grown):
                return
            usd = price(*grown)
            amount = Amount(
                usd=usd or 0.0, priced=int(usd is not None), prompt_tokens=grown[0], cached_tokens=grown[1],
                completion_tokens=grown[2],
            )  # fmt: skip
            self._write({"source": "policy", **amount.to_row(), "counters": list(counters)})

    def close(self, split: str, step: int, row_id: str | None = None) -> dict[str, float]:
        """End a row of the history: assign the bookings since the last row to a split and a step.

        Args:
            row_id: name of the row. If the last row that was ended has this name, its numbers are returned again.

        Returns:
            Metrics of a row of the history: `costs/train/judge/ruler`, the sums `costs/train` and `costs/all`, the
            sums over all rows as `costs/cum/...`, tokens as `data/step_tokens/...`, seconds as `time/step_s/...`.
        """
        with self._lock:
            self._read()
            if self._last_row is not None and self._last_row[0] == row_id:
                return name_row(self._last_row[1], self._closed)
            if not self._open and not self._closed:
                return {}
            step_amounts = {full_name(source, split): amount for source, amount in self._open.items()}
            if self._open:
                self._write({"closed": split, "step": step, **({} if row_id is None else {"row_id": row_id})})
            return name_row(step_amounts, self._closed)

    # -- sums --

    @property
    def spent_usd(self) -> float:
        return math.fsum(amount.usd for amount in self.totals().values())

    def totals(self) -> dict[str, Amount]:
        """All amounts by source. Sources booked since the last `close` do not have their split as first part yet."""
        with self._lock:
            self._read()
            totals = self._closed.copy()
            for source, amount in self._open.items():
                totals[source] += amount
            return dict(sorted(totals.items()))

    def by_step(self) -> dict[int, dict[str, Amount]]:
        """The amounts of rows that were ended, by step and source."""
        with self._lock:
            self._read()
            return {step: dict(amounts) for step, amounts in self._by_step.items()}

    def begin_from(self, spent_usd: float) -> None:
        """In a worker: take over what the script had spent when it sent the call, in place of what was known here."""
        self._closed.clear()
        self._open.clear()
        self._closed["script"] = Amount(usd=spent_usd, priced=1)

    def check(self) -> None:
        """Raise a `BudgetError` if the budget is spent. The message says on what."""
        if self.max_usd is None or (spent_usd := self.spent_usd) < self.max_usd:
            return
        paid = sorted(((name, amount) for name, amount in self.totals().items() if amount.usd), key=lambda x: -x[1].usd)
        on = ", ".join(f"{name} {amount.usd:.4f}" for name, amount in paid) or "nothing"
        raise BudgetError(
            f"the budget is {self.max_usd:.4f} USD, and {spent_usd:.4f} USD are spent: {on}. With a higher budget the "
            "run continues where it stopped"
        )

    def lines(self) -> list[str]:
        """Describe the costs for people: one line per source, then the sum."""
        totals = self.totals()
        if not totals:
            return []
        limit = "" if self.max_usd is None else f" of {self.max_usd:.4f}"
        has_price = any(amount.priced for amount in totals.values())
        spent = f"{self.spent_usd:>10.4f}{limit} USD" if has_price else f"{'no price':>14}"
        return [*(amount.describe(name) for name, amount in totals.items()), f"{'in all':<28} {spent}"]

    def summary(self) -> dict[str, Any]:
        """Return the budget, the money spent and the amounts by source, as JSON data."""
        by_source = {name: amount.to_row() for name, amount in self.totals().items()}
        return {"spent_usd": self.spent_usd, "budget_usd": self.max_usd, "by_source": by_source}

    # -- the file --

    def _write(self, row: dict[str, Any]) -> None:
        if self.path is None or undelivered is not None:
            self._fold(row)
            if self.path is not None and undelivered is not None:
                undelivered.append((self.path, row))
            return
        append_lines(self.path, [row | {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}])
        self._read()

    def _read(self) -> None:
        """Read the lines that this or another process appended since the last read."""
        if self.path is not None and undelivered is None:
            rows, self._offset = read_rows_from(self.path, self._offset)
            for row in rows:
                self._fold(row)

    def _fold(self, row: Mapping[str, Any]) -> None:
        if (counters := row.get("counters")) is not None:
            self._counters = counters
        row_id = row.get("row_id")
        if isinstance(source := row.get("source"), str):
            self._open[source] += Amount.from_row(row)
            if row_id is not None:
                self._reported.add((row_id, source))
            elif counters is None:
                self._direct.add(source)  # also if another process booked it
        if isinstance(split := row.get("closed"), str):
            amounts = {full_name(name, split): amount for name, amount in self._open.items()}
            for name, amount in amounts.items():
                self._closed[name] += amount
                self._by_step[row.get("step", 0)][name] += amount
            self._last_row = None if row_id is None else (row_id, amounts)
            self._open.clear()
            self._reported.clear()


undelivered: list[tuple[Path, dict[str, Any]]] | None = None
"""In a worker of a pool: bookings that its script does not have yet, with the file that they belong to. Ledgers of a
worker are in memory. `None` in every other process."""


def take_undelivered() -> list[tuple[Path, dict[str, Any]]]:
    """Take the bookings of this worker that its script does not have yet."""
    taken = list(undelivered or ())
    del (undelivered or [])[: len(taken)]
    return taken


def book_delivered(bookings: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    """Write bookings of a worker to the files that they belong to, which the ledgers of this process read."""
    recorded_at = datetime.now(UTC).isoformat(timespec="seconds")
    for path, row in bookings:
        append_lines(path, [row | {"recorded_at": recorded_at}])


def _ledger_in_worker(max_usd: float | None, path: Path, spent_usd: float) -> Ledger:
    ledger = Ledger(max_usd, path=path)
    ledger.begin_from(spent_usd)
    return ledger


def context_of(split: str) -> str:
    """Return the first part of the sources booked for a split: `eval` for `val` and `test`, else the split itself."""
    return {"val": "eval", "test": "eval"}.get(split, split)


def full_name(source: str, split: str) -> str:
    """Return a source with the first part that it gets when a row of `split` is ended, if it has none of its own."""
    names_its_own = source.partition("/")[0] in SHARED | CONTEXTS
    return source if names_its_own else f"{context_of(split)}/{source}"


class _Price(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenPrice(_Price):
    """Prices of tokens in USD per million."""

    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Price of prompt tokens that were computed earlier; by default the same as `prompt`."""

    def usd(self, *, prompt_tokens: int, cached_tokens: int = 0, completion_tokens: int) -> float:
        """Return the price of some tokens in USD.

        Example: 2 million prompt tokens, half of them cached, at 4 and cached at 1 USD cost 5 USD.
        """
        cached = self.prompt if self.cached is None else self.cached
        fresh_tokens = prompt_tokens - cached_tokens
        return (fresh_tokens * self.prompt + cached_tokens * cached + completion_tokens * self.completion) / 1e6


class Prices(_Price):
    """Prices of a model's own work. Those of judges and generators are in `JudgeSettings`, or litellm knows them."""

    policy: TokenPrice | None = None
    """Price of the tokens that the model reads and writes, where somebody charges for them."""
    device_usd_per_hour: float | None = Field(default=None, ge=0)
    """Price of the machine that serves and trains the model, with all its devices, for each hour that it is rented."""

    def device_usd(self, seconds: float) -> float | None:
        """Cost of device time; `None` if it has no price."""
        return None if self.device_usd_per_hour is None else self.device_usd_per_hour * seconds / 3600


class PolicyMeter:
    """Measures device time between two bookings, and books it with the policy's tokens.

    It is started when the model is registered, since the processes that load the model already occupy the devices.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        """Time of the last lap, by `time.monotonic`."""

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def start(self, since: float) -> None:
        """Start at `since`, unless the meter runs already."""
        self._since = self._since or since

    def lap(self) -> float:
        """End a lap: return the seconds since the last lap, or since the start."""
        now = time.monotonic()
        passed_s, self._since = now - (self._since or now), now
        return passed_s

    def book(
        self, ledger: Ledger, prices: Prices, counters: tuple[int, int, int] | None, *,
        passed_s: float, trainer_s: float,
    ) -> None:  # fmt: skip
        """Book the policy's tokens and the device time of the last lap.

        Args:
            counters: prompt, cached and completion tokens since the server started; `None` if they are not known.
            passed_s: length of the last lap.
            trainer_s: part of the lap in which the trainer worked. The rest went to rollouts, rewards and waiting.
        """

        def price(prompt: int, cached: int, completion: int) -> float | None:
            if prices.policy is None:
                return None
            return prices.policy.usd(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)

        if counters is not None:
            ledger.book_counters(counters, price)
        trainer_s = min(trainer_s, passed_s)
        for use, seconds in (("trainer", trainer_s), ("rollouts", passed_s - trainer_s)):
            if seconds > 0:
                usd = prices.device_usd(seconds)
                ledger.book(f"gpu/{use}", usd=usd, priced=usd is not None, seconds=seconds)


def close_row(
    ledger: Ledger, reported: Mapping[str, float], split: str, step: int, row_id: str | None = None
) -> dict[str, float]:
    """Book the costs that trajectories report, in USD by source, then end a row of the history; see `Ledger.close`."""
    prefix = f"{context_of(split)}/"  # older code puts the split into the name
    ledger.book_reported({source.removeprefix(prefix): usd for source, usd in reported.items()}, row_id)
    return ledger.close(split, step, row_id)
