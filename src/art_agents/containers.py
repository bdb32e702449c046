"""One container for each rollout, by the command line of Podman or Docker.

    engine = ContainerEngine.find()
    image = await engine.build(Path("task/environment"), timeout_s=600)
    async with engine.open(image, Limits(memory_mb=512)) as container:
        await container.put(archive)                         # files, as a tar archive with paths from /
        finished = await container.run("ls -l", cwd="/app", timeout_s=10)

A container has no network, no rights that its user lacks, and limits of memory, processes and open files. Its first
process reads from this one: when this process ends, however it ends, so does the container, with everything in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from art.errors import ConfigError, ToolServerError

MAX_READ_BYTES = 16 * 2**20
"""Size of an output after which its command is ended, so that it cannot keep this process busy."""
_START_S = 60.0
_GRACE_S = 10.0
"""Time after its limit in which a command must have ended; then all processes of the container are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What commands in a container may use."""

    memory_mb: int = 2048
    """Memory of all processes together."""
    cpus: float | None = None
    """Processor time per second; `None` is that of the machine."""
    file_mb: int = 512
    """Size of each file. The disk as a whole is not limited."""
    max_processes: int = 256
    output_bytes: int = 65536
    """Bytes of a command's output that are kept: the first and the last half."""

    def flags(self) -> list[str]:
        import resource  # which Windows lacks

        ulimits = {"nofile": (resource.RLIMIT_NOFILE, 4096), "nproc": (resource.RLIMIT_NPROC, 4096)}
        flags = [
            f"--memory={self.memory_mb}m", f"--memory-swap={self.memory_mb}m", f"--pids-limit={self.max_processes}",
            f"--ulimit=fsize={self.file_mb * 2**20}:{self.file_mb * 2**20}",
        ]  # fmt: skip
        for name, (kind, enough) in ulimits.items():  # a user cannot be given more than the own limit
            _, most = resource.getrlimit(kind)
            number = enough if most == resource.RLIM_INFINITY else min(most, enough)
            flags.append(f"--ulimit={name}={number}:{number}")
        return flags if self.cpus is None else [*flags, f"--cpus={self.cpus:g}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a command."""

    code: int
    """Exit code; 137 if it was killed, e.g. at its time limit."""
    output: str
    """Standard output and standard error together."""
    timed_out: bool


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """Podman or Docker."""

    program: str

    @classmethod
    def find(cls, program: Literal["podman", "docker"] | None = None) -> Self:
        """Find a program that can run containers as this user: the one that is asked for, or Podman, or Docker.

        Raises:
            ConfigError: there is none, or it does not work.
        """
        reasons = []
        for name in [program] if program else ["podman", "docker"]:
            if (reason := _why_not(name)) is None:
                return cls(name)
            reasons.append(reason)
        raise ConfigError(
            "commands of a model run only in containers, and this machine cannot run any: "
            f"{'; '.join(reasons)}. Install Podman "
            "(`apt install podman`, which needs no administrator to run) or Docker, or let Harbor run the tasks and "
            "point its agent at ART's address: docs/rollouts.md"
        )

    async def build(self, folder: Path, *, timeout_s: float) -> str:
        """Build the Dockerfile of a folder, or take what was built of it before. Returns the image's id.

        Raises:
            ConfigError: it cannot be built in this time.
        """
        return await self._build(str(folder), timeout_s=timeout_s)

    async def build_layer(self, dockerfile: str, *, timeout_s: float) -> str:
        """Build the text of a Dockerfile that copies no file, in the same way."""
        with tempfile.TemporaryDirectory() as empty:
            return await self._build("--file=-", empty, stdin=dockerfile.encode(), timeout_s=timeout_s)

    async def _build(self, *what: str, stdin: bytes = b"", timeout_s: float) -> str:
        built = await self.call("build", "--quiet", *what, stdin=stdin, timeout_s=timeout_s)
        if built.code:
            how = f"did not end in {timeout_s:g} s" if built.timed_out else "failed"
            of = f" of {stdin.decode()!r}" if stdin else ""
            raise ConfigError(f"`{self.program} build {what[-1]}`{of} {how}: {built.output.strip()[-1500:]}")
        return built.output.split()[-1]

    async def workdir(self, image: str) -> str:
        """The folder in which commands of an image start."""
        asked = await self.call("image", "inspect", "--format", "{{.Config.WorkingDir}}", image, timeout_s=_START_S)
        if asked.code:
            raise ConfigError(f"{self.program} has no image {image}: {asked.output.strip()[-500:]}")
        return asked.output.strip() or "/"

    @contextlib.asynccontextmanager
    async def open(
        self, image: str, limits: Limits, *, mount: tuple[Path, str] | None = None
    ) -> AsyncIterator[Container]:
        """Start a container of an image, and remove it in the end with everything in it.

        Args:
            mount: a folder of this machine, and where the container sees it. It cannot be written there.

        Raises:
            ToolServerError: it did not start.
        """
        name, said, line = f"art-{uuid.uuid4().hex}", b"", b""
        mounted = () if mount is None else (f"--volume={mount[0]}:{mount[1]}:ro", "--security-opt=label=disable")
        holder = await asyncio.create_subprocess_exec(
            self.program, "run", "--rm", "--interactive", f"--name={name}", "--label=art.harbor", "--network=none",
            "--security-opt=no-new-privileges", *limits.flags(), *mounted, "--entrypoint=sh", image,
            "-c", "echo ready; exec cat > /dev/null",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_S):
                    while (line := await holder.stdout.readline()) not in (b"ready\n", b""):
                        said += line
            if line != b"ready\n":
                end = said.decode(errors="replace").strip()[-1000:] or "it said nothing"
                raise ToolServerError(f"a container did not start within {_START_S:g} s: {end}")
            yield Container(self, name, limits)
        finally:
            holder.stdin.close()
            await asyncio.shield(self._remove(name, holder))

    async def _remove(self, name: str, holder: asyncio.subprocess.Process) -> None:
        await self.call("rm", "--force", "--time=0" if self.program == "podman" else "--volumes", name)
        await holder.wait()

    async def call(
        self, *arguments: str, stdin: bytes = b"", timeout_s: float = _START_S, output_bytes: int = 65536
    ) -> Finished:
        """Run the program with arguments, and end it when its time is over."""
        output, started = bytearray(), time.monotonic()
        process = await asyncio.create_subprocess_exec(
            self.program, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        writing = asyncio.create_task(_write(process.stdin, stdin))
        try:
            async with asyncio.timeout(timeout_s):
                while piece := await process.stdout.read(65536):
                    output += piece
                    if len(output) > MAX_READ_BYTES:
                        process.kill()
                await process.wait()
        except TimeoutError:
            pass
        finally:
            writing.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        code = 137 if process.returncode in (None, -9) else process.returncode or 0
        timed_out = time.monotonic() - started >= timeout_s
        return Finished(code=code, output=_cut(output, output_bytes), timed_out=timed_out)


@dataclass(frozen=True, slots=True)
class Container:
    """A running container. Commands may run at the same time, and background processes go on until it is removed."""

    engine: ContainerEngine
    name: str
    limits: Limits

    async def put(self, archive: bytes) -> None:
        """Unpack a tar archive at the root.

        Raises:
            ToolServerError: it cannot be written.
        """
        unpacking = ("tar", "-xf", "-", "-C", "/", "--no-same-owner")
        done = await self.engine.call("exec", "--interactive", self.name, *unpacking, stdin=archive, timeout_s=120.0)
        if done.code:
            raise ToolServerError(f"files could not be copied into the container: {done.output.strip()[-500:]}")

    async def run(
        self, script: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float
    ) -> Finished:
        """Run a script with bash, in the image's folder unless `cwd` names one. Its standard input is empty."""
        flags = [f"--env={key}={value}" for key, value in (env or {}).items()]
        flags += [] if cwd is None else [f"--workdir={cwd}"]
        seconds = max(timeout_s, 0.1)
        # A script may be longer than an argument can be, so it comes by standard input, which the script itself lacks.
        command = ["timeout", "-s", "KILL", f"{seconds:.2f}", "bash", "-c", 'eval "$(cat)" < /dev/null']
        started = time.monotonic()
        done = await self.engine.call(
            "exec", "--interactive", *flags, self.name, *command, stdin=script.encode(errors="replace"),
            timeout_s=seconds + _GRACE_S, output_bytes=self.limits.output_bytes,
        )  # fmt: skip
        if done.timed_out:
            await self.kill_all()
        late = done.code in (124, 137) and time.monotonic() - started >= seconds
        return Finished(code=137 if late else done.code, output=done.output, timed_out=done.timed_out or late)

    async def kill_all(self) -> None:
        """Kill every process inside, except the first one, which holds the container open."""
        await self.engine.call("exec", self.name, "sh", "-c", "kill -KILL -1")


def _cut(output: bytearray, limit: int) -> str:
    """The first and the last bytes of an output as text."""
    half, left_out = limit // 2, len(output) - limit
    gap = f"\n[... {left_out} bytes left out ...]\n".encode()
    kept = output if left_out <= 0 else output[:half] + gap + output[-half:]
    return kept.decode(errors="replace")


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()


@functools.cache
def _why_not(program: str) -> str | None:
    """Why a program cannot run containers for this user, or `None` if it can."""
    if shutil.which(program) is None:
        return f"there is no {program}"
    try:
        asked = subprocess.run([program, "info"], capture_output=True, text=True, timeout=_START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{program} info` failed: {error}"
    if asked.returncode:
        return f"`{program} info` failed: {' '.join(asked.stderr.split())[-400:]}"
    return None
