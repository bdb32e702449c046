"""The record of exchanges is exact, written in groups, and never lost once acknowledged."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import art.record.recorder as recorder_module
from art.errors import DiskFullError, NotFoundError, StorageError
from art.protocol.chat import essence
from art.record.conversations import conversation_hashes, extend_hash, find_continued
from art.record.recorder import Exchange, Recorder, new_exchange_id
from art.record.usage_book import Amounts
from art.storage.database import Database
from tests.support.gateway import Bench, user
from tests.support.small_disk import fill
from tests.support.small_disk import small_disk as small_disk  # a fixture


def exchange(**fields: Any) -> Exchange:
    defaults: dict[str, Any] = {
        "id": new_exchange_id(), "rollout_id": None, "project": "p", "name": "m", "policy_version": 1, "parent_id": None,
        "branch_reason": None, "prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5],
        "sampling_logprobs": [-0.1, -0.2], "temperature": 1.0, "top_p": 1.0, "seed": 7, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "a"}, "request_messages": [user("hi")], "tools": None,
        "created_at": 1.5,
    }  # fmt: skip
    return Exchange(**(defaults | fields))


@pytest.fixture
async def recorder(tmp_path: Path) -> Any:
    database = Database(tmp_path / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    yield recorder
    database.close()


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    logprobs=st.lists(st.floats(max_value=0, allow_nan=False), max_size=20),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 2),
    text=st.text(st.characters(exclude_categories=["Cs"])),
)
@settings(max_examples=15, deadline=None)
def test_a_recorded_exchange_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[int],
    logprobs: list[float],
    seed: int,
    temperature: float,
    text: str,
) -> None:
    made = exchange(
        completion_token_ids=tokens, sampling_logprobs=logprobs, seed=seed, temperature=temperature,
        message={"role": "assistant", "content": text}, tools=[{"a": text}], branch_reason="unknown_history",
    )  # fmt: skip
    database = Database(tmp_path_factory.mktemp("db") / "art.db")

    async def run() -> None:
        recorder = Recorder(database)
        await recorder.start()
        await recorder.append(made, conversation=b"c")
        assert recorder.get([made.id]) == [made]

    asyncio.run(run())
    database.close()


async def test_an_exchange_stores_only_what_it_adds_to_its_parent(recorder: Recorder) -> None:
    first = exchange(tools=[{"t": 1}])
    second = exchange(
        parent_id=first.id, prompt_token_ids=[1, 2, 3, 4, 5, 6], completion_token_ids=[7], tools=[{"t": 1}],
        request_messages=[user("hi"), first.message, user("more")], sampling_logprobs=[-1.0],
    )  # fmt: skip
    third = exchange(
        parent_id=second.id, prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8], tools=[{"t": 1}],
        request_messages=[user("hi"), first.message, user("more"), second.message, user("last")],
    )  # fmt: skip
    for made, parent in ((first, None), (second, first), (third, second)):
        await recorder.append(made, conversation=b"c", parent=parent)
    assert recorder.get([third.id, first.id, second.id]) == [third, first, second]
    rows = recorder.database.read("SELECT length(prompt_tail), new_messages, tools FROM exchanges ORDER BY id")
    assert [row[0] for row in rows] == [12, 4, 4]
    assert b"hi" not in rows[2][1]
    assert rows[2][2] is None


async def test_recent_exchanges_are_found_as_in_the_database(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art.record.recorder.MAX_RECENT_TOKENS", 1000)  # room for a few
    made = [exchange(rollout_id=rollout) for rollout in ("r", None, "r", "s")]
    for one in made:
        await recorder.append(one, conversation=b"c")
    await recorder.append(exchange(prompt_token_ids=[1] * 500), conversation=b"other")
    assert 0 < len(recorder.recent.by_id) < 5
    asked = ("r", None, "s", "nobody")
    found = [recorder.by_conversation(b"c", rollout) for rollout in asked]
    ended = [recorder.find_ended(one.id) for one in made]
    recorder.recent.clear()
    assert found == [recorder.by_conversation(b"c", rollout) for rollout in asked]
    assert ended == [recorder.find_ended(one.id) for one in made] == [(one, b"c") for one in made]


async def test_unknown_exchange_ids_are_not_found(recorder: Recorder) -> None:
    made = exchange()
    await recorder.append(made, conversation=b"c")
    assert recorder.find([made.id, "ex_nobody"]) == {made.id: made}
    assert recorder.find([]) == {}
    with pytest.raises(NotFoundError, match=r"1 of 2 exchanges.*ex_nobody"):
        recorder.get([made.id, "ex_nobody"])
    with pytest.raises(NotFoundError, match="rollout"):
        recorder.by_rollout("r", "p")


async def test_exchanges_of_a_rollout_are_listed(recorder: Recorder) -> None:
    made = [exchange(rollout_id="r1" if i % 2 else "r2") for i in range(6)]
    await asyncio.gather(*(recorder.append(one, conversation=b"c") for one in made))
    assert recorder.by_rollout("r1", "p") == made[1::2]


async def test_concurrent_appends_share_commits(recorder: Recorder) -> None:
    transactions = 0
    run = recorder.database.run

    async def counting(work: Any) -> Any:
        nonlocal transactions
        transactions += 1
        return await run(work)

    recorder.database.run = counting  # type: ignore[method-assign]
    made = [exchange() for _ in range(200)]
    await asyncio.gather(*(recorder.append(one, conversation=b"c") for one in made))
    assert recorder.get(one.id for one in made) == made
    assert transactions <= 2


async def test_a_cancelled_append_does_not_cancel_the_others(recorder: Recorder) -> None:
    made = [exchange() for _ in range(3)]
    tasks = [asyncio.create_task(recorder.append(one, conversation=b"c")) for one in made]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert recorder.find([made[1].id, made[2].id]).keys() == {made[1].id, made[2].id}


async def test_a_request_finds_the_exchange_that_it_continues(recorder: Recorder) -> None:
    messages = [[user(f"hi {i}"), {"role": "assistant", "content": "a"}, user("x")] for i in range(10)]
    hashes = [conversation_hashes("p/m", None, None, history) for history in messages]
    made = [exchange(request_messages=history[:1]) for history in messages]
    for one, passed in zip(made, hashes, strict=True):
        await recorder.append(one, conversation=passed[2])
    for one, history, passed in zip(made, messages, hashes, strict=True):
        assert find_continued(recorder, history, passed, None, lambda tools, passed=passed: passed) == (one, 2)


MESSAGE = {
    "role": "assistant",
    "content": "x",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}],
}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"reasoning_content": "why", "refusal": None, "annotations": ["?"], "exchange_id": "e"}, True),
        ({"content": [{"type": "text", "text": "x"}]}, True),
        ({"tool_calls": [{"id": "b", "index": 0, "function": {"name": "f", "arguments": '{"a":[2],"b":1}'}}]}, True),
        ({"content": "y"}, False),
        ({"content": "x "}, False),
        ({"role": "user"}, False),
        ({"tool_calls": None}, False),
        ({"tool_calls": [{"function": {"name": "g", "arguments": '{"b": 1, "a": [2]}'}}]}, False),
        ({"tool_calls": [{"function": {"name": "f", "arguments": '{"b": 1, "a": [3]}'}}]}, False),
    ],
)
def test_which_changes_make_another_message(change: dict[str, Any], same: bool) -> None:
    assert (essence(MESSAGE | change) == essence(MESSAGE)) is same


def test_empty_and_missing_content_are_equal() -> None:
    forms = [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": ""}]
    assert all(essence(form) == essence(forms[0]) for form in forms)


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_different_conversations_have_different_hashes(one: list[str], other: list[str]) -> None:
    def last(texts: list[str]) -> bytes:
        return conversation_hashes("m", None, None, [user(text) for text in texts])[-1]

    assert (last(one) == last(other)) == (one == other)


def test_model_tools_and_settings_are_part_of_the_hash() -> None:
    heads = [("a", None, None), ("b", None, None), ("a", [{"x": 1}], None), ("a", None, {"k": True})]
    assert len({conversation_hashes(*head, [user("x")])[-1] for head in heads}) == 4
    assert conversation_hashes("a", [], {}, [])[0] == conversation_hashes("a", None, None, [])[0]
    assert extend_hash(b"x", user("a")) != extend_hash(b"y", user("a"))


# --- a clock that goes back ---


async def test_the_newest_exchange_is_the_last_one_though_the_clock_went_back(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for hours in (0, -1):
        monkeypatch.setattr("time.time_ns", lambda hours=hours: 1_800_000_000_000_000_000 + hours * 3_600_000_000_000)
        made.append(exchange(rollout_id="r1"))
        await recorder.append(made[-1], conversation=b"c")
    first, last = made
    assert last.id < first.id
    assert recorder.newest_of_rollout("r1") == last.id
    assert [one.id for one in recorder.by_rollout("r1", "p")] == [first.id, last.id]
    assert recorder.by_conversation(b"c", None) == last


async def test_exchanges_of_an_older_database_come_before_new_ones(tmp_path: Path) -> None:
    database = Database(tmp_path / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    older = [exchange(rollout_id="r1") for _ in range(2)]
    for one in older:
        await recorder.append(one, conversation=b"c")
    await database.run(
        lambda db: db.executescript("DROP INDEX exchanges_by_number; ALTER TABLE exchanges DROP COLUMN number")
    )
    await recorder.start()
    newer = replace(exchange(rollout_id="r1"), id="ex_00000000000000000000000000")  # by a clock that is far behind
    await recorder.append(newer, conversation=b"c")
    assert [one.id for one in recorder.by_rollout("r1", "p")] == [*sorted(one.id for one in older), newer.id]
    database.close()


# --- trouble ---


async def test_a_full_disk_is_reported_and_recovered_from(small_disk: Path) -> None:
    database = Database(small_disk / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    kept = exchange()
    await recorder.append(kept, conversation=b"c")
    filler = small_disk / "filler"
    fill(filler)
    refused = exchange(completion_token_ids=[1] * 50_000)
    for _ in range(2):
        with pytest.raises(DiskFullError, match="no space left"):
            await recorder.append(refused, conversation=b"c")
    assert recorder.find([kept.id, refused.id]) == {kept.id: kept}
    filler.unlink()
    after = exchange()
    await recorder.append(after, conversation=b"c")
    assert recorder.get([kept.id, after.id]) == [kept, after]
    database.close()


async def test_a_full_database_is_reported_as_a_full_disk(recorder: Recorder) -> None:
    """Also runs where no small disk can be mounted."""

    async def limit(pages: int) -> None:
        await recorder.database.run(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchall())

    kept, refused = exchange(), exchange(completion_token_ids=[1] * 50_000)
    await recorder.append(kept, conversation=b"c")
    await limit(20)
    with pytest.raises(DiskFullError, match="no space left"):
        await recorder.append(refused, conversation=b"c")
    await limit(10_000)
    await recorder.append(refused, conversation=b"c")
    assert recorder.get([kept.id, refused.id]) == [kept, refused]


WRITER = """
import asyncio
from pathlib import Path
from art.record.recorder import Recorder
from art.storage.database import Database
from tests.unit.record.test_recorder import exchange

async def main():
    recorder = Recorder(Database(Path({path!r})))
    await recorder.start()
    async def one():
        made = exchange()
        await recorder.append(made, conversation=b"c")
        print(made.id, flush=True)
    while True:
        await asyncio.gather(*(one() for _ in range(8)))

asyncio.run(main())
"""


def test_an_acknowledged_exchange_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "art.db"
    source = textwrap.dedent(WRITER).format(path=str(path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    seen = [process.stdout.readline().strip() for _ in range(100)]
    process.send_signal(signal.SIGKILL)
    seen += [line.strip() for line in process.stdout.read().splitlines()]
    process.wait()
    whole = [line for line in seen if len(line) == len(new_exchange_id())]
    assert len(whole) >= 100
    database = Database(path)
    assert Recorder(database).find(whole).keys() == set(whole)
    database.close()


async def test_an_answer_that_cannot_be_recorded_is_not_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(work: Any) -> Any:
        raise DiskFullError("no space left")

    monkeypatch.setattr(bench.database, "run", full)
    bench.answers("hello", "hello", "hello")
    with pytest.raises(DiskFullError):
        await bench.chat(user("hi"))
    with pytest.raises(DiskFullError):
        await bench.stream(user("hi"))
    monkeypatch.undo()
    response = await bench.chat(user("hi"), {"role": "assistant", "content": "hello"}, user("more"))
    assert bench.exchange(response).branch_reason == "unknown_history"  # what was not recorded is not continued


# --- database ---


async def test_a_failed_transaction_is_rolled_back(tmp_path: Path) -> None:
    database = Database(tmp_path / "art.db")
    await database.run(lambda db: db.executescript("CREATE TABLE t (x INTEGER PRIMARY KEY)"))

    def fails(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO t VALUES (1)")
        raise NotFoundError("not this")

    with pytest.raises(NotFoundError):
        await database.run(fails)
    assert database.read("SELECT x FROM t") == []
    await database.run(lambda db: db.execute("INSERT INTO t VALUES (2)"))
    assert database.read("SELECT x FROM t") == [(2,)]
    database.close()


async def test_database_errors_name_the_file(tmp_path: Path) -> None:
    database = Database(tmp_path / "art.db")
    with pytest.raises(StorageError, match=r"art\.db.*no such table"):
        database.read("SELECT * FROM missing")
    with pytest.raises(StorageError, match="no such table"):
        await database.run(lambda db: db.execute("INSERT INTO missing VALUES (1)"))
    with pytest.raises(StorageError, match="readonly"):
        database.read("CREATE TABLE t (x)")
    database.close()
    (tmp_path / "junk.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StorageError, match="cannot open"):
        Database(tmp_path / "junk.db")


def test_exchange_ids_sort_by_time() -> None:
    ids = [new_exchange_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert replace(exchange(), id="x").id == "x"


async def test_tokens_are_counted_over_restarts(recorder: Recorder) -> None:
    recorder.usage.add("p", "m", Amounts(prompt=5, cached=2, completion=3))
    recorder.usage.add("p", "other", Amounts(prompt=100))
    await recorder.append(exchange(), conversation=b"c")
    recorder.usage.add("p", "m", Amounts(completion=4))
    await recorder.append(exchange(), conversation=b"c")
    again = Recorder(recorder.database)
    await again.start()
    assert again.usage.token_counts("p", "m") == (5, 2, 7)
    assert again.usage.token_counts("p", "nobody") == (0, 0, 0)


async def test_answers_that_end_soon_after_one_another_share_a_commit(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "COMMIT_EVERY_S", 2.0)
    num_commits = 0
    run = recorder.database.run

    async def counted(work: Any) -> Any:
        nonlocal num_commits
        num_commits += 1
        return await run(work)

    monkeypatch.setattr(recorder.database, "run", counted)
    started = asyncio.get_running_loop().time()
    await recorder.append(exchange(), conversation=b"")
    assert asyncio.get_running_loop().time() - started < 1.5, "the first one does not wait"
    later = [exchange() for _ in range(5)]
    waiting = []
    for one in later:
        waiting.append(asyncio.ensure_future(recorder.append(one, conversation=b"")))
        await asyncio.sleep(0.01)
    await asyncio.gather(*waiting)
    assert num_commits == 2
    assert set(recorder.find(one.id for one in later)) == {one.id for one in later}
