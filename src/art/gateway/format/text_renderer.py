"""The renderer of a bare prompt, which reaches the model without a chat template."""

from __future__ import annotations

from art.gateway.format.bridge import Branch
from art.gateway.format.renderer import RecordedTurn, Renderer, TemplateKwargs
from art.gateway.parsing.parse import Delta, MessageParser, ParsedMessage, SegmentParser
from art.protocol.chat import Message, Tool


class TextRenderer:
    """Gives the tokens of one prompt as they are, and takes the whole text of an answer as its content."""

    handles_tools = False

    def __init__(self, model: Renderer, prompt_token_ids: list[int]) -> None:
        """
        Args:
            model: renderer of the model, which knows its tokens.
        """
        self.tokenizer = model.tokenizer
        self.stop_token_ids = model.stop_token_ids
        self.template_kwargs: TemplateKwargs = {}
        self._prompt_token_ids = prompt_token_ids

    def render(self, messages: list[Message], tools: list[Tool] | None, *, opening: bool = True) -> list[int]:
        return self._prompt_token_ids

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        return Branch("template_rewrites_history")

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        return None

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        return _TextParser(self.tokenizer)

    def with_kwargs(self, kwargs: TemplateKwargs) -> Renderer:
        return self


class _TextParser(SegmentParser):
    """Decodes sampled tokens to text, without looking for reasoning or calls."""

    def push(self, token_ids: list[int]) -> None:
        self._raw += b"".join([self._bytes[i] for i in token_ids])

    def take(self) -> list[Delta]:
        self._add(self._decode())
        return self._take_deltas()

    def finish(self) -> ParsedMessage:
        self._add(self._end_segment())
        return self._parsed(reasoning_open=False)

    def _add(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._deltas.append(Delta(content=text))
