"""What each project has used in each month, by model and API key, and what it may use. Durable, and cheap enough to ask
before each request.

    answer or step --> add: totals in memory, and pending rows --> the next commit of the record writes them
    request        --> check: totals in memory against the project's quota

An answer's tokens are written in the transaction that records the answer, so `kill -9` loses none that was sent.
"""

from __future__ import annotations

import calendar
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from art.config import PricesConfig
from art.errors import QuotaError
from art.protocol.organisation.usage_report import KeyUsage, ModelUsage, ProjectUsage, Quota, UsageReport, Used
from art.storage.database import Database, uninterrupted

SCHEMA = """
CREATE TABLE IF NOT EXISTS usage_by_key (
    month TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, key_id TEXT NOT NULL, prompt INTEGER NOT NULL,
    cached INTEGER NOT NULL, completion INTEGER NOT NULL, steps INTEGER NOT NULL, sampling_s REAL NOT NULL,
    training_s REAL NOT NULL, usd REAL NOT NULL, PRIMARY KEY (month, project, name, key_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quotas (project TEXT PRIMARY KEY, quota TEXT NOT NULL) WITHOUT ROWID;
"""
UNKNOWN_KEY = ""
"""Key id of usage that was counted by an older version, which did not count by key."""
_EVERY = ""
"""The project under which the quota of projects without one of their own is stored. No project has an empty name."""


@dataclass(slots=True)
class Amounts:
    """Amounts of everything that is counted."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    steps: int = 0
    sampling_s: float = 0.0
    training_s: float = 0.0
    usd: float = 0.0

    def add(self, other: Amounts) -> None:
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion
        self.steps += other.steps
        self.sampling_s += other.sampling_s
        self.training_s += other.training_s
        self.usd += other.usd

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion

    @property
    def device_s(self) -> float:
        return self.sampling_s + self.training_s


_NAMES = tuple(field.name for field in fields(Amounts))
_ON_CONFLICT = "ON CONFLICT (month, project, name, key_id) DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in _NAMES
)
_ADD = f"INSERT INTO usage_by_key VALUES ({', '.join('?' * (4 + len(_NAMES)))}) {_ON_CONFLICT}"
Row = tuple[str, str, str, str]
"""Month, project, name of a model, and id of the API key that asked."""
Pending = Mapping[Row, Amounts]


class UsageBook:
    """Counts usage by project and month, and checks quotas. Use it in one event loop, as the server does."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now
        self.prices = PricesConfig()
        self._pending: dict[Row, Amounts] = {}
        self._by_month: dict[str, defaultdict[str, Amounts]] = {}
        """Amounts by project, of each month that the clock has shown since the start."""
        self._totals: defaultdict[str, Amounts] = defaultdict(Amounts)
        """The amounts of the current month."""
        self._quotas: dict[str, Quota] = {}
        self._month, self._begins_at, self._ends_at = "", float("inf"), float("-inf")

    async def start(self) -> None:
        """Read the totals of this month and the quotas. The tables must exist."""
        rows = self._database.read("SELECT project, quota FROM quotas")
        self._quotas = {project: Quota.model_validate_json(quota) for project, quota in rows}
        self._turn_month()

    # -- counting --

    def add(self, project: str, name: str, amounts: Amounts, *, key_id: str = UNKNOWN_KEY) -> None:
        """Count amounts for a model and the key that asked. Their price is added. They are stored with the next
        `take_pending`."""
        self.keep_pending(self.count(project, name, amounts, key_id=key_id))

    def count(self, project: str, name: str, amounts: Amounts, *, key_id: str = UNKNOWN_KEY) -> Pending:
        """Count amounts as `add` does, and return them for a caller that stores them in a transaction of its own."""
        self._turn_month()
        amounts.usd += self.prices.usd(
            prompt_tokens=amounts.prompt, cached_tokens=amounts.cached, completion_tokens=amounts.completion,
            device_s=amounts.device_s,
        )  # fmt: skip
        self._totals[project].add(amounts)
        return {(self._month, project, name, key_id): amounts}

    def take_pending(self) -> Pending:
        """Return what is not stored yet. The caller stores it by `write_usage` in a transaction of its own, and gives
        it to `keep_pending` if that fails."""
        pending, self._pending = self._pending, {}
        return pending

    def keep_pending(self, usage: Pending) -> None:
        """Store this usage, which is counted already, with the next `take_pending`."""
        for row, amounts in usage.items():
            if (pending := self._pending.get(row)) is None:
                self._pending[row] = amounts
            else:
                pending.add(amounts)

    async def flush(self) -> None:
        """Store what is not stored yet.

        Raises:
            DiskFullError, StorageError: nothing was stored. The next call stores it.
        """
        if self._pending:
            await uninterrupted(self._store_pending())

    async def _store_pending(self) -> None:
        pending = self.take_pending()
        try:
            await self._database.run(lambda db: write_usage(db, pending))
        except Exception:
            self.keep_pending(pending)
            raise

    # -- quotas --

    def check_sampling(self, project: str) -> None:
        """
        Raises:
            QuotaError: the project has used up what it may, so it gets no further answers this month.
        """
        if (quota := self.quota(project)) is None:
            return
        self._turn_month()
        used = self._totals[project]
        self._check(project, "tokens", used.tokens, quota.tokens)
        self._check_both(project, used, quota)

    def check_training(self, project: str, num_queued: int) -> None:
        """
        Args:
            num_queued: training steps of the project that have not ended.

        Raises:
            QuotaError: the project has used up what it may, so it gets no further training this month.
        """
        if (quota := self.quota(project)) is None:
            return
        self._turn_month()
        used = self._totals[project]
        self._check(project, "steps", used.steps + num_queued, quota.steps)
        self._check_both(project, used, quota)

    def quota(self, project: str) -> Quota | None:
        """Return the limits that apply to a project: its own, or those of every project."""
        return self._quotas.get(project) or self._quotas.get(_EVERY)

    async def set_quota(self, project: str | None, quota: Quota) -> None:
        """Set the quota of a project, or with `None` of every project without its own. Without limits it is removed."""
        key = project or _EVERY
        is_set = quota != Quota()
        row = (key, quota.model_dump_json())

        def store(db: sqlite3.Connection) -> None:
            if is_set:
                db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?)", row)
            else:
                db.execute("DELETE FROM quotas WHERE project = ?", (key,))

        async def change() -> None:
            await self._database.run(store)
            if is_set:
                self._quotas[key] = quota
            else:
                self._quotas.pop(key, None)

        await uninterrupted(change())  # a caller who leaves in between would leave memory and database different

    def _check_both(self, project: str, used: Amounts, quota: Quota) -> None:
        self._check(project, "device_s", used.device_s, quota.device_s)
        self._check(project, "usd", used.usd, quota.usd)

    def _check(self, project: str, limit: str, used: float, most: float | None) -> None:
        if most is None or used < most:
            return
        what = _SPELLED[limit].format
        raise QuotaError(
            f"project {project} has used {what(used)} of {what(most)} in {self._month} (quota `{limit}`). It may go on "
            f"on {reset_of(self._month)}, or when the operator raises the quota: `art quota set {project} "
            f"{_OPTIONS[limit]}`"
        )

    # -- reporting --

    async def report(self, month: str | None, project: str | None, *, with_keys: bool = False) -> UsageReport:
        """Report what was used in a month, by default the current one.

        Args:
            project: report only this project, and nothing about others.
            with_keys: report it by API key too.
        """
        await self.flush()
        self._turn_month()
        month = month or self._month
        by_project: defaultdict[str, dict[Row, Amounts]] = defaultdict(dict)
        for row, amounts in self._rows(month).items():
            by_project[row[1]][row] = amounts
        known = by_project.keys() | self._quotas.keys() - {_EVERY}
        return UsageReport(
            month=month,
            resets_at=reset_of(month),
            projects=[
                self._project_usage(owner, by_project[owner], with_keys=with_keys)
                for owner in ([project] if project is not None else sorted(known))
            ],
            default_quota=self._quotas.get(_EVERY) if project is None else None,
        )

    def _project_usage(self, project: str, rows: Pending, *, with_keys: bool) -> ProjectUsage:
        total = Amounts()
        models: defaultdict[str, Amounts] = defaultdict(Amounts)
        keys: defaultdict[str, Amounts] = defaultdict(Amounts)
        for (_, _, name, key_id), amounts in rows.items():
            for sums in (total, models[name], keys[key_id]):
                sums.add(amounts)
        return ProjectUsage(
            project=project,
            models=[ModelUsage(name=name, **_used(amounts)) for name, amounts in sorted(models.items())],
            keys=[KeyUsage(key_id=key_id or None, **_used(amounts)) for key_id, amounts in sorted(keys.items())]
            if with_keys
            else None,
            quota=self.quota(project),
            **_used(total),
        )

    def _rows(self, month: str) -> dict[Row, Amounts]:
        sql = f"SELECT month, project, name, key_id, {', '.join(_NAMES)} FROM usage_by_key WHERE month = ?"
        return {
            (month, project, name, key_id): Amounts(*amounts)
            for month, project, name, key_id, *amounts in self._database.read(sql, (month,))
        }

    def _turn_month(self) -> None:
        """Go to the month that the clock shows, if it is another one. What is pending stays in its own month.

        A clock that goes back, for example when it is corrected, goes back to an earlier month. So the sums of each
        month stay in memory. A month that is seen for the first time has nothing pending, and all of it is stored.
        """
        now = self._now()
        if self._begins_at <= now < self._ends_at:
            return
        at = time.gmtime(now)
        month = f"{at.tm_year:04d}-{at.tm_mon:02d}"
        if month not in self._by_month:
            totals: defaultdict[str, Amounts] = defaultdict(Amounts)
            for (_, project, _, _), amounts in self._rows(month).items():
                totals[project].add(amounts)
            self._by_month[month] = totals
        self._month, self._totals = month, self._by_month[month]
        self._begins_at, self._ends_at = _first_of(at.tm_year, at.tm_mon), _first_of_next(at.tm_year, at.tm_mon)


def add_keys(db: sqlite3.Connection) -> None:
    """Move what an older version has counted, without keys, to the table that has them."""
    if db.execute("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'usage'").fetchone() is None:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        names = ", ".join(_NAMES)
        # `WHERE true`: without it, SQLite reads ON as the condition of a join.
        db.execute(
            f"INSERT INTO usage_by_key SELECT month, project, name, '{UNKNOWN_KEY}', {names} FROM usage WHERE true "
            f"{_ON_CONFLICT}"
        )
        db.execute("DROP TABLE usage")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def write_usage(db: sqlite3.Connection, pending: Pending) -> None:
    """Add pending amounts to the stored ones, within the transaction of `db`."""
    rows = [(*row, *(getattr(amounts, name) for name in _NAMES)) for row, amounts in pending.items()]
    if rows:
        db.executemany(_ADD, rows)


def reset_of(month: str) -> str:
    """Return the first moment after a month such as `2026-01`, in UTC."""
    year, number = int(month[:4]), int(month[5:])
    return f"{year + number // 12:04d}-{number % 12 + 1:02d}-01 00:00 UTC"


_SPELLED = {
    "tokens": "{:,.0f} tokens", "steps": "{:,.0f} training steps", "device_s": "{:,.0f} device seconds",
    "usd": "{:,.2f} USD",
}  # fmt: skip
_OPTIONS = {"tokens": "--tokens N", "steps": "--steps N", "device_s": "--device-hours N", "usd": "--usd X"}


def _used(amounts: Amounts) -> dict[str, float]:
    return {name: getattr(amounts, name) for name in Used.model_fields}


def _first_of(year: int, month: int) -> float:
    return float(calendar.timegm((year, month, 1, 0, 0, 0)))


def _first_of_next(year: int, month: int) -> float:
    return _first_of(year + month // 12, month % 12 + 1)
