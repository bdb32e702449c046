"""The OpenAPI document, made from the table of routes and the wire types: https://spec.openapis.org/oas/v3.1.0"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from art.protocol.answers import ErrorAnswer
from art.server.call import MAX_SEED, SEED_HEADER, Route
from art.storage.layout import NAME_PATTERN

_REFERENCE = "#/components/schemas/{model}"
_JSON = "application/json"
_OTHER_MEDIA = {"text/event-stream": {"type": "object"}}
"""Schemas of other media types than JSON and plain text: of each server-sent event, with its fields."""
_DISTRIBUTION = "agent-reinforcement-trainer"


def build_openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """Make the OpenAPI document of a server that has these routes."""
    routes = list(routes)
    kinds = {kind for route in routes for kind in (route.request, route.response) if kind is not None} | {ErrorAnswer}
    ordered = sorted(kinds, key=lambda kind: (kind.__name__, kind.__module__))
    schemas, definitions = models_json_schema([(kind, "validation") for kind in ordered], ref_template=_REFERENCE)
    by_kind = {kind: schemas[kind, "validation"] for kind in ordered}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ART server",
            "version": art_version(),
            "description": "Serves models with an OpenAI-compatible API, records what they sample, and trains them.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, schemas: dict[type[BaseModel], Any]) -> dict[str, Any]:
    text = inspect.getdoc(route.handler) or ""
    operation: dict[str, Any] = {
        # From method and path, because several paths may share a handler.
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()} {route.path}").strip("_"),
        "summary": text.partition("\n")[0].rstrip("."),
        "tags": [_tag(route.path)],
        "parameters": _parameters(route),
        "security": [] if route.scope is None else [{"bearer": []}, {"x-api-key": []}],
        "responses": {
            str(route.status): {
                "description": HTTPStatus(route.status).phrase,
                "content": {
                    media: {
                        "schema": schemas[route.response]
                        if route.response and media == _JSON
                        else _OTHER_MEDIA.get(media, {"type": "string"})
                    }
                    for media in route.media
                },
            },
            "default": {
                "description": "An error; `error.code` names its kind.",
                "content": {_JSON: {"schema": {"type": "object"} if route.error_body else schemas[ErrorAnswer]}},
            },
        },
    }
    if route.scope is not None:
        operation["description"] = f"Needs a key with scope `{route.scope}`."
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[route.request]}}}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    name_schema: dict[str, Any] = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    places = [("path", name, name_schema) for name in re.findall(r"{(\w+)}", route.path)]
    places += [("query", name, TypeAdapter(kind).json_schema()) for name, kind in route.query.items()]
    if route.samples:
        places.append(("header", SEED_HEADER, {"type": "integer", "minimum": 0, "maximum": MAX_SEED}))
    return [{"name": name, "in": at, "required": at == "path", "schema": schema} for at, name, schema in places]


def _tag(path: str) -> str:
    if "/v1/" in path:
        return "sampling"
    return path.strip("/").removeprefix("api/").partition("/")[0] if path.startswith("/api/") else "operations"


def art_version() -> str:
    """Return the version of ART that is installed; "0" in a checkout."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout
        return "0"
