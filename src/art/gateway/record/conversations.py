"""Find the exchange (recorded request and answer) that a new request continues.

A conversation is identified by a rolling hash over model, tools, template settings and messages. An exchange is stored
under the hash of its request and answer. A request that continues it computes that hash on the way to its own:

    h0 = H(model, tools, settings)   h1 = H(h0, user "hi")   h2 = H(h1, assistant "hello")   h3 = H(h2, user "bye")
                                                             ^ stored under h2, found by the request [hi, hello, bye]

What is hashed of a message is its `essence`. The
latest conversations are kept in memory. Older ones, and those before a restart, are looked up in the database.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from art.gateway.format.bridge import Branch
from art.gateway.record.recorder import Exchange, Recorder
from art.protocol.chat import Message, Tool, essence, essence_of_normal
from art.protocol.samples import Constraint

MAX_BYTES_IN_MEMORY = 64 * 2**20
"""Memory for recent exchanges (recorded answers): some 45,000 short ones, or the last turns of 200 rollouts of 30,000
tokens."""

_MAX_PER_CONVERSATION = 256
"""Exchanges kept per conversation. One conversation has many when the rollouts of a group begin with equal turns."""
_BYTES_PER_ENTRY = 650
"""Memory of an entry besides its packed exchange (ids, hashes, dictionary slots), measured with tracemalloc."""


def canonical_message(message: Mapping[str, Any]) -> bytes:
    """Normalise a message to bytes that are equal for equal messages, however a client writes them."""
    return orjson.dumps(essence(message))


def _canonical(message: Message) -> bytes:
    return orjson.dumps(essence_of_normal(message))


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
    return _hash(conversation + _canonical(message))


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


HashWith = Callable[[list[Tool] | None], list[bytes]]
"""Computes the hashes of a request's conversation as if it had these tools."""
_CALL_ID = re.compile(r"call_([0-9a-f]{26})_\d+")


def _named_exchanges(message: Message) -> list[str]:
    """Ids of exchanges that an assistant message names: its own, and those inside the ids of its tool calls."""
    calls = [_CALL_ID.fullmatch(call.get("id") or "") for call in message.get("tool_calls", ())]
    own = message.get("exchange_id")
    return [*([own] if own else []), *(f"ex_{match[1]}" for match in calls if match is not None)]


@dataclass(frozen=True, slots=True)
class _Entry:
    packed: bytes
    """The exchange as JSON, which is smaller than the objects and has a known size."""
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.packed) + _BYTES_PER_ENTRY

    def exchange(self) -> Exchange:
        fields = orjson.loads(self.packed)
        if fields["constraint"] is not None:
            fields["constraint"] = Constraint(**fields["constraint"])
        fields["segments"] = [tuple(segment) for segment in fields["segments"]]
        return Exchange(**fields)


class Conversations:
    """A cache of the latest exchanges (recorded answers), by id and by the hash of the conversation that they end."""

    def __init__(self, recorder: Recorder, *, max_bytes: int = MAX_BYTES_IN_MEMORY) -> None:
        self._recorder = recorder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by exchange id, least recently used first
        self._by_conversation: dict[bytes, dict[str, str | None]] = {}  # exchange id -> rollout id, oldest first

    def add(self, exchange: Exchange, conversation: bytes) -> None:
        if exchange.id in self._entries:
            return
        packed = bytes(memoryview(orjson.dumps(exchange)))  # a copy: orjson's result keeps a buffer of 8 KiB or more
        entry = _Entry(packed, conversation)
        self._entries[exchange.id] = entry
        self._num_bytes += entry.size
        known = self._by_conversation.setdefault(conversation, {})
        known[exchange.id] = exchange.rollout_id
        if len(known) > _MAX_PER_CONVERSATION:
            self._forget(next(iter(known)))
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            self._forget(next(iter(self._entries)))

    def forget_before(self, exchange_id: str) -> None:
        """Forget exchanges with smaller ids, i.e. older ones, which are about to be deleted."""
        for old in [known for known in self._entries if known < exchange_id]:
            self._forget(old)

    def find(
        self, messages: list[Message], hashes: list[bytes], rollout_id: str | None, hash_with: HashWith
    ) -> tuple[Exchange, int] | Branch | None:
        """Return the exchange that a request continues and the number of messages that it covers.

        `None` means that the messages contain no answer, so there is nothing to continue. A `Branch` gives the reason
        why they contain an answer that cannot be continued.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        if last < 0:
            return None
        conversation = hashes[last + 1]
        exchange_id = messages[last].get("exchange_id")
        if exchange_id is not None and (entry := self._load(exchange_id)) is not None:
            if entry.conversation != conversation:
                other_tools = self._had_other_tools(messages, rollout_id, hash_with)
                return Branch("tools_changed" if other_tools else "edited_history")
            return entry.exchange(), last + 1
        latest = self._latest(conversation, rollout_id)
        if latest is not None:
            return latest, last + 1
        other_tools = self._had_other_tools(messages, rollout_id, hash_with)
        return Branch("tools_changed" if other_tools else "unknown_history")

    def _had_other_tools(self, messages: list[Message], rollout_id: str | None, hash_with: HashWith) -> bool:
        """Whether a recorded exchange has the beginning of this conversation, and other tools than the request.

        Exchanges are found by the ids in messages and tool calls, or as the newest of the rollout.
        """
        ids = [exchange_id for message in reversed(messages) for exchange_id in _named_exchanges(message)]
        if rollout_id is not None and (newest := self._recorder.newest_of_rollout(rollout_id)) is not None:
            ids.append(newest)
        for exchange_id in dict.fromkeys(ids):
            if (entry := self._load(exchange_id)) is not None:
                return entry.conversation in hash_with(entry.exchange().tools)
        return False

    def _latest(self, conversation: bytes, rollout_id: str | None) -> Exchange | None:
        known = self._by_conversation.get(conversation, {})
        chosen = next((i for i in reversed(known) if rollout_id in (None, known[i])), None)
        if chosen is not None:
            self._entries.move_to_end(chosen)
            return self._entries[chosen].exchange()
        exchange = self._recorder.by_conversation(conversation, rollout_id)
        if exchange is not None:
            self.add(exchange, conversation)
        return exchange

    def _load(self, exchange_id: str) -> _Entry | None:
        entry = self._entries.get(exchange_id)
        if entry is not None:
            self._entries.move_to_end(exchange_id)
            return entry
        exchange = self._recorder.find([exchange_id]).get(exchange_id)
        conversation = self._recorder.conversation_of(exchange_id)
        if exchange is None or conversation is None:
            return None
        self.add(exchange, conversation)
        return self._entries.get(exchange_id)

    def _forget(self, exchange_id: str) -> None:
        entry = self._entries.pop(exchange_id)
        self._num_bytes -= entry.size
        known = self._by_conversation[entry.conversation]
        del known[exchange_id]
        if not known:
            del self._by_conversation[entry.conversation]
