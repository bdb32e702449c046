"""What the page shows, as JSON: one route for each row of `art.viewer.paths`."""

from __future__ import annotations

import hashlib
from urllib.parse import parse_qs

from art.errors import PermissionDeniedError
from art.server.asgi import header, send_bytes
from art.server.call import Call, Handler, Route
from art.viewer.paths import PATHS, ReadPath, RunsQuery, query_parameters
from art.viewer.viewer import Viewer

BASE = "/view/api/"
NOT_MODIFIED = 304


def _handler(row: ReadPath) -> Handler:
    """Make the handler of a row."""

    async def answer(call: Call) -> None:
        asked = row.asked(call.path, parse_qs(call.scope["query_string"].decode("latin-1")))
        if row.query is RunsQuery and call.caller.project is not None:  # the only path that covers several projects
            call.caller.check_project(asked.query.project or call.caller.project)
            asked = row.asked(call.path, {"project": [call.caller.project]})
        elif "project" not in row.path and call.caller.project is not None:
            raise PermissionDeniedError(
                f"key {call.caller.key_id} is for project {call.caller.project!r}, and comparisons of models can have "
                "models of several projects",
                param="project",
            )
        known = header(call.scope, b"if-none-match")

        def read(viewer: Viewer) -> tuple[str, bytes | None]:
            """Return the tag of the answer, and the answer if the browser does not have it."""
            project = asked.values.get("project") or getattr(asked.query, "project", None)
            etag = _etag(call, viewer.version(project, asked.values.get("name"), of_log=row.is_of_log))
            return etag, None if etag == known else row.read(viewer, asked).model_dump_json().encode()

        etag, body = await call.server.page.read(read)
        headers = {"etag": etag, "cache-control": "private, no-cache", "vary": "cookie, authorization"}
        if body is None:
            await send_bytes(call.send, NOT_MODIFIED, b"", headers=headers)
            return
        await send_bytes(call.send, 200, call.without_paths(body) if row.names_files else body, headers=headers)

    answer.__doc__ = f"{row.summary[0].upper()}{row.summary[1:]}, for the page."
    return answer


def _etag(call: Call, version: str) -> str:
    """Tag of an answer: of the files, of what was asked, and of who asked, since not all see the same."""
    parts = (version, call.scope["path"], call.scope["query_string"].decode("latin-1"), call.caller.key_id)
    return f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"'


ROUTES = [
    Route(
        "GET", BASE + row.path, _handler(row), scope="infer", response=row.answer, query=query_parameters(row),
        from_page=True,
    )
    for row in PATHS
]  # fmt: skip
