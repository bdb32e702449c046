"""The page's files and answers: headers, caches, and what they may not say."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from art.server.call import PAGE_HEADERS
from art_page.bundle import join_modules, page_files, read_sources
from tests.support.page import OPERATOR, Browser, open_browser

KEY = {"authorization": f"Bearer {OPERATOR}"}
MAX_BYTES = 300_000
POLICY = PAGE_HEADERS["content-security-policy"]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as browser:
        yield browser


async def test_the_page_and_every_file_that_it_names(browser: Browser) -> None:
    http = browser.client()
    page = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    addresses = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    assert [address.rpartition("/")[2] for address in addresses] == ["icon.svg", "page.css", "page.js"]
    for address in addresses:
        for encoding in ("identity", "gzip"):
            response = await http.get(f"/{address}", headers={"accept-encoding": encoding})
            assert response.status_code == 200, address
            assert "immutable" in response.headers["cache-control"]
            assert response.headers.get("content-encoding", "identity") == encoding
            assert response.content == page_files().content[address.rpartition("/")[2]]
    assert (await http.get("/", headers={"if-none-match": page.headers["etag"]})).status_code == 304


async def test_every_answer_of_the_page_has_the_headers_of_a_browser(browser: Browser) -> None:
    http = browser.client()
    for path in ("/", "/static/0/none.js", "/view/api/runs", "/view/api/session"):
        response = await http.get(path)
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert "unsafe" not in POLICY
    assert "frame-ancestors 'none'" in POLICY


async def test_only_the_files_of_the_page_are_sent(browser: Browser) -> None:
    http, version = browser.client(), page_files().version
    for path in (
        "viewer.py",
        "../viewer.py",
        "..%2fviewer.py",
        "lib/..",
        "lib/../main.js/x",
        "%2e%2e/viewer.py",
        "lib",
    ):
        response = await http.get(f"/static/{version}/{path}")
        assert response.status_code in (401, 404)
        assert "class Viewer" not in response.text
    assert (await http.get("/static/0123456789abcdef/main.js")).status_code == 404


def test_what_is_packaged() -> None:
    """The page is small, and nothing lies beside it that is no part of it."""
    sources, script = read_sources(), page_files().content["page.js"].decode()
    assert sum(len(zlib.compress(data)) for data in sources.values()) < MAX_BYTES  # as it is in the wheel
    folder = Path(str(files("art_page").joinpath("static")))
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert on_disk == sources.keys()
    assert all(f"\n// {name}\n" in script for name in sources if name.endswith(".js") and "/vendor/" not in f"/{name}")


def test_modules_are_joined_in_the_order_in_which_they_need_each_other() -> None:
    sources = {
        "main.js": 'import { one, two as second } from "./a/b.js";\nimport { c } from "./c.js";\ncheck(one(), second, c);',
        "a/b.js": 'import { c } from "../c.js";\nexport function one() { return c; }\nexport const two = 2;',
        "c.js": "export const c = 3;",
    }
    script = join_modules(sources)
    assert script.index("// c.js") < script.index("// a/b.js") < script.index("// main.js")
    assert script.count("// c.js") == 1
    assert "const { one, two: second } = module1;" in script
    assert "return { one, two };" in script
    with pytest.raises(ValueError, match=r"c\.js imports itself: main\.js -> c\.js -> c\.js"):
        join_modules({"main.js": 'import { c } from "./c.js";', "c.js": 'import { c } from "./c.js";'})


async def test_an_answer_that_did_not_change_is_not_sent_again(browser: Browser) -> None:
    http = browser.client()
    first = await http.get("/view/api/runs", headers=KEY)
    known = KEY | {"if-none-match": first.headers["etag"]}
    assert (await http.get("/view/api/runs", headers=known)).status_code == 304
    assert len(browser.viewer.asked) == 1
    _, reader = browser.keys.create("reader", project="a", scopes=["infer"])
    other = await http.get("/view/api/runs", headers={"x-api-key": reader, "if-none-match": first.headers["etag"]})
    assert other.status_code == 200  # another key sees something else
    browser.viewer.tag = "2"
    assert (await http.get("/view/api/runs", headers=known)).status_code == 200


async def test_only_admins_see_where_files_lie(browser: Browser) -> None:
    http = browser.client()
    _, reader = browser.keys.create("reader", project="a", scopes=["infer"])
    for path in ("/view/api/runs", "/view/api/runs/a/agent"):
        assert "/usr/share/models/qwen" in (await http.get(path, headers=KEY)).text
        shown = (await http.get(path, headers={"x-api-key": reader})).text
        assert "/usr/share" not in shown
        assert '"qwen"' in shown


async def test_numbers_that_json_lacks_are_null(browser: Browser) -> None:
    http = browser.client()
    assert (await http.get("/view/api/runs/a/agent/costs", headers=KEY)).json()["total_usd"] is None
    assert (await http.get("/view/api/runs/a/agent", headers=KEY)).json()["settings"] == {"note": None}


@pytest.mark.parametrize(
    "path",
    ["runs?limit=3", "runs/a/agent/rollouts?sort=colour", "runs/a/agent/rollouts?limit=5000", "runs/a/agent/steps/x"],
)
async def test_a_wrong_query_says_what_is_wrong(browser: Browser, path: str) -> None:
    response = await browser.client().get(f"/view/api/{path}", headers=KEY)
    assert response.status_code == 400
    assert any(word in response.text for word in ("limit", "sort", "step"))


async def test_files_without_a_server_have_the_page_and_nothing_else(tmp_path: Path) -> None:
    with open_browser(tmp_path, has_server=False) as browser:
        http = await browser.logged_in(OPERATOR)
        assert (await http.get("/")).status_code == 200
        session = (await http.get("/view/api/session")).json()
        assert (session["has_server"], session["base_url"]) == (False, None)
        assert (await http.get("/view/api/runs")).status_code == 200
        for method, path in (("POST", "/api/models/a/agent/fork"), ("GET", "/v1/models"), ("GET", "/api/jobs")):
            assert (await http.request(method, path, headers=KEY)).status_code == 404
