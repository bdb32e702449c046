"""The walk: the image runs restricted as in compose.yaml and with the command of the Kubernetes manifests, and each
promise of docs/images.md is looked at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.images.building import ROOT, image_name
from tools.images.containers import Containers
from tools.images.looking import look_at_files, look_at_processes, look_for_compiler

NAME = "art-walk"
URL = "http://127.0.0.1:5000"
MODEL = "/models/tiny"
AGENT = Path(__file__).with_name("agent.py")
READY_WITHIN_S = 300.0
KUBERNETES = ROOT / "deploy/kubernetes"
EVERY_S = 0.2
"""Seconds between two looks at a server that starts."""


class Walk:
    """One walk through the image of a target.

    Attributes:
        containers: Docker or podman.
        target: a target of the Dockerfile.
    """

    def __init__(self, containers: Containers, target: str) -> None:
        self.containers = containers
        self.target = target
        self.image = image_name(target)
        self.flags = restrictions(containers, yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cpu"])

    def run(self) -> None:
        """Start the image without a network, use it, end it, start it again, and print what was seen.

        Raises:
            AssertionError: the image does not keep a promise.
            RuntimeError: a command failed that should not.
        """
        os.environ["ART_API_KEY"] = secrets.token_hex(16)  # passed on by its name, so no command line has it
        with self._clean_up():
            self._look_at_the_image()
            self._refuse()
            self._start()
            with _step("a rollout and a training step: the model is at step 1"):
                assert self.use() == (0, 1)
            self._stop_and_start()
            with _step("step 1 is still there, and step 2 follows"):
                assert self.use() == (1, 2)
            with _step("it was killed: the same, step 3 follows"):
                self.containers.call("kill", "--signal", "KILL", NAME)
                self.containers.call("wait", NAME)
                self.containers.call("start", NAME)
                self._until_ready()
                assert self.use() == (2, 3)

    def use(self) -> tuple[int, int]:
        """Run `agent.py` in the container. Return the steps of the model before and after it."""
        variables = ("--env", "ART_API_KEY", "--env", f"ART_SERVER_URL={URL}")
        inside = ("exec", "--interactive", "--workdir", "/tmp", *variables, NAME, "python", "-", MODEL)
        before, after, num_tokens = map(int, self.containers.call(*inside, text=AGENT.read_text()).split())
        assert num_tokens > 0
        return before, after

    def _look_at_the_image(self) -> None:
        with _step("no file that user 10001 may change, no caches; `art --version` is the version of the label"):
            look_at_files(self.containers, self.image)
        if self.target == "cuda":
            with _step("g++ compiles, and vLLM is imported, without a GPU"):
                look_for_compiler(self.containers, self.image, self.flags)
        with _step("a tiny model is made in the volume of models"):
            make = ("tiny-model", MODEL, "--warm-start-steps", "20")
            self.containers.call(
                "run", "--rm", "--no-healthcheck", *self.flags, "--entrypoint", "art", self.image, *make
            )
        with _step("the volume of data gets a folder that only root may read, as new disks have"):
            root = ("--network", "none", "--user", "0", "--entrypoint", "mkdir", "--volume", f"{NAME}-data:/data")
            alone = ("run", "--rm", "--no-healthcheck", *self.containers.limits(), *root, self.image)
            self.containers.call(*alone, "--mode", "0700", "/data/lost+found")

    def _refuse(self) -> None:
        with _step("without a key it refuses to start"):
            self._refuses("without a key", *self.flags, self.image)
        with _step("with the settings for a GPU it refuses to start, since there is none"):
            settings = f"--volume={KUBERNETES}/cuda:/etc/art:ro"
            command = (self.image, *pod_arguments(), "--model", MODEL)
            self._refuses("CUDA", *self.flags, "--env", "ART_API_KEY", settings, *command)

    def _start(self) -> None:
        with _step("/health answers"):
            settings = f"--volume={KUBERNETES}/cpu:/etc/art:ro"  # its models are replaced by --model
            command = (self.image, *pod_arguments(), "--model", MODEL)
            started = ("run", "--detach", "--name", NAME, "--env", "ART_API_KEY")
            self.containers.call(*started, *self.flags, settings, *command)
            self._until(lambda: self._status("/health") == 200)
        with _step("/ready answers: the model is loaded"):
            self._until_ready()
        with _step("the health check of the image passes"):
            self._until(lambda: self.containers.passes_health_check(NAME))
        with _step("it runs without root, capabilities and ways to get them, on a read-only root"):
            look_at_processes(self.containers, NAME)

    def _stop_and_start(self) -> None:
        with _step("SIGTERM: it ends with exit status 0"):
            self.containers.call("kill", "--signal", "TERM", NAME)
            assert self.containers.call("wait", NAME) == "0"
        with _step("it is ready again"):
            self.containers.call("start", NAME)
            self._until_ready()

    def _refuses(self, reason: str, *args: str) -> None:
        """Check that a container ends by itself with `reason` in its output."""
        done = self.containers.attempt("run", "--rm", "--no-healthcheck", *args)
        assert done.returncode == 1, done
        assert reason in done.stderr, done.stderr

    def _status(self, path: str) -> int:
        """Ask from inside the container. Return the status of the answer, or 0 without one."""
        ask = (
            "import sys, urllib.error, urllib.request\n"
            "try: print(urllib.request.urlopen(sys.argv[1], timeout=4).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError: print(0)"
        )
        return int(self.containers.call("exec", NAME, "python", "-c", ask, URL + path))

    def _until_ready(self) -> None:
        self._until(lambda: self._status("/ready") == 200)

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while not is_so():
            if time.monotonic() > deadline:
                log = self.containers.attempt("logs", NAME)
                raise AssertionError(f"not within {READY_WITHIN_S:g} s; the server's log: {log.stdout}{log.stderr}")
            time.sleep(EVERY_S)

    @contextlib.contextmanager
    def _clean_up(self) -> Iterator[None]:
        """Remove the container and its volumes before and after."""

        def remove() -> None:
            self.containers.remove(NAME, f"{NAME}-data", f"{NAME}-models")

        remove()
        try:
            yield
        finally:
            remove()


def restrictions(containers: Containers, service: dict[str, Any]) -> list[str]:
    """Translate what a service of compose.yaml restricts and mounts into flags of a run, without a network."""
    flags = ["--network", "none", "--shm-size", service["shm_size"].removesuffix("b"), *containers.limits()]
    flags += containers.read_only() if service["read_only"] else []
    flags += [f"--cap-drop={name}" for name in service["cap_drop"]]
    flags += [f"--security-opt={option.removesuffix(':true')}" for option in service["security_opt"]]
    flags += [f"--tmpfs={mount}" for mount in service["tmpfs"]]
    return flags + [f"--volume={NAME}-{volume}" for volume in service["volumes"]]


def pod_arguments() -> list[str]:
    """Read the arguments that the Kubernetes manifests give to the server."""
    server = yaml.safe_load((KUBERNETES / "base/server.yaml").read_text())
    arguments: list[str] = server["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


@contextlib.contextmanager
def _step(text: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)
