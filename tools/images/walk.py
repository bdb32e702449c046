"""The walk: the image runs restricted as in compose.yaml and with the command of the Kubernetes manifests, and each
promise of docs/images.md is looked at once."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.images.building import ROOT, image_name

PODMAN = ("podman", "--runtime", "runc")
"""Podman with the runtime that Docker uses, which also runs where control groups of both versions are mounted."""
NAME = "art-walk"
URL = "http://127.0.0.1:5000"
MODEL = "/models/tiny"
AGENT = Path(__file__).with_name("agent.py")
READY_WITHIN_S = 300.0
KUBERNETES = ROOT / "deploy/kubernetes"
EVERY_S = 0.2
"""Seconds between two looks at a server that starts."""


def walk(target: str) -> None:
    """Start the image of `target` without a network, use it, end it, start it again, and print what was seen.

    Raises:
        AssertionError: the image does not keep a promise.
        RuntimeError: a command failed that should not.
    """
    image = image_name(target)
    flags = restrictions(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cpu"])
    os.environ["ART_API_KEY"] = secrets.token_hex(16)  # podman passes it on by its name, so no command line has it
    with _clean_up():
        with _step("a tiny model is made in the volume of models"):
            make = ("tiny-model", MODEL, "--warm-start-steps", "20")
            _podman("run", "--rm", "--no-healthcheck", *flags, "--entrypoint", "art", image, *make)
        with _step("the volume of data gets a folder that only root may read, as new disks have"):
            root = ("--network", "none", "--user", "0", "--entrypoint", "mkdir", "--volume", f"{NAME}-data:/data")
            limits = [flag for flag in flags if flag.startswith("--ulimit")]
            _podman("run", "--rm", "--no-healthcheck", *limits, *root, image, "--mode", "0700", "/data/lost+found")
        with _step("without a key it refuses to start"):
            _refuses("without a key", *flags, image)
        with _step("with the settings for a GPU it refuses to start, since there is none"):
            settings = f"--volume={KUBERNETES}/cuda:/etc/art:ro"
            _refuses("CUDA", *flags, "--env", "ART_API_KEY", settings, image, *pod_arguments(), "--model", MODEL)
        with _step("/health answers"):
            settings = f"--volume={KUBERNETES}/cpu:/etc/art:ro"  # its models are replaced by --model
            command = (image, *pod_arguments(), "--model", MODEL)
            _podman("run", "--detach", "--name", NAME, "--env", "ART_API_KEY", *flags, settings, *command)
            _until(lambda: _status("/health") == 200)
        with _step("/ready answers: the model is loaded"):
            _until(lambda: _status("/ready") == 200)
        with _step("the health check of the image passes"):
            _podman("healthcheck", "run", NAME)
        with _step("it runs without root, capabilities and ways to get them, on a read-only root"):
            look_inside()
        with _step("a rollout and a training step: the model is at step 1"):
            assert use() == (0, 1)
        _stop_and_start()
        with _step("step 1 is still there, and step 2 follows"):
            assert use() == (1, 2)
        with _step("it was killed: the same, step 3 follows"):
            _podman("kill", "--signal", "KILL", NAME)
            _podman("wait", NAME)
            _podman("start", NAME)
            _until(lambda: _status("/ready") == 200)
            assert use() == (2, 3)


def restrictions(service: dict[str, Any]) -> list[str]:
    """Translate what a service of compose.yaml restricts and mounts into flags of `podman run`, without a network."""
    flags = ["--network", "none", "--shm-size", service["shm_size"].removesuffix("b")]
    for name, limit, enough in (("nofile", resource.RLIMIT_NOFILE, 65536), ("nproc", resource.RLIMIT_NPROC, 16384)):
        _, most = resource.getrlimit(limit)  # podman's own limits are refused where root may not raise its limits
        number = enough if most == resource.RLIM_INFINITY else min(most, enough)
        flags.append(f"--ulimit={name}={number}:{number}")
    flags += ["--read-only", "--read-only-tmpfs=false"] if service["read_only"] else []
    flags += [f"--cap-drop={name}" for name in service["cap_drop"]]
    flags += [f"--security-opt={option.removesuffix(':true')}" for option in service["security_opt"]]
    flags += [f"--tmpfs={mount}" for mount in service["tmpfs"]]
    return flags + [f"--volume={NAME}-{volume}" for volume in service["volumes"]]


def pod_arguments() -> list[str]:
    """Read the arguments that the Kubernetes manifests give to the server."""
    server = yaml.safe_load((KUBERNETES / "base/server.yaml").read_text())
    arguments: list[str] = server["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def look_inside() -> None:
    """Check the processes of the running container: user, capabilities, root folder, process 1, open ports.

    Raises:
        AssertionError: one of them is not as docs/images.md says.
    """
    status = dict(line.split(":\t", 1) for line in _inside("cat", "/proc/1/status").splitlines() if ":\t" in line)
    assert status["Name"] == "tini"
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('x')"
    for folder, may in {
        "/data": True,
        "/models": True,
        "/tmp": True,
        "/": False,
        "/opt/art": False,
        "/etc": False,
    }.items():
        done = subprocess.run([*PODMAN, "exec", NAME, "python", "-c", write, f"{folder}/probe"], capture_output=True)
        assert (done.returncode == 0) is may, (folder, done.stderr)
    listening = [line.split() for line in _inside("cat", "/proc/net/tcp").splitlines()[1:]]
    assert {words[1] for words in listening if words[3] == "0A"} == {"00000000:1388"}, "5000 and no other port"


def use() -> tuple[int, int]:
    """Run `agent.py` in the container. Return the steps of the model before and after it."""
    variables = ("--env", "ART_API_KEY", "--env", f"ART_SERVER_URL={URL}")
    inside = ("exec", "--interactive", "--workdir", "/tmp", *variables, NAME, "python", "-", MODEL)
    before, after, num_tokens = map(int, _podman(*inside, text=AGENT.read_text()).split())
    assert num_tokens > 0
    return before, after


def _refuses(reason: str, *args: str) -> None:
    """Check that a container ends by itself with `reason` in its output."""
    done = subprocess.run([*PODMAN, "run", "--rm", "--no-healthcheck", *args], capture_output=True, text=True)
    assert done.returncode == 1, done
    assert reason in done.stderr, done.stderr


def _stop_and_start() -> None:
    with _step("SIGTERM: /ready says no while others are answered (`drain_s`), then it ends with exit status 0"):
        _podman("kill", "--signal", "TERM", NAME)
        _until(lambda: _status("/ready") == 503)
        assert _status("/health") == 200
        assert _podman("wait", NAME) == "0"
    with _step("it is ready again"):
        _podman("start", NAME)
        _until(lambda: _status("/ready") == 200)


def _status(path: str) -> int:
    """Ask from inside the container. Return the status of the answer, or 0 without one."""
    ask = (
        "import sys, urllib.error, urllib.request\n"
        "try: print(urllib.request.urlopen(sys.argv[1], timeout=4).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
        "except OSError: print(0)"
    )
    return int(_inside("python", "-c", ask, URL + path))


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {READY_WITHIN_S:g} s; the server's log: {_podman('logs', NAME)}")
        time.sleep(EVERY_S)


@contextlib.contextmanager
def _step(text: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)


@contextlib.contextmanager
def _clean_up() -> Iterator[None]:
    """Remove the container and its volumes before and after."""

    def remove() -> None:
        subprocess.run([*PODMAN, "rm", "--force", "--ignore", "--time", "0", NAME], check=True, capture_output=True)
        subprocess.run([*PODMAN, "volume", "rm", "--force", f"{NAME}-data", f"{NAME}-models"], capture_output=True)

    remove()
    try:
        yield
    finally:
        remove()


def _inside(*command: str) -> str:
    return _podman("exec", NAME, *command)


def _podman(*args: str, text: str = "") -> str:
    """Run podman with `text` as its standard input, and return its output.

    Raises:
        RuntimeError: it failed. The message has what it wrote to standard error.
    """
    done = subprocess.run([*PODMAN, *args], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"podman {' '.join(args)}: exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()
