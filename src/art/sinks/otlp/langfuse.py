"""Langfuse: traces by OTLP, and rewards and judges' scores by its scores API, since it reads no scores from spans.

    LANGFUSE_PUBLIC_KEY=pk-lf-...  LANGFUSE_SECRET_KEY=sk-lf-...  LANGFUSE_BASE_URL=https://cloud.langfuse.com

`POST /api/public/scores` takes a list of scores in newer servers, and one score per request in older ones. The first
request finds out. A score's id is a hash of trace and name, so sending it again replaces it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from art.errors import ConfigError
from art.sinks.otlp.collector import JSON, BadBody
from art.sinks.otlp.content import clean
from art.sinks.otlp.parcels import Parcel, pack
from art.sinks.otlp.settings import OtlpSettings, check_url, read_settings
from art.sinks.otlp.sink import OtlpSink
from art.sinks.otlp.trace import MAX_NAME, Place, RolloutTrace, hash_of
from art.sinks.sink import Run

_CLOUD = "https://cloud.langfuse.com"
_MAX_SCORES_BYTES = 900_000
"""Size of a list of scores. Langfuse's limit is 1 MiB."""
_MAX_SCORES = 100
_BAD_REQUEST = 400


class LangfuseSink(OtlpSink):
    """Sends rollouts to Langfuse: a session per group, a trace per rollout, a score for the reward and each judge."""

    name: ClassVar[str] = "langfuse"
    _takes_lists: bool | None = None
    """Whether the server takes lists of scores; `None` until it has answered."""

    def settings(self, environment: Mapping[str, str], run: Run) -> OtlpSettings:
        public, secret = (environment.get(f"LANGFUSE_{kind}_KEY", "") for kind in ("PUBLIC", "SECRET"))
        if not public or not secret:
            raise ConfigError(
                "the sink `langfuse` has no keys: set LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY",
                param="report_metrics",
            )
        host = environment.get("LANGFUSE_BASE_URL") or environment.get("LANGFUSE_HOST") or _CLOUD
        host = check_url(host, "LANGFUSE_BASE_URL").rstrip("/")
        token = base64.b64encode(f"{public}:{secret}".encode()).decode()
        resource = {"langfuse.environment": name} if (name := environment.get("LANGFUSE_TRACING_ENVIRONMENT")) else {}
        self._scores_url, self._score_headers = f"{host}/api/public/scores", {"authorization": f"Basic {token}"}
        return read_settings(
            environment,
            traces_url=f"{host}/api/public/otel/v1/traces",
            # Without the version, Langfuse shows new traces only after minutes.
            headers=self._score_headers | {"x-langfuse-ingestion-version": "4"},
            resource=resource,
        )

    def root_attributes(self, place: Place) -> Mapping[str, Any]:
        return {
            "langfuse.session.id": place.path.rpartition("/")[0][-MAX_NAME:],
            "langfuse.trace.tags": [place.split, f"step {place.step}"],
        }

    def parcels(self, traces: Iterable[RolloutTrace]) -> Iterator[Parcel[Any]]:
        scores: list[dict[str, Any]] = []

        def noted() -> Iterator[RolloutTrace]:
            for trace in traces:
                scores.extend(_scores(trace))
                yield trace

        yield from super().parcels(noted())
        yield from pack(
            scores, self._send_scores, lambda score: len(json.dumps(score)),
            max_bytes=_MAX_SCORES_BYTES, max_items=_MAX_SCORES,
        )  # fmt: skip

    def _send_scores(self, scores: Sequence[dict[str, Any]]) -> tuple[int, str]:
        if self._takes_lists is not False:
            try:
                answer = self._post(scores)
            except BadBody as error:
                if error.status != _BAD_REQUEST or self._takes_lists:
                    raise
                self._takes_lists = False  # a server before Langfuse 4
            else:
                self._takes_lists = True
                return _rejected(answer)
        for score in scores:  # after an error all are sent again: their ids make that harmless
            self._post(score)
        return 0, ""

    def _post(self, body: Any) -> bytes:
        return self._collector.post(self._scores_url, json.dumps(body).encode(), self._score_headers, JSON)


def _scores(trace: RolloutTrace) -> list[dict[str, Any]]:
    root, scores = trace.root, []
    for one in trace.evaluations:
        score = {
            "id": hash_of(root.trace_id.hex(), "score", one.name).hex()[:32],
            "traceId": root.trace_id.hex(),
            "name": clean(one.name)[:MAX_NAME],
            "value": one.value,
            "dataType": "NUMERIC",
            "timestamp": datetime.fromtimestamp(root.period.end, UTC).isoformat(),
        }
        if one.explanation:
            score["comment"] = clean(one.explanation)
        scores.append(score)
    return scores


def _rejected(body: bytes) -> tuple[int, str]:
    """Read the counts of an answer with status 207; one with 202 has none."""
    try:
        answer = json.loads(body)
        errors = "; ".join(str(error.get("message", error)) for error in answer.get("errors", []))
        return int(answer.get("rejected", 0)), errors
    except (ValueError, AttributeError, TypeError):
        return 0, ""
