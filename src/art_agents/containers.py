"""One container for each rollout, by the command line of Podman or Docker.

    engine = ContainerEngine.find()
    image = await engine.build(Path("task/environment"), timeout_s=600)
    async with engine.open(image, Limits(memory_mb=512)) as container:
        await container.put(archive)                         # files, as a tar archive with paths from /
        finished = await container.run("ls -l", cwd="/app", timeout_s=10)

A container has no network, no rights that its user lacks, and limits of memory, processes, open files and disk. Its
first process reads from this one: when this process ends, however it ends, so does the container, with everything in
it. If a kill leaves something all the same, the next program on this machine removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from art.errors import ConfigError, ToolServerError

MAX_READ_BYTES = 16 * 2**20
"""Size of an output after which its command is ended, so that it cannot keep this process busy."""
_START_S = 60.0
_GRACE_S = 10.0
"""Time after its limit in which a command must have ended; then all processes of the container are killed."""
_LOOK_S = 60.0
"""Longest time between two looks at how much a container has written."""
_FIRST_PROCESS = """echo ready
while read -r word; do while kill -KILL -- -1 2>/dev/null; do :; done; echo "$word"; done"""
"""The container's first process: for each line it kills all others, and says so when they are gone. It does not start a
process for that, which an agent could prevent by starting all that it may. Bash also takes in processes whose parent
has ended; otherwise they would count as running."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
"""Variables that Podman and Docker would pass on, with the passwords in them."""
_TOOLS = re.compile(
    r"[AC] (/(usr/)?(local/)?s?bin/(bash|cat|env|head|mkdir|rm|sh|tar|timeout)|/etc/ld\.so\.preload"
    r"|/(usr/)?lib\S*/(ld-|libc\.|libtinfo\.)[^/]*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What commands in a container may use."""

    memory_mb: int = 2048
    """Memory of all processes together."""
    cpus: float | None = None
    """Processor time per second; `None` is that of the machine."""
    file_mb: int = 512
    """Size of each file."""
    disk_mb: int = 10240
    """What its files may take together. Processes that have written more are killed within seconds."""
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
                _remove_leftovers(name)
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
        return await self._build(os.path.join(os.getcwd(), folder), timeout_s=timeout_s)

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
        name, said, line = f"art-{owner()}-{uuid.uuid4().hex}", b"", b""
        mounted = () if mount is None else (f"--volume={mount[0]}:{mount[1]}:ro", "--security-opt=label=disable")
        # A volume would be neither counted as written nor removed with a container that somebody else removes.
        volumes = ["--image-volume=ignore"] if self.program == "podman" else []
        proxies = [f"--env={variable}=" for proxy in _PROXIES for variable in (proxy, proxy.lower())]
        storage = await asyncio.to_thread(_storage, self.program)
        free = _free_mb(storage)
        starting = asyncio.create_task(
            _spawn(
                self.program, "run", "--rm", "--interactive", f"--name={name}", "--label=art.harbor", "--network=none",
                "--stop-timeout=0", "--security-opt=no-new-privileges", *limits.flags(), *mounted, *volumes, *proxies,
                "--entrypoint=bash", image, "-c", _FIRST_PROCESS,
            )
        )  # fmt: skip
        try:
            holder = await asyncio.shield(starting)
            assert holder.stdout is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_S):
                    while (line := await holder.stdout.readline()) not in (b"ready\n", b""):
                        said += line
            if line != b"ready\n":
                end = said.decode(errors="replace").strip()[-1000:] or "it said nothing"
                raise ToolServerError(f"a container did not start within {_START_S:g} s: {end}")
            container = Container(self, name, limits, holder)
            watching = asyncio.create_task(container.watch_disk(storage, free))
            try:
                yield container
            finally:
                watching.cancel()
        finally:
            await asyncio.shield(self._remove(name, starting))

    async def _remove(self, name: str, starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
        holder = await starting
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        await self.call("rm", "--force", "--volumes", name)
        while await holder.stdout.read(65536):  # what fills the pipe would keep the program from its end
            pass
        await holder.wait()

    async def call(
        self, *arguments: str, stdin: bytes = b"", timeout_s: float = _START_S, output_bytes: int = 65536
    ) -> Finished:
        """Run the program with arguments, and end it when its time is over."""
        output, started = bytearray(), time.monotonic()
        process = await _start(self.program, *arguments)
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
    holder: asyncio.subprocess.Process
    """The program that is connected to the first process inside."""
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when more than `disk_mb` was written, and all processes were killed for it."""
    _killing: asyncio.Lock = field(default_factory=asyncio.Lock)

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
        """Kill every process inside, except the first one, which holds the container open.

        Raises:
            ToolServerError: the container has ended, or does not answer.
        """
        assert self.holder.stdin is not None
        assert self.holder.stdout is not None
        said: bytes | None = None
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with self._killing, asyncio.timeout(_START_S):
                while said != b"":  # again and again: as root, an agent can read from the pipe of the first process
                    word, heard = uuid.uuid4().hex.encode(), b""
                    self.holder.stdin.write(word + b"\n")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            while said := await self.holder.stdout.read(65536):
                                heard = heard[-len(word) :] + said
                                if word in heard:
                                    return
        why = "has ended" if said == b"" else f"did not end its processes within {_START_S:g} s"
        raise ToolServerError(f"the container {self.name} {why}")

    async def changed_tools(self) -> list[str]:
        """Find programs that this class needs in the container, and that are no longer those of the image.

        Raises:
            ToolServerError: it cannot be found out.
        """
        asked = await self.engine.call("diff", self.name, output_bytes=MAX_READ_BYTES)
        if asked.code:
            raise ToolServerError(f"the container's changes could not be listed: {asked.output.strip()[-500:]}")
        return [match[1] for line in asked.output.splitlines() if (match := _TOOLS.fullmatch(line.strip()))]

    async def watch_disk(self, storage: str | None, free: float) -> None:
        """Kill all processes as soon as their files take more than `disk_mb`, and end then.

        Measuring takes 0.1 to 0.6 s, so it is done when the machine's free space has shrunk, or `_LOOK_S` have passed.

        Args:
            storage: the folder in which containers write.
            free: free space there before the start.
        """
        looked = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            now = _free_mb(storage)
            if now > free - self.limits.disk_mb / 8 and time.monotonic() < looked + _LOOK_S:
                continue
            free, looked = now, time.monotonic()
            size = await self.engine.call("container", "inspect", "--size", "--format={{.SizeRw}}", self.name)
            if size.output.strip().isdecimal() and int(size.output) > self.limits.disk_mb * 2**20:
                self.is_full.set()
                with contextlib.suppress(ToolServerError):
                    await self.kill_all()
                return


def owner() -> str:
    """Name this process by its place, id and start, for names of what is to be removed when it is dead."""
    return f"{_digest(_place())}-{os.getpid()}-{_digest(_started(os.getpid()))}"


def is_left(name: str, prefix: str) -> bool:
    """Whether a name of `prefix` and `owner()` is that of a process of this machine that is dead."""
    match = re.match(rf"{prefix}-(\w{{6}})-(\d+)-(\w{{6}})-", name)
    return match is not None and match[1] == _digest(_place()) and match[3] != _digest(_started(int(match[2])))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _place() -> str:
    """Where this process can look for others by their ids. Several machines and users may share one Docker."""
    place = f"{socket.gethostname()} {os.getuid()}"
    with contextlib.suppress(OSError):
        place += os.readlink("/proc/self/ns/pid")
    return place


def _started(pid: int) -> str:
    """Boot of the machine and start of a process; nothing if there is no such process."""
    with contextlib.suppress(OSError):
        if not os.path.exists("/proc/self/stat"):
            return subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        return "" if state == "Z" else boot + fields[18]
    return ""


@functools.cache
def _remove_leftovers(program: str) -> None:
    """Remove containers and folders whose program was killed before it could."""
    asked = [program, "ps", "--all", "--filter=label=art.harbor", "--format={{.Names}}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        names = subprocess.run(asked, capture_output=True, text=True, timeout=_START_S, check=False).stdout.split()
        if left := [name for name in names if is_left(name, "art")]:
            subprocess.run([program, "rm", "--force", "--volumes", *left], capture_output=True, timeout=_START_S)
        for folder in Path(tempfile.gettempdir()).glob("art-address-*"):
            if is_left(folder.name, "art-address"):
                shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _storage(program: str) -> str | None:
    """The folder of this machine where containers write; `None` if they write elsewhere, as in a virtual machine."""
    name = "{{.Store.GraphRoot}}" if program == "podman" else "{{.DockerRootDir}}"
    asked = subprocess.run([program, "info", f"--format={name}"], capture_output=True, text=True, timeout=_START_S)
    return asked.stdout.strip() if asked.returncode == 0 and os.path.isdir(asked.stdout.strip()) else None


def _free_mb(folder: str | None) -> float:
    """Free space; nothing where it cannot be known, so that every second is a time to look."""
    return 0.0 if folder is None else shutil.disk_usage(folder).free / 2**20


async def _spawn(*command: str) -> asyncio.subprocess.Process:
    """Start a program with pipes. Python 3.11 waits for ever if a task is cancelled in here: shield it.

    Podman leaves a file `oom` in its folder when a container's memory is full, so that is not the user's.
    """
    pipe, folder = asyncio.subprocess.PIPE, tempfile.gettempdir()
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, cwd=folder
    )


async def _start(*command: str) -> asyncio.subprocess.Process:
    """Start a program with pipes, and end it if the task is cancelled meanwhile."""
    starting = asyncio.create_task(_spawn(*command))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_end)
        raise


def _end(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            starting.result().kill()


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
