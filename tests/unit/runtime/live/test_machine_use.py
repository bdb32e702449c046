"""What the system view measures of the machine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from art.runtime.live import WINDOW_S, DirectorySize, Rates, cpu_seconds, parse_gpu_memory


def test_rates_are_means_over_at_most_a_minute() -> None:
    rates = Rates()
    assert rates.add({"a": 0.0}, now=100.0) == {}
    assert rates.add({"a": 50.0, "new": 9.0}, now=110.0) == {"a": 5.0}
    assert rates.add({"a": 50.0, "new": 19.0}, now=150.0) == {"a": 1.0}
    later = rates.add({"a": 110.0, "new": 20.0}, now=105.0 + WINDOW_S)  # the first sample is too old by now
    assert later == {"a": pytest.approx(60 / 55), "new": pytest.approx(11 / 55)}
    assert rates.add({"a": 0.0}, now=166.0) == {}  # the process began again
    assert rates.add({"a": 1.0}, now=1000.0) == {}  # nobody has asked for long


def test_a_page_that_asks_twice_at_once_sees_no_rate() -> None:
    """Nothing has grown between two questions at once, and a busy process would seem to be idle."""
    rates = Rates()
    rates.add({"a": 5.0}, now=100.0)
    assert rates.add({"a": 5.0}, now=100.2) == {}
    assert rates.add({"a": 9.0}, now=102.0) == {"a": 2.0}


def test_many_viewers_do_not_make_many_samples() -> None:
    rates = Rates()
    for i in range(100):
        rates.add({"a": float(i)}, now=100 + i / 100)
    assert len(rates._samples) == 1


async def test_the_size_of_a_directory_is_counted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "deep" / "er" / "b").write_bytes(b"x" * 500)
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    size = DirectorySize(tmp_path)
    async with asyncio.timeout(60):
        while (disk := size.disk()).data_bytes is None:
            await asyncio.sleep(0.005)
    assert 1500 <= disk.data_bytes < 1500 + 4096  # with the link itself
    assert 0 < disk.free_bytes < disk.total_bytes


def test_the_listing_of_gpus_is_parsed() -> None:
    parts = parse_gpu_memory("NVIDIA H200, 1024, 143771\nA, odd name, 1, 2\nNVIDIA A100 MIG, [N/A], [N/A]\n\n")
    assert [(part.name, part.used_bytes, part.total_bytes) for part in parts] == [
        ("NVIDIA H200", 2**30, 143771 * 2**20), ("A, odd name", 2**20, 2 * 2**20),
    ]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    before = cpu_seconds(os.getpid())
    assert before is not None
    started = time.process_time()
    while time.process_time() - started < 0.05:
        pass
    after = cpu_seconds(os.getpid())
    assert after is not None
    assert after > before
    assert cpu_seconds(2**22 + 1) is None
