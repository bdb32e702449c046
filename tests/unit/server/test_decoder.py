"""Large bodies are decoded in a process of their own: the value is that of the whole text, and no piece is large."""

from __future__ import annotations

import io
import json
import random

import orjson
import pytest
from pydantic import ValidationError

from art.protocol.training import TrainRequest, WireTrajectory, validate_training
from art.server import body_decoder as decoder
from art.server.body_decoder import decode_apart, join, main
from tests.unit.protocol.test_json_bounds import random_value

MIB = 2**20


def lines(text: bytes) -> list[bytes]:
    target = io.BytesIO()
    main(io.BytesIO(text), target)
    return target.getvalue().splitlines(keepends=True)


def test_the_value_is_that_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(500):
        rng = random.Random(seed)
        monkeypatch.setattr(decoder, "PIECE_BYTES", rng.choice([0, 1, 3, 8, 20]))
        value = random_value(rng)
        text = json.dumps(value, ensure_ascii=seed % 2 == 0, indent=rng.choice([None, 1])).encode()
        assert join(lines(text)) == value
    for text in (b"", b"[1", b"[1,]", b'{"a"}', b"[] []", b'"\xff"'):
        with pytest.raises(orjson.JSONDecodeError):
            join(lines(text))


def test_no_piece_is_much_larger_than_asked() -> None:
    trajectory = {"histories": [{"items": [{"role": "user", "content": "hello world " * 20}] * 30}]}
    text = orjson.dumps({"job_id": "job-00001", "groups": [{"trajectories": [trajectory] * 40}] * 20})
    pieces = lines(text)
    assert len(text) > 20 * decoder.PIECE_BYTES
    assert max(map(len, pieces)) < 2 * decoder.PIECE_BYTES
    assert sum(map(len, pieces)) < 1.1 * len(text)


def test_a_process_decodes_and_says_what_is_wrong() -> None:
    value = {"a": [{"b": "\u20ac" * MIB}, *range(200_000)], "c": None}
    body = bytearray(orjson.dumps(value))
    assert decode_apart(body) == value
    assert not body, "its memory is free"
    with pytest.raises(orjson.JSONDecodeError, match=r"line 1 column 2097154"):
        decode_apart(bytearray(b"[" + b"1," * MIB))
    for text in (b'["%b"]', b'{"%b": 1}'):
        with pytest.raises(ValueError, match=r"a text of 5242[0-9]* bytes; each may have at most 4194304"):
            decode_apart(bytearray(text % (b"x" * 5 * MIB)))


def test_trajectories_are_checked_one_at_a_time() -> None:
    body = {"job_id": "job-00001", "groups": [{"trajectories": [{"histories": []}, {"histories": 3}]}]}
    with pytest.raises(ValidationError) as error:
        validate_training(TrainRequest, body)
    assert [one["loc"] for one in error.value.errors()] == [("groups", 0, "trajectories", 1, "histories")]
    assert isinstance(body["groups"][0]["trajectories"][0], WireTrajectory)  # type: ignore[index]
    for wrong in (None, [], {"groups": 3}, {"groups": [3]}, {"groups": [{"trajectories": {"a": 1}}]}):
        with pytest.raises(ValidationError):
            validate_training(TrainRequest, wrong)
