"""The tests of OpenAI's own package, with the client of `model.openai_client()` in place of its `AsyncOpenAI`.

`make test-clients` installs that package and its tests (its source distribution). What they find must be what they find with
the stock class. Some fail with both: their recorded answers are not in the distribution.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SDK = Path(__file__).parent / "sdk"
ENVIRONMENT = ROOT / ".venv-clients-sdk"
PYTHON = ENVIRONMENT / "bin/python"
TESTS = [
    "tests/test_client.py", "tests/api_resources/chat", "tests/lib/chat", "tests/test_response.py", "tests/test_streaming.py",
    "tests/test_legacy_response.py", "tests/test_required_args.py", "tests/test_retry_after_overflow.py",
    "tests/test_httpx_compat.py", "tests/test_httpx2.py",
]  # fmt: skip
NOT_TIMED = ["-k", "not drain and not connection_reuse"]
"""Without tests of streams that hold a stopwatch: on a busy machine they fail with either class."""
MIN_PASSED = 550

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="`make test-clients` installs OpenAI's tests"),
]


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([PYTHON, SDK / "stub_api.py", str(port)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def run(api: str, folder: Path, stock: str) -> tuple[dict[str, str], str]:
    """Outcome of each test by its name, and what pytest printed."""
    (source,) = ENVIRONMENT.glob("source/openai-*/")
    report = folder / f"{stock}.xml"
    options = ["-p", "swapped", "-o", "addopts=", "-W", "default", "-q", f"--junitxml={report}", *NOT_TIMED]
    done = subprocess.run(
        [PYTHON, "-m", "pytest", *options, *TESTS],
        cwd=source, capture_output=True, text=True,
        env=os.environ | {
            "PYTHONPATH": f"{SDK}{os.pathsep}{ROOT / 'src'}", "TEST_API_BASE_URL": api, "ART_STOCK_CLIENT": stock,
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        },
    )  # fmt: skip
    cases = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        cases[f"{case.get('classname')}::{case.get('name')}"] = " and ".join(sorted(kinds)) or "passed"
    return cases, done.stdout


def test_the_sdks_tests_end_as_with_the_stock_class(api: str, tmp_path: Path) -> None:
    stock, _ = run(api, tmp_path, "1")
    ours, printed = run(api, tmp_path, "0")
    assert {name: (end, ours.get(name)) for name, end in stock.items() if ours.get(name) != end} == {}
    passed = sum(end == "passed" for end in ours.values())
    light = re.search(r"light path: \{'light': (\d+)", printed)
    assert passed >= MIN_PASSED
    assert light is not None
    assert int(light[1]) >= 2, "its tests of `create` over aiohttp take the light path"
    print(f"{passed} of {len(ours)} tests pass with either class; {light[0]}")
