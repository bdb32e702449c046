"""Where the browser is that walks the page, and the checker of accessibility that runs in it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

CHROMIUM = os.environ.get("ART_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
_AXE = Path(os.environ.get("ART_AXE", f"{sys.prefix}/node_modules/axe-core"), "axe.min.js")
AXE = _AXE if _AXE.is_file() else None
