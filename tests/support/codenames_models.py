"""Models for rollouts of the word game, whose answers are functions and whose exchanges are kept as a server keeps them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from openai.types.chat.chat_completion import Choice

from art.record.recorder import Exchange
from art_tasks.codenames.match import role_of
from tests.support.recorded_exchanges import exchange

Say = Callable[[str, list[Any]], str]
"""Returns the answer of a role to its messages."""


class TalkingModel:
    """A model that answers by `say`, and records each answer under an id, with made-up tokens."""

    _ids = itertools.count()

    def __init__(self, say: Say, *, name: str = "m", finish_reason: str = "stop") -> None:
        self.say, self.name, self.finish_reason = say, name, finish_reason
        self.requests: list[dict[str, Any]] = []
        self.exchanges: dict[str, Exchange] = {}
        self.chat = SimpleNamespace(completions=self)

    def openai_client(self) -> Any:
        return self

    def get_inference_name(self, step: int | None = None) -> str:
        return f"p/{self.name}@{step}"

    async def create(self, **request: Any) -> Any:
        request = copy.deepcopy(request)
        self.requests.append(request)
        messages = request["messages"]
        text, number = self.say(role_of(messages[0]["content"]), messages), next(self._ids)
        id, prompt = f"x{number}", [len(str(message["content"])) for message in messages]
        self.exchanges[id] = exchange(id, [number, *prompt], [7, 8], messages=messages, text=text, name=self.name)
        message = {"role": "assistant", "content": text}
        fields = {"index": 0, "finish_reason": self.finish_reason, "message": message, "exchange_id": id}
        return SimpleNamespace(choices=[Choice.model_validate(fields)])

    def roles(self) -> list[str]:
        return [role_of(request["messages"][0]["content"]) for request in self.requests]
