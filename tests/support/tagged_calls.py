"""Real chat templates whose calls have a tag per argument, with random answers under their grammars."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from art.gateway.format.load import load_renderer
from art.gateway.format.renderer import Renderer, parse
from art.gateway.structure.grammar import AnswerGrammar, AnswerShape, write_grammar
from art.gateway.structure.schemas import kept_arguments
from art.gateway.structure.style import AnswerStyle, answer_tokens, find_style
from art.gateway.structure.tags import TagStyle
from art.kernels.grammar import Vocabulary, allowed_ids
from art.protocol.chat import Message, Tool, tool_call
from art.protocol.dialects.structured import CallRule
from tools.families import real

_SOURCES = {source.name: source for source in real.sources()}


@dataclass
class Model:
    """A renderer of a real template, and what grammars need of it."""

    renderer: Renderer
    style: AnswerStyle
    vocabulary: Vocabulary

    @property
    def tags(self) -> TagStyle:
        assert self.style.calls is not None
        assert self.style.calls.tags is not None
        return self.style.calls.tags

    def grammar(self, parameters: Any, *, strict: bool = True, single: bool = True, name: str = "f") -> AnswerGrammar:
        assert self.style.calls is not None
        schema = kept_arguments(
            {"name": name, "parameters": parameters}, "tools.0", strict=strict, style=self.style.calls
        )
        rule = CallRule("required", single=single)
        return write_grammar(self.style, AnswerShape(opening="closed", rule=rule, arguments={name: schema}))

    def accepts(self, grammar: AnswerGrammar, ids: list[int]) -> bool:
        matcher = self.vocabulary.matcher(grammar.text, grammar.stop_token_ids)
        return all(map(matcher.advance, ids))

    def walk(self, grammar: AnswerGrammar, seed: int, most: int = 1500) -> list[int] | None:
        """An answer of tokens drawn at random among those that the grammar allows; `None` if it does not end."""
        matcher = self.vocabulary.matcher(grammar.text, grammar.stop_token_ids)
        mask = np.zeros(self.vocabulary.num_words, np.uint32)
        draw, ids = random.Random(seed), list[int]()
        while len(ids) < most:
            matcher.fill(mask)
            ids.append(int(draw.choice(allowed_ids(mask, self.vocabulary.vocab_size))))
            assert matcher.advance(ids[-1])
            if ids[-1] in grammar.stop_token_ids:
                return ids
        return None

    def calls(self, ids: list[int], parameters: Any) -> list[Any]:
        message = parse(self.renderer, [], ids, tools_of(parameters))
        assert message.content == ""
        return [json.loads(call.arguments) for call in message.tool_calls]

    def written(self, calls: list[Any], parameters: Any) -> list[int]:
        made = [tool_call(f"call_{i}", "f", json.dumps(one, ensure_ascii=False)) for i, one in enumerate(calls)]
        message: Message = {"role": "assistant", "content": "", "tool_calls": made}
        ids = answer_tokens(self.renderer, message, tools_of(parameters))
        assert ids is not None
        text = self.renderer.tokenizer.text(ids)  # the line breaks after reasoning are not a part of the calls
        return self.renderer.tokenizer.encode(text.lstrip("\n"), add_special_tokens=False)


def tools_of(parameters: Any) -> list[Tool]:
    return [{"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}]


@cache
def model(name: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        real.write_folder(_SOURCES[name], Path(folder))
        if name.startswith("GLM"):  # their generation_config.json names the tokens with which messages begin
            added = json.loads((Path(folder) / "tokenizer.json").read_text())["added_tokens"]
            ends = [one["id"] for one in added if one["content"] in ("<|user|>", "<|observation|>")]
            (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        renderer = load_renderer(folder)
    tokenizer = renderer.tokenizer
    vocabulary = Vocabulary(tokenizer.backend.to_str(), tokenizer.vocab_size)
    return Model(renderer, find_style(renderer), vocabulary)


def of(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}
