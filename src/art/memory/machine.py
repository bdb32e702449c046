"""A property of this machine's processor that the trainer's memory depends on."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def packed_limit(memory_bytes: int, cpuinfo: Path = _CPUINFO) -> int:
    """Most bytes that a trainer on this CPU is expected to spend on packed copies of weights.

    The trainer measures whether they pay when it starts (`art.kernels.packed_linear`), which they do on AMD processors
    with AVX-512, and takes at most half of the memory that is available.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:  # not Linux
        return 0
    return memory_bytes // 2 if "AuthenticAMD" in text and "avx512f" in text else 0
