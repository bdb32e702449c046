"""What another machine has, before anything is installed there: asked by a script for any POSIX shell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from art.backends.ssh.install import Install
from art.backends.ssh.ssh import shell_path
from art.errors import MachineError

CUDA_BYTES, CPU_BYTES, PLAIN_BYTES = 6 << 30, 3 << 30, 200 << 20
"""Free disk space for an installation with the extra `local` and torch for GPUs, which is what pip takes on Linux; with
torch for CPUs; and without the extra."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MIN_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the other machine has."""

    system: str
    free_bytes: int
    pythons: tuple[tuple[tuple[int, ...], str], ...]
    """Version and path of each Python that was found."""
    has_no_gpu: bool
    """Whether there is certainly no GPU: neither a driver nor a device file of one."""
    takes_cpu_torch: bool = False
    """Whether pip takes torch for CPUs there: its settings name `CPU_INDEX`, or the system is not Linux."""

    def check(self, name: str, folder: str, install: Install, *, needs_gpu: bool) -> str:
        """Return the Python to install with.

        Raises:
            MachineError: no Python is new enough, there is too little space, or there is no GPU and one is needed.
        """
        if needs_gpu and self.has_no_gpu:
            raise MachineError(
                f"{name} has no GPU: `nvidia-smi -L` lists none, and there is no device file of one. Launch without "
                "`--gpu` (`ServerConfig(gpu=True)`) to train on its CPU, or name another machine"
            )
        python = next((path for version, path in self.pythons if version >= MIN_PYTHON), None)
        if python is None:
            there = ", ".join(f"{'.'.join(map(str, version))} at {path}" for version, path in self.pythons)
            what = f"only Python {there}" if there else "no Python"
            what += f" as {install.python!r}" if install.python is not None else ""
            raise MachineError(
                f"{name} has {what}, and ART needs 3.11 or newer; install one, for example by `uv python install "
                "3.12`, or name it with Install(python=...)"
            )
        needed = (CPU_BYTES if self.takes_cpu_torch else CUDA_BYTES) if "local" in install.extras else PLAIN_BYTES
        if self.free_bytes < needed:
            raise MachineError(
                f"{name} has {self.free_bytes / 1e9:.1f} GB of free space for {folder}, and an installation "
                f"needs at least {needed / 1e9:.1f} GB; free some, or choose another folder with Install(folder=...)"
                f"{self.advice(install)}"
            )
        return python

    def advice(self, install: Install) -> str:
        """How to get torch without CUDA where there is no GPU; empty where that changes nothing."""
        if not self.has_no_gpu or self.takes_cpu_torch or "local" not in install.extras:
            return ""
        return (
            f". It has no GPU: torch for CPUs needs {CPU_BYTES / 1e9:.1f} GB instead of {CUDA_BYTES / 1e9:.1f} GB; to "
            f"get it, run `python3 -m pip config --user set global.extra-index-url {CPU_INDEX}` there and launch again"
        )


def probe_script(folder: str, python: str | None) -> str:
    script = _PROBE.replace("CPU_INDEX", CPU_INDEX)
    return script.replace("FOLDER", shell_path(folder)).replace("PYTHON", shell_path(python or ""))


def read_machine(answer: str) -> Machine | None:
    """Read what the script has printed; `None` if that is not its answer."""
    facts = dict(re.findall(r"^(system|free_kib|gpu|torch) (.*)$", answer, re.MULTILINE))
    if not {"system", "free_kib"} <= set(facts):
        return None
    lines = re.findall(r"^python (\d+)\.(\d+)\.(\d+) (.+)$", answer, re.MULTILINE)
    pythons = tuple((tuple(map(int, version)), path) for *version, path in lines)
    takes_cpu_torch = "torch" in facts or not facts["system"].startswith("Linux")
    free_bytes = int(facts["free_kib"] or 0) * 1024
    return Machine(facts["system"], free_bytes, pythons, facts.get("gpu") == "none", takes_cpu_torch)


_PROBE = """\
echo
folder=FOLDER
here=$folder
while [ ! -d "$here" ]; do here=$(dirname "$here"); done
echo "system $(uname -s) $(uname -m)"
echo "free_kib $(df -Pk "$here" | awk 'NR == 2 {print $4}')"
case $(nvidia-smi -L 2> /dev/null) in
  *GPU*) ;;
  *) ls -d /dev/nvidia* /dev/nvmap /dev/kfd /dev/dxg /proc/driver/nvidia 2> /dev/null | grep -q . || echo "gpu none" ;;
esac
cat /etc/pip.conf "$HOME"/.pip/pip.conf "${XDG_CONFIG_HOME:-$HOME/.config}"/pip/pip.conf 2> /dev/null |
  grep -q CPU_INDEX && echo "torch cpu"
asked=PYTHON
for candidate in ${asked:-python3 python3.13 python3.12 python3.11 "$HOME"/.local/bin/python3.1[1-9] \\
    /opt/conda/bin/python /usr/local/bin/python3}; do
  path=$(command -v "$candidate") || continue
  version=$("$path" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2> /dev/null) || continue
  echo "python $version $path"
done
"""
"""A script for any POSIX shell. It begins a new line, since a login shell may have printed something of its own. A
driver that is not loaded yet has no device file; `nvidia-smi` loads it."""
