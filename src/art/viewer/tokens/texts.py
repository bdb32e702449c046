"""Texts of tokens, by the model's tokenizer where this machine has it. Nothing is downloaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from art.errors import ArtError
from art.gateway.format.tokenizer import TextStream, Tokenizer
from art.storage import checkpoints
from art.storage.layout import ModelPaths
from art.viewer.database import ReadOnlyDatabase

logger = logging.getLogger(__name__)


class TokenTexts:
    """Finds the texts of token ids. It keeps the tokenizers that it has loaded."""

    def __init__(self, database: ReadOnlyDatabase) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._loaded: dict[str, Tokenizer | None] = {}

    def base_model(self, project: str, name: str, paths: ModelPaths) -> str | None:
        """Return the base model of a run, from the registry or its newest checkpoint; `None` if neither is here."""
        rows = self._database.read("SELECT base_model FROM models WHERE project = ? AND name = ?", (project, name))
        if rows:
            return str(rows[0][0])
        try:
            steps = checkpoints.list_steps(paths.checkpoints)
            return checkpoints.read_state(paths.checkpoint(steps[-1])).base_model if steps else None
        except ArtError:
            return None

    def tokenizer(self, base_model: str | None) -> Tokenizer | None:
        """Load the tokenizer of a base model from its folder or the hub's cache; `None` if this machine lacks it."""
        if base_model is None:
            return None
        with self._lock:
            if base_model not in self._loaded:
                try:
                    self._loaded[base_model] = Tokenizer.load(base_model, may_download=False)
                except ArtError as error:
                    logger.info("tokens of %s are shown without texts: %s", base_model, error)
                    self._loaded[base_model] = None
            return self._loaded[base_model]


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; their join is the whole text.

    A character whose bytes are spread over several tokens belongs to the token that completes it.
    """
    stream = TextStream()
    table = tokenizer.token_bytes
    texts = [stream.push(table[token_id]) for token_id in token_ids]
    if texts:
        texts[-1] += stream.finish()
    return texts


def texts_of_choice(choice: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of the tokens of a logged choice, from its `logprobs.content`; `None` if it has none."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        return None
    stream, texts = TextStream(), list[str]()
    for entry in content:
        data, token = entry.get("bytes"), entry.get("token")
        if isinstance(data, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in data):
            texts.append(stream.push(bytes(data)))
        elif isinstance(token, str):
            texts.append(token)
        else:
            return None
    return texts


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids that the tokenizer marks as special."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token_id for token_id, token in added.items() if token.special}
