"""Requests that nobody would write, sent to a real server. `ART_FUZZ_CASES=10000` sends as many (`make fuzz`)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import art
from art.errors import error_from_code
from art.server.answers import failure
from tests.support.fuzz_forms import Dialect, anything, error_codes, form_bodies, texts

CASES = int(os.environ.get("ART_FUZZ_CASES", "50"))
ANSWER_WITHIN_S = 30.0
LIVE = "/view/api/live"
CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]
"""Answers are what the document says. That all which it allows is accepted is not asked: messages, for one, are checked
more closely than it can say."""

arguments = st.dictionaries(texts, anything, max_size=2).map(lambda value: json.dumps(value)) | texts
calls = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts, "arguments": arguments})},
    optional={"id": texts},
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": texts | parts},
    optional={
        "name": texts, "tool_calls": st.lists(calls, max_size=2), "tool_call_id": texts, "reasoning_content": texts,
        "provider_specific_fields": anything,
    },
)  # fmt: skip
tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": texts}, optional={"description": texts, "parameters": anything}),
    }
)
known = {
    "n": st.integers(1, 4), "seed": st.integers(-(2**63), 2**64 - 1), "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1), "max_completion_tokens": st.integers(1, 8), "stop": texts | st.lists(texts, max_size=5),
    "logprobs": st.booleans(), "top_logprobs": st.integers(0, 20), "tools": st.lists(tools, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | anything, "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}), "user": texts,
    "chat_template_kwargs": st.dictionaries(texts, st.booleans() | texts | st.integers(), max_size=2),
    "response_format": st.just({"type": "text"}), "metadata": st.dictionaries(texts, texts, max_size=2),
}  # fmt: skip
names = st.sampled_from(["tests/agent", "agent", "agent@0", "tests/agent@7", "agent@-1", "../../etc/passwd"]) | texts


@st.composite
def chat_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly right, with up to two fields that hold anything at all."""
    body: dict[str, Any] = {
        "model": draw(names) if draw(st.integers(0, 4)) == 4 else "tests/agent",
        "messages": draw(st.lists(messages, min_size=1, max_size=4)),
        "max_tokens": 4,
    }
    body |= {name: draw(known[name]) for name in draw(st.sets(st.sampled_from(sorted(known)), max_size=4))}
    if draw(st.integers(0, 9)) == 9:
        body["messages"][-1]["exchange_id"] = draw(texts)
    spoiled = st.sampled_from([*body, *known, "messages", "nobody_knows_this"]) | st.text(max_size=10)
    return body | {name: draw(anything) for name in draw(st.sets(spoiled, max_size=2))}


_LAST = {"chat/completions": "data: [DONE]\n\n", "responses": "}\n\n", "messages": "}\n\n"}


class Prober:
    """Sends requests, and looks at the answers for what must never be there."""

    def __init__(self, url: str, key: str, secrets: list[str]) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {key}"}
        self._http = httpx2.Client(base_url=url, headers=self.headers, timeout=ANSWER_WITHIN_S, trust_env=False)
        self._secrets = [key, *secrets, "Traceback (most recent call last)", "site-packages"]

    def post(self, path: str, content: bytes) -> httpx2.Response:
        response = self._http.post(path, content=content, headers={"content-type": "application/json"})
        self.check(response.status_code, response.text, content)
        if response.is_success and response.headers["content-type"].startswith("text/event-stream"):
            failed = [
                code for code in error_codes(response.text) if failure(error_from_code(code, "")).status_code >= 500
            ]
            assert not failed, response.text
            assert response.text.endswith(_LAST[path.rpartition("/v1/")[2]]), response.text
        return response

    def get(self, path: str, *, method: str = "GET", **params: str) -> httpx2.Response:
        response = self._http.request(method, path, params=params)
        self.check(response.status_code, response.text, json.dumps(params).encode(), str(response.url) + path)
        return response

    def check_live(self) -> None:
        """The stream that never ends: its head is what the document says."""
        with self._http.stream("GET", LIVE) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert next(response.iter_lines()).startswith("retry: ")

    def lift_quotas(self) -> None:
        """Undo quotas that random requests have set, or later requests get 429 instead of what they are to show."""
        for project in (None, "tests"):
            self._http.put("/api/quotas", json={"project": project, "quota": {}}).raise_for_status()

    def check(self, status: int, text: str, content: bytes, url: str = "") -> None:
        """What every answer must hold to; `content` and `url` are what was asked."""
        assert status < 500, (status, text)
        if status >= 400:
            assert json.loads(text)["error"], text
            # What the client sent itself may come back to it.
            leaked = [word for word in self._secrets if word in text and word.encode() not in content + url.encode()]
            assert not leaked, text

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def prober(backend: art.LocalBackend, model: art.TrainableModel, tiny_model: Path) -> Iterator[Prober]:
    url, key = model.inference_base_url, model.inference_api_key
    assert url is not None
    assert key is not None
    prober = Prober(url.partition("/projects/")[0], key, [str(backend.data_dir), str(tiny_model)])
    yield prober
    prober.close()


def often(cases: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=cases, deadline=None, suppress_health_check=checks, print_blob=True)


@pytest.mark.timeout(3600)
def test_chat_bodies(prober: Prober) -> None:
    statuses: Counter[int] = Counter()

    @often(CASES)
    @given(chat_bodies())
    def probe(body: dict[str, Any]) -> None:
        statuses[prober.post("/v1/chat/completions", json.dumps(body).encode()).status_code] += 1

    started = time.monotonic()
    probe()
    print(f"{statuses.total()} chat bodies in {time.monotonic() - started:.0f} s: {dict(statuses)}")
    assert statuses[200] > 0.1 * CASES  # enough of them get as far as the engine
    assert statuses[400] > 0


@pytest.mark.timeout(3600)
def test_bytes_that_are_no_chat_body(prober: Prober) -> None:
    @often(max(20, CASES // 10))
    @given(st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
    def probe(content: bytes) -> None:
        assert prober.post("/v1/chat/completions", content).status_code == 400

    probe()
    assert prober.post("/v1/chat/completions", b"[" * 100_000).status_code == 400


@pytest.mark.timeout(3600)
def test_requests_made_from_the_openapi_document(prober: Prober) -> None:
    schema = schemathesis.openapi.from_url(f"{prober.url}/openapi.json", headers=prober.headers)
    schema.config.generation.with_security_parameters = False  # wrong keys are other tests' business
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    assert LIVE in {operation.path for operation in operations}
    prober.check_live()
    operations = [operation for operation in operations if operation.path != LIVE]
    statuses: Counter[int] = Counter()
    for operation in operations:

        @often(max(2, CASES // len(operations)))
        @given(operation.as_strategy())
        def probe(case: Any) -> None:
            response = case.call(headers=prober.headers, timeout=ANSWER_WITHIN_S)
            statuses[response.status_code] += 1
            prober.check(response.status_code, response.text, response.request.body or b"", response.request.url)
            case.validate_response(response, checks=CONFORMANCE)

        try:
            probe()
        finally:
            prober.lift_quotas()
    print(f"{statuses.total()} requests of {len(operations)} operations: {dict(statuses)}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_bodies_that_ask_for_a_form(prober: Prober, dialect: Dialect) -> None:
    statuses: Counter[int] = Counter()

    @often(CASES // 3)
    @given(form_bodies(dialect))
    def probe(body: dict[str, Any]) -> None:
        statuses[prober.post(f"/v1/{dialect}", json.dumps(body).encode()).status_code] += 1

    started = time.monotonic()
    probe()
    print(f"{statuses.total()} forms of {dialect} in {time.monotonic() - started:.0f} s: {dict(statuses)}")
    assert statuses[200] > 0.1 * (CASES // 3)
    assert statuses[400] > 0
