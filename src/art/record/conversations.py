"""Find the exchange (recorded request and answer) that a new request continues.

A conversation is identified by a rolling hash over model, tools, template settings and messages. An exchange is stored
under the hash of its request and answer. A request that continues it computes that hash on the way to its own:

    h0 = H(model, tools, settings)   h1 = H(h0, user "hi")   h2 = H(h1, assistant "hello")   h3 = H(h2, user "bye")
                                                             ^ stored under h2, found by the request [hi, hello, bye]

What is hashed of a message is its `essence`.

Old exchanges and rollouts are deleted, so that the record does not grow for ever. An exchange that a newer one
continues is kept as long as that one, which stores only the tokens that it adds.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from art.errors import StorageError
from art.protocol.answers import Branch, BranchReason
from art.protocol.chat import Message, Tool, essence_of_normal
from art.record.recorded_answers import delete_unused_grammars
from art.record.recorder import Exchange, Recorder, exchange_id_at


def conversation_hashes(
    model: str, tools: list[Tool] | None, settings: Mapping[str, Any] | None, messages: list[Message]
) -> list[bytes]:
    """Compute the rolling hash after each message; index 0 is the hash before the first message."""
    head = orjson.dumps([model, tools or None, settings or None], option=orjson.OPT_SORT_KEYS)
    hashes = [_hash(head)]
    for message in messages:
        hashes.append(extend_hash(hashes[-1], message))
    return hashes


def extend_hash(conversation: bytes, message: Message) -> bytes:
    return _hash(conversation + orjson.dumps(essence_of_normal(message)))


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


HashWith = Callable[[list[Tool] | None], list[bytes]]
"""Computes the hashes of a request's conversation as if it had these tools."""
_CALL_ID = re.compile(r"call_([0-9a-f]{26})_\d+")


def find_continued(
    recorder: Recorder, messages: list[Message], hashes: list[bytes], rollout_id: str | None, hash_with: HashWith
) -> tuple[Exchange, int] | Branch | None:
    """Return the exchange that a request continues and the number of messages that it covers. `None` means that the
    messages contain no answer, so there is nothing to continue. A `Branch` gives the reason why they contain an answer
    that cannot be continued."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        return None
    conversation, exchange_id = hashes[last + 1], messages[last].get("exchange_id")
    reason: BranchReason = "unknown_history"
    if exchange_id is not None and (named := recorder.find_ended(exchange_id)) is not None:
        if named[1] == conversation:
            return named[0], last + 1
        reason = "edited_history"
    elif (latest := recorder.by_conversation(conversation, rollout_id)) is not None:
        return latest, last + 1
    # Was the beginning of this conversation recorded with other tools? Recorded exchanges are found by the ids of
    # messages, those inside the ids of tool calls, or as the newest of the rollout.
    ids = []
    for message in reversed(messages):
        calls = [_CALL_ID.fullmatch(call.get("id") or "") for call in message.get("tool_calls", ())]
        ids += [own] if (own := message.get("exchange_id")) else []
        ids += [f"ex_{match[1]}" for match in calls if match is not None]
    if rollout_id is not None and (newest := recorder.newest_of_rollout(rollout_id)) is not None:
        ids.append(newest)
    ended = next((one for one in map(recorder.find_ended, dict.fromkeys(ids)) if one is not None), None)
    had_other_tools = ended is not None and ended[1] in hash_with(ended[0].tools)
    return Branch("tools_changed" if had_other_tools else reason)


logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
_BATCH = 500
"""Rows deleted per transaction. A request that is waiting to be recorded waits for at most one."""
_DELETE_EXCHANGES = """
DELETE FROM exchanges WHERE id IN (
    SELECT id FROM exchanges AS old WHERE id < ?
        AND NOT EXISTS (SELECT 1 FROM exchanges AS next WHERE next.parent_id = old.id)
        AND id NOT IN (SELECT value FROM json_each(?))
    LIMIT ?)
"""
_DELETE_ROLLOUTS = """
DELETE FROM rollouts WHERE (project, id) IN (
    SELECT project, id FROM rollouts WHERE change < ?
        AND NOT EXISTS (SELECT 1 FROM exchanges WHERE rollout_id = rollouts.id AND project = rollouts.project)
    LIMIT ?)
"""


Needed = Callable[[sqlite3.Connection], Sequence[str]]
"""Function that returns the ids of exchanges to keep at any age. It runs in the transaction that deletes."""


async def forget_older(recorder: Recorder, age_s: float, needed: Needed) -> tuple[int, int]:
    """Delete exchanges and rollouts that are older than `age_s` seconds; returns how many of each."""
    before = time.time() - age_s
    recorder.recent.clear()  # what is deleted must not be continued

    def delete_exchanges(db: sqlite3.Connection) -> int:
        kept = orjson.dumps(list(needed(db))).decode()
        return db.execute(_DELETE_EXCHANGES, (exchange_id_at(before), kept, _BATCH)).rowcount

    def delete_rollouts(db: sqlite3.Connection) -> int:
        return db.execute(_DELETE_ROLLOUTS, (int(before * 1e6), _BATCH)).rowcount

    num_exchanges = num_rollouts = 0  # a transaction at a time
    while deleted := await recorder.database.run(delete_exchanges):
        num_exchanges += deleted
    if num_exchanges:
        await recorder.database.run(delete_unused_grammars)
    while deleted := await recorder.database.run(delete_rollouts):
        num_rollouts += deleted
    return num_exchanges, num_rollouts


async def forget_regularly(recorder: Recorder, age_s: float, needed: Needed) -> None:
    """Run `forget_older` now and every `INTERVAL_S` seconds, until cancelled."""
    while True:
        try:
            exchanges, rollouts = await forget_older(recorder, age_s, needed)
            if exchanges or rollouts:
                logger.info("deleted %d exchanges and %d rollouts older than %g s", exchanges, rollouts, age_s)
        except StorageError as error:
            logger.warning("old exchanges could not be deleted; trying again in an hour: %s", error)
        await asyncio.sleep(INTERVAL_S)
