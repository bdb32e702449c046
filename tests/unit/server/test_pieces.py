"""A JSON text that is decoded in pieces gives what the decoder makes of the whole, and no piece is large."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import orjson
import pytest
from pydantic import ValidationError

from art.protocol.training import TrainRequest, WireTrajectory, validate_training
from art.server.bodies import pieces
from tests.unit.protocol.test_json_bounds import random_value

SOMETHING = [b",", b"[", b"]", b"{", b"}", b'"', b"\\", b":", b" ", b"1"]


def broken(text: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(text))
    if rng.random() < 0.5:
        del text[at]
    else:
        text[at:at] = rng.choice(SOMETHING)
    return text


def decoded(text: bytearray, decode: object) -> object:
    try:
        return decode(text)  # type: ignore[operator]
    except orjson.JSONDecodeError:
        return "not valid JSON"


def test_the_result_is_that_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    num_valid = 0
    for seed in range(1500):
        rng = random.Random(seed)
        monkeypatch.setattr(pieces, "PIECE", rng.choice([0, 1, 3, 8, 20]))
        value = random_value(rng)
        text = bytearray(json.dumps(value, ensure_ascii=seed % 2 == 0, indent=rng.choice([None, 1])).encode())
        assert decoded(text, pieces.loads) == value
        damaged = broken(text, rng)
        expected = decoded(damaged, orjson.loads)
        assert decoded(damaged, pieces.loads) == expected, bytes(damaged)
        num_valid += expected != "not valid JSON"
    assert 0 < num_valid < 1500


def test_no_piece_is_much_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def spied(text: bytes) -> object:
        sizes.append(len(text))
        return orjson.loads(text)

    trajectory = {"histories": [{"items": [{"role": "user", "content": "hello world " * 20}] * 30}]}
    body = {"job_id": "job-00001", "groups": [{"trajectories": [trajectory] * 40}] * 20}
    text = bytearray(orjson.dumps(body))
    monkeypatch.setattr(pieces, "orjson", SimpleNamespace(loads=spied))
    assert pieces.loads(text) == body
    assert len(text) > 20 * pieces.PIECE
    assert max(sizes) < 2 * pieces.PIECE
    assert sum(sizes) < 1.1 * len(text)


def test_long_strings_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 10)
    for text in ("x" * 300_000, '\\"[{,' * 50_000, "\\" * 99_999):
        value = {"a": [text, {"b": text}], text: 1}
        assert pieces.loads(bytearray(orjson.dumps(value))) == value


def test_trajectories_are_checked_one_at_a_time() -> None:
    body = {"job_id": "job-00001", "groups": [{"trajectories": [{"histories": []}, {"histories": 3}]}]}
    with pytest.raises(ValidationError) as error:
        validate_training(TrainRequest, body)
    assert [one["loc"] for one in error.value.errors()] == [("groups", 0, "trajectories", 1, "histories")]
    assert isinstance(body["groups"][0]["trajectories"][0], WireTrajectory)  # type: ignore[index]
    for wrong in (None, [], {"groups": 3}, {"groups": [3]}, {"groups": [{"trajectories": {"a": 1}}]}):
        with pytest.raises(ValidationError):
            validate_training(TrainRequest, wrong)
