"""What an answer was drawn from is recorded once per grammar, survives restarts and older databases, and is forgotten."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.protocol.samples import Constraint
from art.record import recorder as recorder_module
from art.record.conversations import forget_older
from art.record.recorder import Exchange, Recorder, new_exchange_id
from art.storage.database import Database
from tests.support.gateway import user

GRAMMAR = Constraint(grammar='start: "\u00e9"', stop_token_ids=[2, 5])
KEPT = Constraint(kept=[[1, 3, 9], [], list(range(2000))])
BOTH = Constraint(grammar='start: "b"', stop_token_ids=[2], kept=[[7], [8, 9]])


def exchange(constraint: Constraint | None, **fields: Any) -> Exchange:
    defaults: dict[str, Any] = {
        "id": new_exchange_id(), "rollout_id": None, "project": "p", "name": "m", "policy_version": 1, "parent_id": None,
        "branch_reason": None, "prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5],
        "sampling_logprobs": [-0.1, -0.2], "temperature": 1.0, "top_p": 1.0, "seed": 7, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "a"}, "request_messages": [user("hi")], "tools": None,
        "created_at": 1.5,
    }  # fmt: skip
    return Exchange(**(defaults | fields), constraint=constraint)


@pytest.fixture
async def recorder(tmp_path: Path) -> Any:
    database = Database(tmp_path / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    yield recorder
    database.close()


def grammars(recorder: Recorder) -> set[str]:
    return {text for (text,) in recorder.database.read("SELECT text FROM grammars")}


async def test_constraints_are_read_back_exactly(recorder: Recorder) -> None:
    made = [exchange(one) for one in (None, GRAMMAR, KEPT, BOTH, GRAMMAR)]
    for one in made:
        await recorder.append(one, conversation=b"c")
    again = Recorder(recorder.database)
    assert again.get([one.id for one in made]) == made
    rows = recorder.database.read("SELECT text, version FROM grammars ORDER BY text")
    version = importlib.metadata.version("llguidance")
    assert rows == [('start: "b"', version), ('start: "\u00e9"', version)]  # once each


async def test_a_child_does_not_take_its_parents_constraint(recorder: Recorder) -> None:
    first = exchange(GRAMMAR)
    second = exchange(
        None, parent_id=first.id, prompt_token_ids=[1, 2, 3, 4, 5, 6],
        request_messages=[user("hi"), first.message, user("more")],
    )  # fmt: skip
    await recorder.append(first, conversation=b"c")
    await recorder.append(second, conversation=b"d", parent=first)
    assert recorder.get([second.id]) == [second]
    assert recorder.get([first.id, second.id]) == [first, second]


async def test_a_database_of_before_gets_the_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(tmp_path / "art.db")
    older = recorder_module._EXCHANGES.replace(", constrained TEXT,\n    segments TEXT", "")
    assert older != recorder_module._EXCHANGES
    names = tuple(name for name in recorder_module._NAMES if name not in ("constrained", "segments"))
    old = exchange(None)
    row = recorder_module._to_row(old, b"c", None)

    def fill(db: Any) -> None:
        db.executescript(older)
        db.execute(
            f"INSERT INTO exchanges ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            [row[n] for n in names],
        )

    await database.run(fill)
    for _ in range(2):  # opening it again changes nothing
        recorder = Recorder(database)
        await recorder.start()
    new = replace(exchange(GRAMMAR), segments=[(1, 1), (2, 1)])
    await recorder.append(new, conversation=b"d")
    assert recorder.get([old.id, new.id]) == [old, new]
    database.close()


async def test_unused_grammars_are_forgotten_with_their_exchanges(recorder: Recorder) -> None:
    old = [exchange(one, id=f"ex_{i:026x}") for i, one in enumerate((GRAMMAR, BOTH, KEPT))]
    new = exchange(BOTH)
    for one in (*old, new):
        await recorder.append(one, conversation=b"c")
    assert await forget_older(recorder, 60.0, lambda db: []) == (3, 0)
    assert grammars(recorder) == {BOTH.grammar}
    assert recorder.get([new.id]) == [new]
    plan = recorder.database.read(
        "EXPLAIN QUERY PLAN SELECT 1 FROM exchanges WHERE substr(constrained, 1, 64) = 'x' AND constrained IS NOT NULL"
    )
    assert "exchanges_by_grammar" in plan[0][3]  # deleting looks at no exchange but those of a grammar
