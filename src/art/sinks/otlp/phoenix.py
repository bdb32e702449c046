"""Arize Phoenix: traces by OTLP, and rewards and judges' scores as annotations of the rollout's span.

    PHOENIX_COLLECTOR_ENDPOINT=http://localhost:6006  [PHOENIX_API_KEY=...]  [PHOENIX_PROJECT_NAME=...]

Phoenix shows events of spans, but filters and sorts by annotations. An annotation with the same span, name and
identifier replaces the earlier one. Phoenix takes them before their spans are stored, and joins them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from art.sinks.otlp.collector import JSON
from art.sinks.otlp.content import clean
from art.sinks.otlp.parcels import Parcel, pack
from art.sinks.otlp.settings import OtlpSettings, check_url, read_pairs, read_settings
from art.sinks.otlp.sink import OtlpSink
from art.sinks.otlp.trace import MAX_NAME, RolloutTrace
from art.sinks.sink import Run

_LOCAL = "http://localhost:6006"
_MAX_BYTES = 900_000
_MAX_ANNOTATIONS = 500
_RESERVED = "note"
"""Name that Phoenix keeps for notes of people."""


class PhoenixSink(OtlpSink):
    """Sends rollouts to Phoenix, each training project to a project of the same name."""

    name: ClassVar[str] = "phoenix"

    def settings(self, environment: Mapping[str, str], run: Run) -> OtlpSettings:
        base = environment.get("PHOENIX_COLLECTOR_ENDPOINT") or _LOCAL
        base = check_url(base, "PHOENIX_COLLECTOR_ENDPOINT").rstrip("/").removesuffix("/v1/traces")
        headers = {key.lower(): value for key, value in read_pairs(environment, "PHOENIX_CLIENT_HEADERS").items()}
        if key := environment.get("PHOENIX_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        self._annotations_url = f"{base}/v1/span_annotations"
        return read_settings(
            environment,
            traces_url=f"{base}/v1/traces",
            headers=headers,
            resource={"openinference.project.name": environment.get("PHOENIX_PROJECT_NAME") or run.project},
        )

    def parcels(self, traces: Iterable[RolloutTrace]) -> Iterator[Parcel[Any]]:
        annotations: list[dict[str, Any]] = []

        def noted() -> Iterator[RolloutTrace]:
            for trace in traces:
                annotations.extend(_annotations(trace))
                yield trace

        yield from super().parcels(noted())
        yield from pack(
            annotations, self._send_annotations, lambda one: len(json.dumps(one)),
            max_bytes=_MAX_BYTES, max_items=_MAX_ANNOTATIONS,
        )  # fmt: skip

    def _send_annotations(self, annotations: Sequence[dict[str, Any]]) -> tuple[int, str]:
        body = json.dumps({"data": annotations}).encode()
        self._collector.post(self._annotations_url, body, self._settings.headers, JSON)
        return 0, ""


def _annotations(trace: RolloutTrace) -> list[dict[str, Any]]:
    annotations = []
    for one in trace.evaluations:
        name = clean(one.name)[:MAX_NAME]
        explanation = {} if one.explanation is None else {"explanation": clean(one.explanation)}
        annotations.append(
            {
                "span_id": trace.root.span_id.hex(),
                "name": f"{name}_score" if name == _RESERVED else name,
                "annotator_kind": "CODE",  # the log does not say which scores a language model gave
                "result": {"score": one.value, **explanation},
                "identifier": "art",
            }
        )
    return annotations
