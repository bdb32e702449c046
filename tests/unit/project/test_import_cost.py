"""What `import art` costs: a user's agent pays it on every start."""

from __future__ import annotations

import subprocess
import sys

MAX_SECONDS = 0.45
"""CPU time. The time on the clock depends on what else the machine does."""
MAX_MODULES = 300
ABSENT = ["torch", "transformers", "peft", "fastapi", "starlette", "uvicorn", "openai", "numpy", "aiohttp"]

PROBE = f"""
import sys, time
start = time.process_time()
import art
seconds = time.process_time() - start
print(seconds, len(sys.modules), *(name for name in {ABSENT} if name in sys.modules))
"""


def probe() -> tuple[float, int, list[str]]:
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.split()
    return float(out[0]), int(out[1]), out[2:]


def test_import_is_light() -> None:
    runs = [probe() for _ in range(3)]
    seconds, num_modules, present = min(runs)
    assert present == []
    assert num_modules < MAX_MODULES
    assert seconds < MAX_SECONDS, "the best of three runs"
