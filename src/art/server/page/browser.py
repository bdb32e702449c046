"""What the server asks of a browser: the right Host, the right Origin, and the page's own header. And what it tells it.

GET   with a cookie    Host is an address of the server; the request does not come from another origin
POST  with a cookie    also: Origin is the page's own, and the header `x-art-page` is there

A name that an attacker points at this machine (DNS rebinding) is no address of the server. An IP address in `Host`
cannot be such a name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request

from art.errors import PermissionDeniedError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of the page, of its files and of the answers to it. https://owasp.org/www-project-secure-headers/"""
PAGE_HEADER = "x-art-page"
"""Header of the page's own requests that change something. A form of another page cannot send it."""
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class Addresses:
    """The addresses at which browsers reach a server."""

    def __init__(self, host: str = "127.0.0.1", public_urls: Iterable[str] = ()) -> None:
        """
        Args:
            host: the address that the server listens on.
            public_urls: further addresses, of a proxy before the server.
        """
        self._names = {"localhost"} | ({host.lower()} - _WILDCARDS)
        self._public = {url.lower().rstrip("/") for url in public_urls}
        self._public_hosts = {urlsplit(url).netloc for url in self._public}

    def check_host(self, request: Request) -> None:
        """Check that the request names an address of this server.

        Raises:
            PermissionDeniedError: its `Host` is another name.
        """
        hosts = request.headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        if host in self._public_hosts or _name_of(host) in self._names or _is_ip(_name_of(host)):
            return
        raise PermissionDeniedError(
            f"this server does not know the address {host[:200]!r}, so it does not show its page there. If it is "
            "right, its operator can add it to `public_urls` in the server's settings, e.g. "
            '`public_urls = ["https://art.lab.example"]`; `localhost` and IP addresses need no setting'
        )

    def check_page_request(self, request: Request) -> None:
        """Check that a request with a cookie comes from the page, and not from another one in the same browser.

        Raises:
            PermissionDeniedError: it comes from elsewhere, or it would change something and does not say that it comes
                from the page.
        """
        self.check_host(request)
        site = request.headers.get("sec-fetch-site")
        if site not in (None, "same-origin", "none"):
            raise PermissionDeniedError("this request comes from another page; send a key instead of the cookie")
        if request.method in ("GET", "HEAD"):
            return
        if PAGE_HEADER not in request.headers:
            raise PermissionDeniedError(
                f"a request that changes something needs the header `{PAGE_HEADER}` beside the cookie; "
                "programs send a key instead"
            )
        origin = request.headers.get("origin", "").lower()
        host = request.headers.get("host", "").lower()
        own = {url for url in self._public if urlsplit(url).netloc == host} or {f"{request.scope['scheme']}://{host}"}
        if origin not in own:
            raise PermissionDeniedError(
                f"this request has the origin {origin[:200]!r}, and the page is at {sorted(own)[0]!r}. Behind a proxy "
                "with TLS, add the address that the browser shows to `public_urls` in the server's settings"
            )

    def is_https(self, request: Request) -> bool:
        """Whether the browser reaches the server by https, directly or through a proxy."""
        host = request.headers.get("host", "").lower()
        return request.scope["scheme"] == "https" or f"https://{host}" in self._public


def cookie_name(request: Request, *, https: bool) -> str:
    """Name of the session's cookie. It has the port, since a browser sends cookies to all ports of a host.

    With https the prefix `__Host-` makes browsers refuse the cookie from another host of the same domain.
    """
    port = request.headers.get("host", "").rpartition(":")[2]
    name = f"art_session_{port}" if port.isdigit() else "art_session"
    return f"__Host-{name}" if https else name


def read_cookies(request: Request, *, https: bool) -> list[str]:
    """Return what may be the id of the request's session: the value of each cookie of that name.

    A page on another port of this host can set one too, even one that the browser sends first.
    """
    name, texts = cookie_name(request, https=https), []
    for value in request.headers.getlist("cookie"):  # split by hand: other programs may have set any form of cookies
        for part in value.split(";"):
            own, _, text = part.strip().partition("=")
            if own == name and text:
                texts.append(text)
    return texts


def make_cookie(request: Request, text: str, *, https: bool) -> str:
    """Make the header `Set-Cookie` for a session. An empty `text` removes the cookie."""
    parts = [f"{cookie_name(request, https=https)}={text}", "Path=/", "HttpOnly", "SameSite=Strict"]
    parts += ["Secure"] if https else []
    return "; ".join([*parts, *([] if text else ["Max-Age=0"])])


def _name_of(host: str) -> str:
    try:
        return "" if "@" in host else urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
