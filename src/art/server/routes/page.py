"""The page: its files, and login. These routes are for browsers; programs send their key to all others."""

from __future__ import annotations

import asyncio

from art.errors import AuthenticationError, NotFoundError
from art.protocol.keys import Empty, LoginRequest, PageLink, PageSession
from art.server.asgi import header, send_bytes
from art.server.auth import Caller
from art.server.call import Call, Route
from art.server.openapi import art_version
from art.server.page.browser import make_cookie, read_cookies
from art.viewer.page_files import INDEX, page_files

_FOR_EVER = "public, max-age=31536000, immutable"
NOT_MODIFIED = 304


async def index(call: Call) -> None:
    """Show the page. It asks for a key if the browser has no session."""
    files = await asyncio.to_thread(page_files)
    etag, fields = f'"{files.version}"', {"cache-control": "no-cache"}
    if header(call.scope, b"if-none-match") == etag:
        await send_bytes(call.send, NOT_MODIFIED, b"", headers=fields | {"etag": etag})
        return
    await _send_file(call, files.index(f"static/{files.version}/"), INDEX, fields | {"etag": etag})


async def static_file(call: Call) -> None:
    """Send a file of the page. Its address changes with its content, so browsers may keep it for ever."""
    files = await asyncio.to_thread(page_files)
    name = "/".join(call.path[part] for part in ("folder", "file") if part in call.path)
    if call.path["version"] != files.version or name not in files.content:
        raise NotFoundError("there is no such file of the page; reload the page if the server was updated")
    await _send_file(call, files.content[name], name, {"cache-control": _FOR_EVER})


async def _send_file(call: Call, body: bytes, name: str, fields: dict[str, str]) -> None:
    content_type = page_files().content_type(name).encode()
    await send_bytes(call.send, 200, body, content_type=content_type, headers=fields)


async def login(call: Call) -> None:
    """Open a session of the page, by a key or a one-time code, and set its cookie."""
    request, page = await call.body(LoginRequest), call.server.page
    client = call.scope.get("client")
    address = client[0] if client else "?"
    page.failed_logins.check(address)
    try:
        if request.key is not None:
            caller = call.server.keyring.find(request.key.encode("latin-1", "replace"))
        else:
            caller = call.server.keyring.caller(page.sessions.redeem(request.code or ""))
    except AuthenticationError as error:
        page.failed_logins.note(address)
        if request.key is not None and error.message.startswith("the API key is wrong"):
            raise AuthenticationError("this key does not open the page of this server") from None
        raise
    caller.check_scope("infer")  # all that the page shows needs it
    text, _ = page.sessions.open(caller.key_id)
    cookie = make_cookie(call.scope, text, https=page.addresses.is_https(call.scope))
    body = _describe(call, caller).model_dump_json().encode()
    await send_bytes(call.send, 200, body, headers={"set-cookie": cookie, "cache-control": "no-store"})


async def session(call: Call) -> PageSession:
    """Return what this session of the page, or this key, may do."""
    return _describe(call, call.caller)


def _describe(call: Call, caller: Caller) -> PageSession:
    has_server = call.server.page.has_server
    return PageSession(
        key_id=caller.key_id, project=caller.project, scopes=sorted(caller.scopes), has_server=has_server,
        base_url=f"{call.scope['scheme']}://{header(call.scope, b'host')}/v1" if has_server else None,
        version=art_version(),
    )  # fmt: skip


async def logout(call: Call) -> None:
    """End the session, and remove its cookie."""
    await call.body(Empty)
    https = call.server.page.addresses.is_https(call.scope)
    for text in read_cookies(call.scope, https=https):
        call.server.page.sessions.close(text)
    await send_bytes(call.send, 200, b"{}", headers={"set-cookie": make_cookie(call.scope, "", https=https)})


async def make_link(call: Call) -> PageLink:
    """Make a one-time code that opens the page in a browser, with the rights of the key that asks."""
    await call.body(Empty)
    code, expires_at = call.server.page.sessions.make_code(call.caller.key_id)
    return PageLink(code=code, expires_at=expires_at)


_HTML, _ANY = ("text/html",), ("text/javascript", "text/css", "image/svg+xml", "text/plain")
PAGE_ROUTES = [
    Route("GET", "/", index, scope=None, media=_HTML, from_page=True),
    Route("GET", "/static/{version}/{file}", static_file, scope=None, media=_ANY, from_page=True),
    Route("GET", "/static/{version}/{folder}/{file}", static_file, scope=None, media=_ANY, from_page=True),
    Route("POST", "/view/login", login, scope=None, request=LoginRequest, response=PageSession, from_page=True),
    Route("POST", "/view/logout", logout, scope=None, request=Empty, response=Empty, from_page=True),
    Route("GET", "/view/api/session", session, scope="infer", response=PageSession, from_page=True),
]
ROUTES = [*PAGE_ROUTES, Route("POST", "/view/links", make_link, scope="infer", request=Empty, response=PageLink)]
