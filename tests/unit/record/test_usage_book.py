"""Usage by project and month, and quotas: what is counted, what survives, what is refused."""

from __future__ import annotations

import calendar
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from art.config import PricesConfig
from art.errors import QuotaError, StorageError
from art.protocol.usage_report import Quota
from art.record.recorder import _SAMPLE, Recorder, create_tables
from art.record.usage_book import SCHEMA, Amounts, UsageBook, reset_of
from art.storage.database import Database
from tests.support.leaving import cancel_while_stored

JANUARY = calendar.timegm((2026, 1, 15, 12, 0, 0))
FEBRUARY = calendar.timegm((2026, 2, 1, 0, 0, 0))


class Clock:
    def __init__(self) -> None:
        self.now = float(JANUARY)

    def __call__(self) -> float:
        return self.now


class Books:
    """A book on a database, and others that open the same file later."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock()

    async def open(self) -> UsageBook:
        database = Database(self.folder / "art.db")
        await database.run(create_tables)
        return UsageBook(database, now=self.clock)


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


async def test_amounts_add_up_by_project_and_model(books: Books) -> None:
    book = await books.open()
    book.prices = PricesConfig(device_usd_per_hour=3.6, prompt_usd=1.0, cached_usd=0.5, completion_usd=4.0)
    book.add("search", "agent", Amounts(prompt=1_000_000, cached=500_000, completion=250_000))
    book.add("search", "agent", Amounts(sampling_s=100.0, training_s=900.0))
    book.add("search", "other", Amounts(steps=2))
    book.add("shop", "agent", Amounts(completion=1))
    report = await book.report(None, None)
    assert (report.month, report.resets_at) == ("2026-01", "2026-02-01 00:00 UTC")
    search, shop = report.projects
    assert (search.project, search.prompt, search.cached, search.completion) == ("search", 1_000_000, 500_000, 250_000)
    assert (search.steps, search.sampling_s, search.training_s) == (2, 100.0, 900.0)
    assert search.usd == pytest.approx(0.5 + 0.25 + 1.0 + 1.0)
    assert [(model.name, model.steps) for model in search.models] == [("agent", 0), ("other", 2)]
    assert (shop.completion, shop.quota) == (1, None)
    (own,) = (await book.report(None, "shop")).projects
    assert own == shop


async def test_the_book_is_the_same_after_a_restart_and_new_prices_change_nothing_past(books: Books) -> None:
    book = await books.open()
    book.prices = PricesConfig(completion_usd=1_000_000.0)
    book.add("search", "agent", Amounts(completion=3))
    await book.flush()
    await book.set_quota("search", Quota(usd=10.0))
    again = await books.open()
    again.add("search", "agent", Amounts(completion=4))
    (project,) = (await again.report(None, None)).projects
    assert (project.completion, project.usd, project.quota) == (7, 3.0, Quota(usd=10.0))
    again.prices = PricesConfig(completion_usd=1_000_000.0)
    again.add("search", "agent", Amounts(completion=7))
    with pytest.raises(QuotaError, match=r"has used 10.00 USD of 10.00 USD in 2026-01 \(quota `usd`\)"):
        again.check_training("search", 0)


async def test_a_new_month_begins_at_nothing(books: Books) -> None:
    book = await books.open()
    await book.set_quota("search", Quota(tokens=10))
    book.add("search", "agent", Amounts(prompt=4, completion=6))
    with pytest.raises(QuotaError, match="It may go on on 2026-02-01 00:00 UTC"):
        book.check_sampling("search")
    books.clock.now = FEBRUARY - 0.001
    with pytest.raises(QuotaError):
        book.check_sampling("search")
    books.clock.now = FEBRUARY
    book.check_sampling("search")
    book.add("search", "agent", Amounts(prompt=3))
    reports = [(await book.report(month, None)).projects[0].prompt for month in ("2026-01", None)]
    assert reports == [4, 3]
    assert (await book.report("2025-12", None)).projects[0].prompt == 0


async def test_the_end_of_a_year_begins_the_first_month_of_the_next(books: Books) -> None:
    new_year = calendar.timegm((2027, 1, 1, 0, 0, 0))
    books.clock.now = new_year - 0.001
    book = await books.open()
    await book.set_quota("search", Quota(tokens=10, steps=1))
    book.add("search", "agent", Amounts(prompt=10, steps=1))
    for check in (lambda: book.check_sampling("search"), lambda: book.check_training("search", 0)):
        with pytest.raises(QuotaError, match=r"in 2026-12 .* It may go on on 2027-01-01 00:00 UTC"):
            check()
    books.clock.now = new_year
    book.check_sampling("search")
    book.check_training("search", 0)
    book.add("search", "agent", Amounts(prompt=3))
    report = await book.report(None, None)
    assert (report.month, report.resets_at, report.projects[0].prompt) == ("2027-01", "2027-02-01 00:00 UTC", 3)
    assert (await book.report("2026-12", None)).projects[0].prompt == 10


async def test_what_is_not_stored_when_a_month_ends_is_stored_in_its_own(books: Books) -> None:
    book = await books.open()
    book.add("search", "agent", Amounts(prompt=1))
    books.clock.now = FEBRUARY
    book.add("search", "agent", Amounts(prompt=2))
    await book.flush()
    again = await books.open()
    prompts = [(await again.report(month, None)).projects[0].prompt for month in ("2026-01", "2026-02")]
    assert prompts == [1, 2]


async def test_a_clock_that_goes_back_goes_back_to_its_month(books: Books) -> None:
    """A clock that was a year ahead for a while, and is corrected, leaves the quota of the true month as it was."""
    book = await books.open()
    await book.set_quota("search", Quota(tokens=10))
    book.add("search", "agent", Amounts(prompt=6))
    books.clock.now = calendar.timegm((2027, 1, 15, 0, 0, 0))
    book.check_sampling("search")
    book.add("search", "agent", Amounts(prompt=9))
    books.clock.now = JANUARY + 60
    book.check_sampling("search")
    book.add("search", "agent", Amounts(prompt=4))
    with pytest.raises(QuotaError, match="10 tokens of 10 tokens in 2026-01"):
        book.check_sampling("search")
    assert (await book.report(None, None)).projects[0].prompt == 10
    books.clock.now = calendar.timegm((2027, 1, 15, 0, 0, 0))
    book.check_sampling("search")
    book.add("search", "agent", Amounts(prompt=1))
    with pytest.raises(QuotaError, match="10 tokens of 10 tokens in 2027-01"):
        book.check_sampling("search")


async def test_a_month_that_an_earlier_server_has_counted_in_is_not_begun_at_nothing(books: Books) -> None:
    books.clock.now = FEBRUARY
    book = await books.open()
    await book.set_quota("search", Quota(tokens=10))
    book.add("search", "agent", Amounts(prompt=10))
    await book.flush()
    books.clock.now = JANUARY
    again = await books.open()
    again.check_sampling("search")
    books.clock.now = FEBRUARY
    with pytest.raises(QuotaError, match="in 2026-02"):
        again.check_sampling("search")


_OLDER = """
CREATE TABLE usage_by_key (
    month TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, key_id TEXT NOT NULL, prompt INTEGER NOT NULL,
    cached INTEGER NOT NULL, completion INTEGER NOT NULL, steps INTEGER NOT NULL, sampling_s REAL NOT NULL,
    training_s REAL NOT NULL, usd REAL NOT NULL, PRIMARY KEY (month, project, name, key_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS token_counts (
    project TEXT NOT NULL, name TEXT NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL,
    completion INTEGER NOT NULL, PRIMARY KEY (project, name)
) WITHOUT ROWID;
INSERT INTO usage_by_key VALUES ('2026-01', 'search', 'agent', 'alice', 2, 1, 1, 1, 0.5, 1.5, 2.0);
INSERT INTO usage_by_key VALUES ('2026-01', 'search', 'agent', 'server', 3, 1, 2, 0, 0, 0, 0.5);
INSERT INTO usage_by_key VALUES ('2025-12', 'search', 'agent', 'alice', 7, 0, 0, 0, 0, 0, 0);
INSERT INTO token_counts VALUES ('search', 'agent', 100, 20, 30), ('shop', 'agent', 4, 0, 5);
"""
"""The tables of the version that counted by API key, and all tokens of a model a second time."""


async def test_what_an_older_version_has_counted_stays(books: Books) -> None:
    """Also if that version runs once more on the new database: it makes its tables again, and theirs is added."""
    database = Database(books.folder / "art.db")
    for times in (1, 2):
        await database.run(lambda db: db.executescript(_OLDER))
        book = await books.open()
        await book.set_quota("search", Quota(tokens=8 * times))
        with pytest.raises(QuotaError, match=rf"{8 * times} tokens of {8 * times} tokens in 2026-01"):
            book.check_sampling("search")
        (project,) = (await book.report("2026-01", None)).projects
        assert (project.prompt, project.steps, project.usd) == (5 * times, times, 2.5 * times)
        assert [(one.name, one.prompt) for one in project.models] == [("agent", 5 * times)]
        assert (await book.report("2025-12", None)).projects[0].prompt == 7 * times
    assert book.token_counts("search", "agent") == (112, 22, 33)  # 88 before there were months, and twice 12
    assert book.token_counts("shop", "agent") == (4, 0, 5)
    assert book.token_counts("shop", "nobody") == (0, 0, 0)
    tables = {name for (name,) in database.read("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert not tables & {"usage_by_key", "token_counts"}


async def test_a_migration_that_is_interrupted_leaves_the_old_table(books: Books) -> None:
    database = Database(books.folder / "art.db")
    await database.run(lambda db: db.executescript(_OLDER + SCHEMA))
    await database.run(lambda db: db.executescript("CREATE TRIGGER t BEFORE INSERT ON usage WHEN NEW.prompt = 7 "
                                                   "BEGIN SELECT raise(ABORT, 'no'); END"))  # fmt: skip
    with pytest.raises(StorageError):
        await books.open()
    counts = [database.read(f"SELECT count(*) FROM {table}") for table in ("usage_by_key", "usage")]
    assert counts == [[(3,)], [(0,)]]
    await database.run(lambda db: db.executescript("DROP TRIGGER t"))
    assert (await (await books.open()).report(None, None)).projects[0].prompt == 5


@pytest.mark.parametrize(
    ("quota", "used", "sampling", "training", "text"),
    [
        (Quota(tokens=10), Amounts(prompt=9), None, None, ""),
        (Quota(tokens=10), Amounts(prompt=9, completion=1), "tokens", None, "10 tokens of 10 tokens.*--tokens N"),
        (Quota(steps=3), Amounts(steps=3, prompt=99), None, "steps", "3 training steps of 3.*--steps N"),
        (Quota(device_s=5), Amounts(sampling_s=2, training_s=3), "device_s", "device_s", "5 device seconds.*--device-hours"),
        (Quota(tokens=0), Amounts(), "tokens", None, "0 tokens of 0 tokens"),
    ],
)  # fmt: skip
async def test_each_limit_refuses_its_own_kind_of_work(
    books: Books, quota: Quota, used: Amounts, sampling: str | None, training: str | None, text: str
) -> None:
    book = await books.open()
    await book.set_quota("search", quota)
    book.add("search", "agent", used)
    book.check_sampling("shop")
    book.check_training("shop", 99)
    for limit, check in (
        (sampling, lambda: book.check_sampling("search")),
        (training, lambda: book.check_training("search", 0)),
    ):
        if limit is None:
            check()
        else:
            with pytest.raises(QuotaError, match=rf"project search has used {text}") as refused:
                check()
            assert f"(quota `{limit}`)" in refused.value.message


async def test_queued_steps_count_as_used(books: Books) -> None:
    book = await books.open()
    await book.set_quota("search", Quota(steps=3))
    book.add("search", "agent", Amounts(steps=1))
    book.check_training("search", 1)
    with pytest.raises(QuotaError, match="3 training steps of 3"):
        book.check_training("search", 2)


async def test_a_quota_for_all_applies_where_a_project_has_none_of_its_own(books: Books) -> None:
    book = await books.open()
    await book.set_quota(None, Quota(tokens=5))
    await book.set_quota("search", Quota(tokens=50))
    for project in ("search", "shop"):
        book.add(project, "agent", Amounts(prompt=5))
    book.check_sampling("search")
    with pytest.raises(QuotaError):
        book.check_sampling("shop")
    await book.set_quota("search", Quota())
    with pytest.raises(QuotaError):
        book.check_sampling("search")
    await book.set_quota(None, Quota())
    book.check_sampling("search")
    assert (await book.report(None, None)).default_quota is None


async def test_a_quota_whose_caller_leaves_is_the_same_in_memory_and_database(books: Books) -> None:
    book = await books.open()
    await cancel_while_stored(book._database, book.set_quota("search", Quota(tokens=5)))
    stored = await books.open()
    for one in (book, stored):
        one.add("search", "agent", Amounts(prompt=5))
        with pytest.raises(QuotaError):
            one.check_sampling("search")


def refuse() -> None:
    raise StorageError("the database is locked")


async def refuse_all(work: object) -> None:
    refuse()


async def test_what_cannot_be_stored_is_stored_once_by_the_next_flush(books: Books) -> None:
    book = await books.open()
    book.add("search", "agent", Amounts(prompt=2))
    book._database.run = refuse_all  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StorageError, match="locked"):
            await book.flush()
    book.add("search", "agent", Amounts(prompt=3, steps=1))
    del book._database.run  # type: ignore[method-assign]
    await book.flush()
    await book.flush()
    (project,) = (await (await books.open()).report(None, None)).projects
    assert (project.prompt, project.steps) == (5, 1)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_flush_that_is_cancelled_loses_and_doubles_nothing(books: Books, *, fails: bool) -> None:
    book = await books.open()
    book.add("search", "agent", Amounts(prompt=2))
    await cancel_while_stored(book._database, book.flush(), refuse if fails else lambda: None)
    await book.flush()
    (project,) = (await (await books.open()).report(None, None)).projects
    assert project.prompt == 2


async def test_tokens_of_an_answer_that_cannot_be_recorded_are_stored_with_the_next_one(tmp_path: Path) -> None:
    recorder = Recorder(Database(tmp_path / "art.db"))
    await recorder.start()
    recorder.usage.add("p", "m", Amounts(prompt=2, cached=1, completion=3))
    recorder.database.run = refuse_all  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="locked"):
        await recorder.append(replace(_SAMPLE, id="ex_1", project="p", name="m"), conversation=b"")
    del recorder.database.run  # type: ignore[method-assign]
    recorder.usage.add("p", "m", Amounts(prompt=20, cached=10, completion=30))
    await recorder.append(replace(_SAMPLE, id="ex_2", project="p", name="m"), conversation=b"")
    assert recorder.usage.token_counts("p", "m") == (22, 11, 33)


def test_the_year_ends_in_january() -> None:
    assert reset_of("2026-12") == "2027-01-01 00:00 UTC"


def test_what_was_answered_before_a_kill_is_counted(tmp_path: Path) -> None:
    """A process counts tokens, sampled time and a quota, each in a commit of the record, and then kills itself."""
    program = f"""
        import asyncio, os, signal
        from pathlib import Path
        from art.record.recorder import _SAMPLE, Recorder
        from art.record.usage_book import Amounts
        from art.protocol.usage_report import Quota
        from art.storage.database import Database
        from dataclasses import replace

        async def main():
            recorder = Recorder(Database(Path({str(tmp_path / "art.db")!r})))
            await recorder.start()
            await recorder.usage.set_quota("p", Quota(tokens=99))
            for index in range(20):
                recorder.usage.add("p", "m", Amounts(sampling_s=0.5))
                recorder.usage.add("p", "m", Amounts(prompt=2, cached=1, completion=3))
                await recorder.append(replace(_SAMPLE, id=f"ex_{{index}}", project="p", name="m"), conversation=b"")
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    rows = Database(tmp_path / "art.db").read("SELECT prompt, cached, completion, sampling_s FROM usage")
    assert rows == [(40, 20, 60, 10.0)]
