"""Regular expressions of JSON schema, as llguidance matches them: always on a whole text."""

from __future__ import annotations

import re

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@([a-zA-Z0-9]([a-zA-Z0-9\-]*[a-zA-Z0-9])?\.)+[a-zA-Z]{2,}",
    "ipv4": r"((25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])\.){3}(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.\-]*:[a-zA-Z0-9._~:/?#\[\]@!$&'()*+,;=%\-]+",
}
"""Regular expression of each `format` of a string that can be kept."""
_PART = re.compile(r"(?s)\\.|\[(?:\\.|[^\]\\])*\]|.")
_ANY = "(?s:.*)"


def anywhere(pattern: str) -> str | None:
    r"""A regular expression of the texts in which `pattern` is found; `None` if it has ^ or $ inside.

    Example:
        anywhere("^a|b")  # "(?:a(?s:.*)|(?s:.*)b)"
    """
    branches: list[list[str]] = [[]]
    depth = 0
    for part in _PART.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(part)
    whole = []
    for parts in branches:
        begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
        inner = parts[begins : len(parts) - ends]
        if "^" in inner or "$" in inner:
            return None
        whole.append(f"{'' if begins else _ANY}{''.join(inner)}{'' if ends else _ANY}")
    return f"(?:{'|'.join(whole)})"
