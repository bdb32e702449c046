"""What every route must say of itself, so that keys, limits and the OpenAPI document cover it."""

from __future__ import annotations

import inspect

import pytest

from art.server.call import Route
from tests.support.page import ALL_ROUTES

OPEN = {
    ("GET", "/health"), ("GET", "/ready"), ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/static/{version}/{file}"),
    ("POST", "/view/login"), ("POST", "/view/logout"),
}  # fmt: skip
"""Asked by what has no key. A new route needs one."""
WITHOUT_BODY = {
    ("POST", "/api/jobs/{job_id}/cancel"), ("POST", "/api/models/{project}/{name}/checkpoints/{step}/promote")
}  # fmt: skip

each_route = pytest.mark.parametrize("route", ALL_ROUTES, ids=lambda route: f"{route.method} {route.path}")


@each_route
def test_a_route_is_described(route: Route) -> None:
    assert inspect.getdoc(route.handler)
    assert (route.response is None) == ("application/json" not in route.media)
    has_body = route.method not in ("GET", "DELETE") and (route.method, route.path) not in WITHOUT_BODY
    assert (route.request is not None) == has_body
    assert (route.scope is None) == ((route.method, route.path) in OPEN)


def test_routes_are_different() -> None:
    assert len({(route.method, route.path) for route in ALL_ROUTES}) == len(ALL_ROUTES)


FROM_PAGE = {
    ("POST", "/view/login"), ("POST", "/view/logout"), ("POST", "/api/models/{project}/{name}/checkpoints/delete"),
    ("POST", "/api/models/{project}/{name}/fork"), ("POST", "/api/models/{project}/{name}/export"),
    ("POST", "/api/jobs/{job_id}/cancel"), ("POST", "/api/models/{project}/{name}/checkpoints/{step}/promote"),
    ("POST", "/view/api/runs/{project}/{name}/labels"),
}  # fmt: skip
"""What a cookie may do besides reading. A route that samples, trains or uses the server's credentials is not among it."""


def test_what_the_page_may_change() -> None:
    assert {
        (route.method, route.path) for route in ALL_ROUTES if route.from_page and route.method != "GET"
    } == FROM_PAGE
