"""What each project has used in each month, by model, and what it may use. Durable, and cheap enough to ask
before each request.

    answer or step --> add: pending rows in memory --> the next commit of the record writes them
    request        --> check: what is stored and what is pending, against the project's quota

An answer's tokens are written in the transaction that records the answer, so `kill -9` loses none that was sent.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping

from art.config import PricesConfig
from art.errors import QuotaError
from art.protocol.usage_report import ModelUsage, ProjectUsage, Quota, UsageReport, Used
from art.storage.database import Database, uninterrupted

SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    month TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL,
    completion INTEGER NOT NULL, steps INTEGER NOT NULL, sampling_s REAL NOT NULL, training_s REAL NOT NULL,
    usd REAL NOT NULL, PRIMARY KEY (month, project, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quotas (project TEXT PRIMARY KEY, quota TEXT NOT NULL) WITHOUT ROWID;
"""
_EVERY = ""
"""The project under which the quota of projects without one of their own is stored. No project has an empty name."""


class Amounts(Used):
    """Amounts of everything that is counted, which add up."""

    def add(self, other: Amounts) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion

    @property
    def device_s(self) -> float:
        return self.sampling_s + self.training_s


_NAMES = tuple(Amounts.model_fields)
_ON_CONFLICT = "ON CONFLICT (month, project, name) DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in _NAMES
)
_ADD = f"INSERT INTO usage VALUES ({', '.join('?' * (3 + len(_NAMES)))}) {_ON_CONFLICT}"
Row = tuple[str, str, str]
"""Month, project and name of a model."""
Pending = Mapping[Row, Amounts]


class UsageBook:
    """Counts usage by project and month, and checks quotas. Use it in one event loop, as the server does."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now
        self.prices = PricesConfig()
        self._pending: dict[Row, Amounts] = {}
        """What is not stored yet."""
        self._known_quotas: dict[str, Quota] | None = None
        """The stored quotas, which every request asks for. `None` until they are read."""

    # -- counting --

    def add(self, project: str, name: str, amounts: Amounts) -> None:
        """Count amounts for a model. Their price is added. They are stored with the next `take_pending`."""
        self.keep_pending(self.count(project, name, amounts))

    def count(self, project: str, name: str, amounts: Amounts) -> Pending:
        """Price amounts as `add` does, and return them for a caller that stores them in a transaction of its own."""
        amounts.usd += self.prices.usd(
            prompt_tokens=amounts.prompt, cached_tokens=amounts.cached, completion_tokens=amounts.completion,
            device_s=amounts.device_s,
        )  # fmt: skip
        return {(self._month(), project, name): amounts}

    def take_pending(self) -> Pending:
        """Return what is not stored yet. The caller stores it by `write_usage` in a transaction of its own, and gives
        it to `keep_pending` if that fails."""
        pending, self._pending = self._pending, {}
        return pending

    def keep_pending(self, usage: Pending) -> None:
        """Store this usage with the next `take_pending`."""
        for row, amounts in usage.items():
            self._pending.setdefault(row, Amounts()).add(amounts)

    async def flush(self) -> None:
        """Store what is not stored yet. After an error of the disk, nothing was stored, and the next call stores it."""

        async def store() -> None:
            pending = self.take_pending()
            try:
                await self._database.run(lambda db: write_usage(db, pending))
            except Exception:
                self.keep_pending(pending)
                raise

        if self._pending:
            await uninterrupted(store())

    # -- quotas --

    def check_sampling(self, project: str) -> None:
        """Raise `QuotaError` if a project has used up what it may, so that it gets no further answers this month."""
        self._check(project, ("tokens", "device_s", "usd"), 0)

    def check_training(self, project: str, num_queued: int) -> None:
        """Raise `QuotaError` if a project has used up what it may, so that it gets no further training this month.
        `num_queued` is the number of its training steps that have not ended."""
        self._check(project, ("steps", "device_s", "usd"), num_queued)

    def _check(self, project: str, limits: tuple[str, ...], num_queued: int) -> None:
        if (quota := self.quota(project)) is None:
            return
        month = self._month()
        total = _sum(self._rows(month, project).values())
        for row, amounts in self._pending.items():
            if row[:2] == (month, project):
                total.add(amounts)
        for limit in limits:
            used = getattr(total, limit) + (num_queued if limit == "steps" else 0)
            most = getattr(quota, limit)
            if most is not None and used >= most:
                spelled, option = _LIMITS[limit]
                raise QuotaError(
                    f"project {project} has used {spelled.format(used)} of {spelled.format(most)} in {month} "
                    f"(quota `{limit}`). It may go on on {reset_of(month)}, or when the operator raises the quota: "
                    f"`art quota set {project} {option}`"
                )

    def quota(self, project: str) -> Quota | None:
        """Return the limits that apply to a project: its own, or those of every project."""
        quotas = self._quotas()
        return quotas.get(project) or quotas.get(_EVERY)

    def _quotas(self) -> dict[str, Quota]:
        if self._known_quotas is None:
            rows = self._database.read("SELECT project, quota FROM quotas")
            self._known_quotas = {project: Quota.model_validate_json(quota) for project, quota in rows}
        return self._known_quotas

    async def set_quota(self, project: str | None, quota: Quota) -> None:
        """Set the quota of a project, or with `None` of every project without its own. Without limits it is removed."""
        key = project or _EVERY

        def store(db: sqlite3.Connection) -> None:
            if quota != Quota():
                db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?)", (key, quota.model_dump_json()))
            else:
                db.execute("DELETE FROM quotas WHERE project = ?", (key,))

        async def store_and_forget() -> None:
            await self._database.run(store)
            self._known_quotas = None

        await uninterrupted(store_and_forget())

    # -- reporting --

    async def report(self, month: str | None, project: str | None) -> UsageReport:
        """Report what was used in a month, by default the current one. With `project` only that of one project, and
        nothing about others."""
        await self.flush()
        month = month or self._month()
        rows, quotas = self._rows(month, project), self._quotas()
        known = {owner for _, owner, _ in rows} | quotas.keys() - {_EVERY}
        projects = []
        for owner in [project] if project is not None else sorted(known):
            own = {name: amounts for (_, by, name), amounts in sorted(rows.items()) if by == owner}
            models = [ModelUsage(name=name, **amounts.model_dump()) for name, amounts in own.items()]
            quota = quotas.get(owner) or quotas.get(_EVERY)
            projects.append(ProjectUsage(project=owner, models=models, quota=quota, **_sum(own.values()).model_dump()))
        default = quotas.get(_EVERY) if project is None else None
        return UsageReport(month=month, resets_at=reset_of(month), projects=projects, default_quota=default)

    def token_counts(self, project: str, name: str) -> tuple[int, int, int]:
        """Return the numbers of prompt, cached and completion tokens of a model since it was registered, as stored."""
        sql = "SELECT sum(prompt), sum(cached), sum(completion) FROM usage WHERE project = ? AND name = ?"
        ((prompt, cached, completion),) = self._database.read(sql, (project, name))
        return prompt or 0, cached or 0, completion or 0

    def _rows(self, month: str, project: str | None) -> dict[Row, Amounts]:
        """What is stored of a month, for one project or for all."""
        sql = f"SELECT month, project, name, {', '.join(_NAMES)} FROM usage WHERE month = ?"
        sql, values = (sql, (month,)) if project is None else (f"{sql} AND project = ?", (month, project))
        return {
            (row[0], row[1], row[2]): Amounts(**dict(zip(_NAMES, row[3:], strict=True)))
            for row in self._database.read(sql, values)
        }

    def _month(self) -> str:
        return time.strftime("%Y-%m", time.gmtime(self._now()))


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    total = Amounts()
    for one in amounts:
        total.add(one)
    return total


_OLDER = {
    "usage_by_key": f"SELECT month, project, name, {', '.join(f'sum({name})' for name in _NAMES)} FROM usage_by_key "
    "GROUP BY month, project, name",
    "token_counts": "SELECT '', o.project, o.name, max(0, o.prompt - coalesce(sum(u.prompt), 0)), "
    "max(0, o.cached - coalesce(sum(u.cached), 0)), max(0, o.completion - coalesce(sum(u.completion), 0)), 0, 0, 0, 0 "
    "FROM token_counts AS o LEFT JOIN usage AS u USING (project, name) GROUP BY o.project, o.name",
}


def merge_older(db: sqlite3.Connection) -> None:
    """Move what older versions have counted to the table of usage: by API key, or as totals over all time. What the
    totals have beyond the months goes to a month without a name."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    for table, select in _OLDER.items():
        if table not in tables:
            continue
        db.execute("BEGIN IMMEDIATE")
        try:
            db.execute(f"INSERT INTO usage {select} {_ON_CONFLICT}")
            db.execute(f"DROP TABLE {table}")
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


_LIMITS = {
    "tokens": ("{:,.0f} tokens", "--tokens N"),
    "steps": ("{:,.0f} training steps", "--steps N"),
    "device_s": ("{:,.0f} device seconds", "--device-hours N"),
    "usd": ("{:,.2f} USD", "--usd X"),
}
"""How an amount is written, and the option of `art quota set`, by limit."""
