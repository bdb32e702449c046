"""What `import art` costs: a user's agent pays it on every start.

Counted in modules, since the time depends on what else the machine does (about 0.16 s of CPU time when it is idle).
"""

from __future__ import annotations

import subprocess
import sys

MAX_MODULES = 300
ABSENT = ["torch", "transformers", "peft", "fastapi", "starlette", "uvicorn", "openai", "numpy", "aiohttp"]

PROBE = f"""
import sys
import art
print(len(sys.modules), *(name for name in {ABSENT} if name in sys.modules))
"""


def test_import_is_light() -> None:
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.split()
    assert out[1:] == [], "heavy modules that an agent does not need"
    assert int(out[0]) < MAX_MODULES
