"""Who may see the page: sessions end with their key, and neither another page nor another name gets in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from art_page.sessions import TRIES
from tests.support.page import OPERATOR, Browser, open_browser

FORK = {"job_id": "job-of-a", "from_name": "agent"}


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as browser:
        yield browser


async def test_a_key_opens_a_session_whose_cookie_is_not_the_key(browser: Browser) -> None:
    http = browser.client()
    assert (await http.get("/view/api/session")).status_code == 401
    response = await http.post("/view/login", json={"key": OPERATOR})
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/" in cookie
    assert "Secure" not in cookie  # over http a browser would drop it
    assert OPERATOR not in cookie + response.text
    session = (await http.get("/view/api/session")).json()
    assert (session["key_id"], session["project"], session["scopes"]) == ("server", None, ["admin"])
    assert session["has_server"] is True
    assert session["base_url"] == "http://localhost:5000/v1"
    assert (await http.get("/view/api/runs")).status_code == 200


async def test_the_cookie_is_secure_behind_https(tmp_path: Path) -> None:
    with open_browser(tmp_path, cors_origins=["https://art.lab.example"]) as browser:
        # A proxy that ends TLS: the server sees http, and the browser says https.
        http = browser.client("http://art.lab.example")
        headers = {"origin": "https://art.lab.example"}
        response = await http.post("/view/login", json={"key": OPERATOR}, headers=headers)
        assert response.status_code == 200
        cookie = response.headers["set-cookie"]
        assert cookie.startswith("__Host-art_session=")
        assert "Secure" in cookie
        value = cookie.partition(";")[0]
        fork = "/api/models/a/agent/fork"
        answer = await http.post(fork, json=FORK, headers=headers | {"cookie": value})
        assert answer.status_code == 202
        answer = await http.post(fork, json=FORK, headers={"cookie": value, "origin": "https://evil.example"})
        assert answer.status_code == 403


async def test_servers_of_one_machine_do_not_share_a_cookie(browser: Browser) -> None:
    one = await browser.client("http://localhost:5000").post("/view/login", json={"key": OPERATOR})
    other = await browser.client("http://localhost:6000").post("/view/login", json={"key": OPERATOR})
    assert one.headers["set-cookie"].partition("=")[0] != other.headers["set-cookie"].partition("=")[0]


async def test_a_session_may_do_what_its_key_may(browser: Browser) -> None:
    _, reader = browser.keys.create("reader", project="a", scopes=["infer"])
    http = await browser.logged_in(reader)
    assert (await http.get("/view/api/runs")).json()["runs"][0]["project"] == "a"
    assert browser.viewer.asked[-1] == ("runs", "a")
    assert (await http.get("/view/api/runs/a/agent")).status_code == 200
    for path in ("/view/api/runs/b/agent", "/view/api/runs/b/agent/costs", "/view/api/runs?project=b"):
        assert (await http.get(path)).status_code == 403
    response = await http.post("/api/models/a/agent/fork", json=FORK)
    assert response.status_code == 403
    assert "scope `train`" in response.text
    _, trainer = browser.keys.create("trainer", project="a", scopes=["infer", "train"])
    http = await browser.logged_in(trainer)
    assert (await http.post("/api/models/a/agent/fork", json=FORK)).status_code == 202
    assert (await http.post("/api/models/b/agent/fork", json=FORK)).status_code == 403


async def test_labels_need_a_key_that_may_train_and_a_request_of_the_page(browser: Browser) -> None:
    path = "/view/api/runs/a/agent/labels"
    _, reader = browser.keys.create("reader", project="a", scopes=["infer"])
    http = await browser.logged_in(reader)
    assert (await http.post(path, json={"star": True})).status_code == 403
    _, trainer = browser.keys.create("trainer", project="a", scopes=["infer", "train"])
    http = await browser.logged_in(trainer)
    answer = await http.post(path, json={"tags": ["baseline"]})
    assert (answer.status_code, answer.json()["tags"]) == (200, ["baseline"])
    assert (await http.post(path, json={"tags": ["a,b"]})).status_code == 400
    assert (await http.post("/view/api/runs/b/agent/labels", json={"star": True})).status_code == 403
    assert (await http.post(path, json={"star": True}, headers={"origin": "http://evil.example"})).status_code == 403
    del http.headers["x-art-page"]
    assert (await http.post(path, json={"star": True})).status_code == 403


async def test_a_cookie_opens_only_what_the_page_needs(browser: Browser) -> None:
    http = await browser.logged_in(OPERATOR)
    chat = {"model": "a/agent", "messages": [{"role": "user", "content": "hi"}]}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 401
    assert (await http.post("/api/models/a/agent/train", json={"job_id": "job-12345", "groups": []})).status_code == 401
    assert (await http.post("/view/links", json={})).status_code == 401
    assert browser.runtime.gateway.calls == []


async def test_an_unknown_address_is_not_taken_for_the_end_of_the_session(browser: Browser) -> None:
    http = await browser.logged_in(OPERATOR)
    assert (await http.get("/view/api/nothing/here")).status_code == 404
    assert (await http.get("/view/api/nothing/here", headers={"sec-fetch-site": "cross-site"})).status_code == 403
    assert (await browser.client().get("/view/api/nothing/here")).status_code == 401


async def test_a_session_ends_with_its_key(browser: Browser) -> None:
    key, text = browser.keys.create("short", project=None, scopes=["infer"])
    http = await browser.logged_in(text)
    assert (await http.get("/view/api/runs")).status_code == 200
    browser.keys.revoke(key.id)
    response = await http.get("/view/api/runs")
    assert response.status_code == 401
    assert "revoked" in response.text


async def test_a_key_that_may_read_nothing_is_told_so_at_the_login(browser: Browser) -> None:
    _, text = browser.keys.create("trainer", project="a", scopes=["train"])
    response = await browser.client().post("/view/login", json={"key": text})
    assert response.status_code == 403
    assert "scope `infer`" in response.text
    assert "set-cookie" not in response.headers


async def test_logging_out_ends_the_session_and_not_only_the_cookie(browser: Browser) -> None:
    http = await browser.logged_in(OPERATOR)
    cookie = dict(http.cookies)
    response = await http.post("/view/logout", json={})
    assert "Max-Age=0" in response.headers["set-cookie"]
    http.cookies.update(cookie)
    assert (await http.get("/view/api/runs")).status_code == 401


async def test_a_login_link_opens_once(browser: Browser) -> None:
    http = browser.client()
    made = await http.post("/view/links", json={}, headers={"authorization": f"Bearer {OPERATOR}"})
    code = made.json()["code"]
    assert (await http.post("/view/login", json={"code": code})).status_code == 200
    assert (await http.get("/view/api/runs")).status_code == 200
    again = await browser.client().post("/view/login", json={"code": code})
    assert again.status_code == 401
    assert "art view" in again.text


async def test_a_link_may_do_no_more_than_the_key_that_made_it(browser: Browser) -> None:
    key, text = browser.keys.create("reader", project="a", scopes=["infer"])
    http = browser.client()
    code = (await http.post("/view/links", json={}, headers={"x-api-key": text})).json()["code"]
    session = (await http.post("/view/login", json={"code": code})).json()
    assert (session["key_id"], session["project"], session["scopes"]) == (key.id, "a", ["infer"])
    code = (await http.post("/view/links", json={}, headers={"x-api-key": text})).json()["code"]
    browser.keys.revoke(key.id)
    assert (await browser.client().post("/view/login", json={"code": code})).status_code == 401


async def test_wrong_keys_are_limited_and_right_ones_wait_too(browser: Browser) -> None:
    http = browser.client()
    statuses = [(await http.post("/view/login", json={"key": f"wrong-{i}"})).status_code for i in range(TRIES + 2)]
    assert statuses == [401] * TRIES + [429, 429]
    response = await http.post("/view/login", json={"key": OPERATOR})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    # Clients with a key are no browsers: they go on.
    assert (await http.get("/view/api/runs", headers={"authorization": f"Bearer {OPERATOR}"})).status_code == 200


@pytest.mark.parametrize("body", [{}, {"key": "x", "code": "y"}, {"key": 3}, {"password": "x"}, {"key": "é" * 600}])
async def test_a_login_that_is_none(browser: Browser, body: object) -> None:
    assert (await browser.client().post("/view/login", json=body)).status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {"origin": "http://evil.example"}, {"origin": "http://localhost:3000"}, {"origin": "null"}, {"origin": ""},
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"x-art-page": None},
        {"origin": "https://localhost:5000"}, {"host": "evil.example"},
    ],
)  # fmt: skip
async def test_another_page_in_the_browser_changes_nothing(browser: Browser, change: dict[str, str | None]) -> None:
    http = await browser.logged_in(OPERATOR)
    for name, value in change.items():
        http.headers.pop(name, None)
        if value is not None:
            http.headers[name] = value
    cookie = "; ".join(f"{name}={value}" for name, value in http.cookies.items())
    browser.runtime.reset()
    response = await http.post("/api/models/a/agent/fork", json=FORK, headers={"cookie": cookie})
    assert response.status_code in (401, 403), response.text  # 401: the cookie is of another port
    assert browser.runtime.checkpoints.calls == []


@pytest.mark.parametrize("name", ["origin", "x-art-page"])
async def test_another_page_cannot_log_the_browser_in(browser: Browser, name: str) -> None:
    http = browser.client()
    http.headers.pop(name)
    for path, body in (("/view/login", {"key": OPERATOR}), ("/view/logout", {})):
        response = await http.post(path, json=body)
        assert response.status_code == 403
        assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:1234", 200), ("127.0.0.1:5000", 200), ("[::1]:5000", 200), ("10.1.2.3:80", 200),
        ("gpu-machine:5000", 200), ("art.lab.example", 200), ("evil.example", 403), ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403), ("art.lab.example:81", 403), ("", 403), ("a@localhost", 403), ("[x", 403),
    ],
)  # fmt: skip
async def test_a_name_that_somebody_pointed_here_shows_nothing(tmp_path: Path, host: str, status: int) -> None:
    with open_browser(tmp_path, host="gpu-machine", cors_origins=["https://art.lab.example"]) as browser:
        http = await browser.logged_in(OPERATOR)
        assert (await http.get("/", headers={"host": host})).status_code == status
        if status == 403:
            answer = await http.get("/view/api/runs", headers={"host": host})
            assert answer.status_code in (401, 403)  # 401: the cookie is of another port
            assert "agent" not in answer.text
        refused = await http.get("/", headers={"host": "evil.example"})
        assert "cors_origins" in refused.text
        # A client with a key reaches the server by any name.
        with_key = {"host": "evil.example", "authorization": f"Bearer {OPERATOR}"}
        assert (await http.get("/view/api/runs", headers=with_key)).status_code == 200


async def test_cookies_of_other_programs_do_not_matter(browser: Browser) -> None:
    http = await browser.logged_in(OPERATOR)
    own = f"art_session_5000={http.cookies.get('art_session_5000')}"
    for cookie in (
        f'{{"a": 1}}=x; bad cookie; {own}',
        f"x=y;;=;{own}; art_session_50=1",
        f"art_session_5000=evil; {own}",
    ):
        assert (await http.get("/view/api/runs", headers={"cookie": cookie})).status_code == 200
    for cookie in ("art_session_5000=", "art_session_5000=guess", "art_session_5000"):
        http.cookies.clear()
        assert (await http.get("/view/api/runs", headers={"cookie": cookie})).status_code == 401
