"""Langfuse's two addresses, as its public OpenAPI file and its own client describe them: OTLP, and scores.

`POST /api/public/scores` takes a list and answers 202, or 207 with counts (newer servers); or one score, and answers 200
with its id (older ones). Scores with the same id replace each other. The rules for fields are those of `CreateScoreRequest`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.support.otlp_receiver import Answer, Receiver, serve

FIELDS = {
    "id": str, "traceId": str, "sessionId": str, "observationId": str, "datasetRunId": str, "name": str, "comment": str,
    "metadata": dict, "environment": str, "queueId": str, "dataType": str, "configId": str, "source": str,
    "timestamp": str, "value": (int, float, str),
}  # fmt: skip
MAX_BODY = 2**20


class FakeLangfuse(Receiver):
    def __init__(self, public: str, secret: str, *, takes_lists: bool) -> None:
        token = base64.b64encode(f"{public}:{secret}".encode()).decode()
        super().__init__({"authorization": f"Basic {token}"})
        self.takes_lists = takes_lists
        self.scores: dict[str, dict[str, Any]] = {}
        self.num_score_requests = 0
        self.rejects: str | None = None
        """Scores of this name are rejected."""
        self.score_answers: list[Answer] = []

    def answer(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if path == "/api/public/otel/v1/traces":
            if headers.get("x-langfuse-ingestion-version") != "4":
                return Answer(400, body=b"this test wants the version")
            return super().answer("/v1/traces", headers, body)
        if path != "/api/public/scores":
            return Answer(404)
        if any(headers.get(key) != value for key, value in self.required.items()):
            return Answer(401)
        if headers.get("content-encoding") == "gzip" or headers.get("content-type") != "application/json":
            return Answer(415)
        self.num_score_requests += 1
        if self.score_answers:
            return self.score_answers.pop(0)
        return self._take(json.loads(body)) if len(body) <= MAX_BODY else Answer(413)

    def _take(self, given: Any) -> Answer:
        if isinstance(given, list) != self.takes_lists:
            return Answer(400, body=b'{"message": "Invalid request data"}')
        errors = [error for score in (given if self.takes_lists else [given]) if (error := self._keep(score))]
        if not self.takes_lists:
            return Answer(400, body=errors[0].encode()) if errors else Answer(200, body=b'{"id": "x"}')
        if not errors:
            return Answer(202, body=b'{"message": "Accepted"}')
        counts = {"accepted": len(given) - len(errors), "rejected": len(errors)}
        return Answer(207, body=json.dumps(counts | {"errors": [{"message": error} for error in errors]}).encode())

    def _keep(self, score: Any) -> str | None:
        for key, value in score.items():
            if not isinstance(value, FIELDS.get(key, ())):
                return f"{key} is not valid"
        if "name" not in score or "value" not in score or "traceId" not in score or score["name"] == self.rejects:
            return "the score is not valid"
        self.scores[score["id"]] = score
        return None


@contextmanager
def fake_langfuse(public: str = "pk", secret: str = "sk", *, takes_lists: bool = True) -> Iterator[FakeLangfuse]:
    state = FakeLangfuse(public, secret, takes_lists=takes_lists)
    with serve(state.answer) as url:
        state.url = url
        yield state
