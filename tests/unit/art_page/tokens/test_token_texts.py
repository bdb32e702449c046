"""Texts of tokens: characters that several tokens make up, and a tokenizer that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.errors import ConfigError
from art.gateway.tokenizer import Tokenizer
from art.storage.layout import DataDir
from art_page.databases import ReadOnlyDatabase
from art_page.token_paths import TokenTexts, token_texts
from tests.support.gateway import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("text", ["plain words", "naïve 東京 🙂 done", "<|im_start|>user\n🙂<|im_end|>", ""])
def test_the_texts_of_tokens_join_to_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(tokenizer, token_ids)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


def test_a_character_belongs_to_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(token_ids) == 4  # one token per byte
    assert token_texts(tokenizer, token_ids) == ["", "", "", "🙂"]
    assert token_texts(tokenizer, token_ids[:2]) == ["", "\ufffd"]  # the answer was cut off there


def test_a_tokenizer_that_is_not_here_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: asked.append(1))
    with pytest.raises(ConfigError, match="is not a local directory"):
        Tokenizer.load("somebody/model-that-is-not-here", may_download=False)
    texts = TokenTexts(ReadOnlyDatabase(DataDir(tmp_path).database))
    assert texts.tokenizer("somebody/model-that-is-not-here") is None
    assert not asked
