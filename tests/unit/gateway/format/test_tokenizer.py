"""The light tokenizer is compared with transformers token by token, and its byte table is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from art.errors import ConfigError, InvalidRequestError
from art.gateway.renderer import template_messages
from art.gateway.tokenizer import TextStream, Tokenizer
from tests.support.gateway import CHATML, LOOK_UP, QWEN3, make_tokenizer, system, user

CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "x y", "n": 1.5}'}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], Any]] = [
    ([user("hello")], None),
    (
        [system("be\n\nbrief "), user(" hi\t\u00e9\U0001f642"), {"role": "assistant", "content": "ok\n"}, user("more")],
        None,
    ),
    (
        [user("hi"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "42"}],
        [LOOK_UP],
    ),
    (
        [user("hi"), {"role": "assistant", "content": "4", "reasoning_content": "2+2"}, user("<|im_end|><think>")],
        [LOOK_UP],
    ),
]


@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_tokens_equal_those_of_transformers(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = make_tokenizer(tmp_path, template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    messages = template_messages(messages)
    for opening in (False, True):
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=opening, return_dict=False, **kwargs
        )
        text = ours.render_text(messages, tools, add_generation_prompt=opening, **kwargs)
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.text(expected) == theirs.decode(expected)


def test_what_a_caller_does_to_tokens_stays_with_the_caller(tokenizer: Tokenizer) -> None:
    text = "read me twice"
    tokenizer.encode(text).append(0)
    assert tokenizer.text(tokenizer.encode(text)) == text


def test_special_ids_equal_those_of_transformers(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    assert tokenizer.eos_token_id == theirs.eos_token_id
    assert [tokenizer.token_id("<|im_end|>"), tokenizer.token_id("h")] == theirs.convert_tokens_to_ids(
        ["<|im_end|>", "h"]
    )
    assert tokenizer.generation_stop_ids == (tokenizer.token_id("<|endoftext|>"),)


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.text(ids) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()


def test_callers_may_change_the_tokens_that_they_get(tokenizer: Tokenizer) -> None:
    text = "an observation that comes again " * 4
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = ids.copy()
    ids.append(0)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


@given(ids=st.lists(st.integers(0, 450)))
@settings(max_examples=200, deadline=None)
def test_the_text_of_random_tokens_equals_the_librarys_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    ids = [i for i in ids if tokenizer.backend.id_to_token(i) is not None]
    added = tokenizer.backend.get_added_tokens_decoder()
    if not any(i in added for i in ids):  # the library decodes the text between added tokens piece by piece
        assert tokenizer.text(ids) == tokenizer.backend.decode(ids, skip_special_tokens=False)


@given(data=st.binary(), cuts=st.lists(st.integers(0, 30)))
def test_text_stream_equals_decoding_at_once(data: bytes, cuts: list[int]) -> None:
    stream, text, position = TextStream(), "", 0
    for cut in cuts:
        text += stream.push(data[position : position + cut])
        position += cut
    text += stream.push(data[position:]) + stream.finish()
    assert text == data.decode("utf-8", "replace")


def test_ids_beyond_the_vocabulary_are_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.text([100_000]) == ""


def test_a_sentencepiece_tokenizer_is_mapped_to_bytes(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"<unk>": 0, "\u2581hi": 1, "\u2581": 2, "<0xC3>": 3, "<0xA9>": 4}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).text([1, 3, 4, 2]) == " hi\u00e9 "


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"WordPiece.*supported are"):
        Tokenizer.load(tmp_path)


def test_a_missing_tokenizer_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_model_that_does_not_exist_is_reported() -> None:
    with pytest.raises(ConfigError, match="is not a local directory"):
        Tokenizer.load("no such/model name/at all")


def test_a_template_is_read_from_tokenizer_config(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path, template=None)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    path.write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.render_text([user("x")], None, add_generation_prompt=False) == "plain"
    assert tokenizer.render_text([user("x")], [LOOK_UP], add_generation_prompt=False) == "with 1"


def test_an_invalid_template_and_refused_messages_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="invalid chat template, line 1"):
        Tokenizer.load(make_tokenizer(tmp_path / "a", template="{% if %}"))
    refuses = Tokenizer.load(make_tokenizer(tmp_path / "b", template="{{ raise_exception('only users') }}"))
    with pytest.raises(InvalidRequestError, match="only users"):
        refuses.render_text([user("x")], None, add_generation_prompt=False)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path, template=evil))
    with pytest.raises(InvalidRequestError):
        tokenizer.render_text([user("x")], None, add_generation_prompt=False)


def test_templates_may_use_the_generation_tag_and_the_date(tmp_path: Path) -> None:
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y')[:2] }}"
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path, template=source))
    assert tokenizer.render_text([user("x")], None, add_generation_prompt=False) == "x20"
