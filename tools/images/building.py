"""The build: Docker on the Dockerfile, or buildah with a base image from Debian's packages."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAND_IN = "localhost/art-python"
PACKAGES = ("ca-certificates", "netbase", "tzdata", "python3", "python3-venv")
"""Packages of Debian that stand in for what the official Python image adds to Debian."""


def image_name(target: str) -> str:
    """Return the name of the image that `build_image` makes of a target of the Dockerfile."""
    return f"art-server:{target}"


def stand_in() -> str:
    """Return the name of a Python image that is made from Debian's packages. It is made once and kept.

    Its Debian is the one that the Dockerfile's PYTHON_IMAGE names, e.g. bookworm of `python:3.11-slim-bookworm`.
    Debian's own Python must be the version that PYTHON_IMAGE names.

    Raises:
        RuntimeError: the Dockerfile names another Python than this Debian has.
    """
    python, suite = default_base()
    name = f"{STAND_IN}:{python}-{suite}"
    if subprocess.run(["buildah", "inspect", name], capture_output=True).returncode == 0:
        return name
    container = _output("buildah", "from", "scratch")
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/root.tar"
            _run("mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, archive)
            _run("buildah", "add", "--quiet", container, archive, "/")
        inside = ("buildah", "run", "--isolation", "chroot", container, "--")
        found = _output(*inside, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if found != python:
            raise RuntimeError(
                f"Debian {suite} has Python {found}, the Dockerfile asks for {python}: name an image with --base"
            )
        _run(*inside, "ln", "-s", "/usr/bin/python3", "/usr/local/bin/python")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        _run("buildah", "config", "--env", f"PATH={path}", container)
        _run("buildah", "commit", "--quiet", container, name)
    finally:
        _run("buildah", "rm", container)
    return name


def default_base() -> tuple[str, str]:
    """Read the version of Python and the Debian that the Dockerfile builds on, e.g. ("3.11", "bookworm")."""
    found = re.search(r"^ARG PYTHON_IMAGE=python:([\d.]+)-slim-(\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("Dockerfile: expected a line like ARG PYTHON_IMAGE=python:3.11-slim-bookworm")
    return found[1], found[2]


def build_image(target: str, base: str | None, options: Sequence[str], docker: bool) -> None:
    """Run the Dockerfile's lines up to `target`.

    Args:
        target: a target of the Dockerfile.
        base: the Python image to build on. With None, Docker takes the Dockerfile's, and buildah `stand_in()`.
        options: further options of `docker build` or `buildah build`.
        docker: build with Docker and not with buildah.
    """
    program = ["docker", "build"]
    if not docker:
        base = base or stand_in()
        program = ["buildah", "build", "--isolation", "chroot", "--network", "host", "--format", "docker", "--layers"]
    if base is not None:
        program += ["--build-arg", f"PYTHON_IMAGE={base}"]
    _run(*program, "--target", target, "--tag", image_name(target), *options, str(ROOT))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
