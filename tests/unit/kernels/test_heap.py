"""A process keeps freed memory for its next tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys
from art.kernels.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def work():
    blocks = [bytearray(b"x") * (12 * 2**20) for _ in range(4)]
for _ in range(4):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another allocator")
def test_freed_blocks_are_used_again_without_asking_the_system() -> None:
    faults = {
        way: int(subprocess.run([sys.executable, "-c", _SCRIPT, way], check=True, capture_output=True).stdout)
        for way in ("keep", "return")
    }
    assert faults["keep"] < 100
    assert faults["return"] > 4 * 1000  # 48 MB are 12,000 pages of 4 KiB
