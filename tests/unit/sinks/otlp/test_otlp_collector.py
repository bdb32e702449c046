"""Answers of a collector: what is repeated, when, and what is refused for good."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx2
import pytest

from art.errors import ConfigError, OverloadedError
from art.sinks.otlp.collector import BadBody, Collector
from art.sinks.otlp.settings import OtlpSettings

URL = "http://c/v1/traces"
SETTINGS = OtlpSettings(traces_url=URL)


def answering(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Collector:
    def answer(request: httpx2.Request) -> httpx2.Response:
        assert gzip.decompress(request.content) == b"spans"
        assert request.headers["authorization"] == "key"
        return httpx2.Response(status, headers=headers, content=body)

    return Collector(SETTINGS, httpx2.MockTransport(answer))


def post(collector: Collector) -> bytes:
    return collector.post(URL, b"spans", {"authorization": "key"})


def test_an_accepted_request_gives_the_answer() -> None:
    assert post(answering(202, body=b"ok")) == b"ok"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize(
    ("value", "pause_s"),
    [
        (None, 0), ("7", 7), ("0.5", 0.5), ("-3", 0), ("nan", 0), ("inf", 0), ("1e9", 300), ("soon", 0), ("", 0),
        pytest.param(format_datetime(datetime.now(UTC) + timedelta(seconds=9000)), 300, id="a date to come"),
        pytest.param(format_datetime(datetime.now(UTC) - timedelta(seconds=9000)), 0, id="a date that has passed"),
    ],
)  # fmt: skip
def test_a_busy_collector_is_asked_again_when_it_says(status: int, value: str | None, pause_s: float) -> None:
    with pytest.raises(OverloadedError) as caught:
        post(answering(status, {} if value is None else {"Retry-After": value}))
    assert caught.value.retry_after_s == pause_s


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_bad_body_is_not_repeated(status: int) -> None:
    with pytest.raises(BadBody) as caught:
        post(answering(status, body=b"\x1b[31mno \x00spans\n" * 500))
    assert str(caught.value).startswith(f"{URL} answered {status}: [31mno spans")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("status", [301, 401, 403, 404, 500])
def test_what_someone_may_repair_is_repeated(status: int) -> None:
    with pytest.raises(ConnectionError, match=f"answered {status}"):
        post(answering(status))


def test_nobody_is_there() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    with pytest.raises(ConnectionError, match="cannot be reached: ConnectError: refused"):
        Collector(SETTINGS, httpx2.MockTransport(refuse)).post(URL, b"", {})


@pytest.mark.parametrize(("status", "starts"), [(200, True), (400, True), (429, True), (422, False), (401, False)])
def test_only_a_collector_that_lets_us_in_starts(status: int, starts: bool) -> None:
    collector = answering(status)
    if starts:
        collector.check(URL, b"spans", {"authorization": "key"}, name="otlp")
        return
    with pytest.raises(ConfigError, match=f"the sink `otlp` cannot start: {URL} answered {status}"):
        collector.check(URL, b"spans", {"authorization": "key"}, name="otlp")
