"""Keep to the operator where files lie on the machine. Only keys with scope `admin` see absolute paths.

/srv/art/search/models/agent/checkpoints/0004  -->  search/models/agent/checkpoints/0004     in the data directory
/mnt/models/qwen                               -->  qwen                                     elsewhere
"""

from __future__ import annotations

import copy
import functools
import os
import re
from pathlib import Path

from art.errors import ArtError


class HiddenPaths:
    """Removes the folders of this machine from texts and errors."""

    def __init__(self, data_dir: Path | None) -> None:
        self.data_dir = data_dir
        roots = {str(data_dir.absolute()), str(data_dir.resolve())} if data_dir is not None else set()
        self._roots = [re.compile(rf"{re.escape(root)}(/|(?![\w-]))") for root in sorted(roots, key=len, reverse=True)]

    def hide(self, text: str) -> str:
        """Make the paths in a text relative to the data directory. Of a path elsewhere the last part is left."""
        for root in self._roots:
            text = root.sub(lambda match: "" if match[1] else "data_dir", text)
        return _absolute_path().sub(lambda match: match[1], text)

    def hide_in(self, error: BaseException) -> BaseException:
        """Return a copy of one of ART's errors without folders in its message; other errors as they are."""
        if not isinstance(error, ArtError):
            return error
        shown = copy.copy(error)
        shown.message = self.hide(error.message)
        return shown


@functools.cache
def _absolute_path() -> re.Pattern[str]:
    """Matches a path below a folder that this machine has at its root, so that paths of URLs stay as they are. The last
    part of the path is the group."""
    top = "|".join(re.escape(name) for name in sorted(os.listdir("/")))
    part = r"[^\s/'\"`,;:()\\<>\]\[{}]+"
    return re.compile(rf"(?<![\w.:/-])(?:file://)?/(?:{top})(?:/{part})*/({part})/?")
