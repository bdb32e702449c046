"""Where the browser is that walks the page."""

from __future__ import annotations

import os
import shutil

CHROMIUM = os.environ.get("ART_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
