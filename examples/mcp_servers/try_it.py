"""Run all of `art mcp-rl` on this machine, with a tiny model, one of the two servers and a scripted judge.

    python try_it.py inventory --seed 0            writes out/inventory-seed0/report.html

It makes the tiny model if there is none (minutes), starts the server and the judge, and prints and runs the command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from practice import HERE, PRACTICES, Practice

from art.testing.scripted_server import ScriptedServer


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Options after -- are passed to art mcp-rl.",
    )  # fmt: skip
    parser.add_argument("server", choices=sorted(PRACTICES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for models and reports (default: out)")
    args = parser.parse_args(words[:end])
    practice: Practice = PRACTICES[args.server]()
    out: Path = args.out.resolve()
    model = out / f"tiny-{args.server}"
    if not (model / "model.safetensors").exists():
        run("tiny-model", str(model), "--task", f"practice:{type(practice).__name__}")
    with serving(args.server) as url, ScriptedServer(practice.reply) as judge:
        run(
            "mcp-rl", url, "--model", str(model), "--name", f"{args.server}-seed{args.seed}", "--seed", str(args.seed),
            "--judge", "openai/judge", "--judge-url", judge.base_url, "--data-dir", str(out / "art"),
            "--out", str(out / f"{args.server}-seed{args.seed}"), "--steps", str(practice.defaults.num_steps),
            "--groups", str(practice.defaults.groups_per_step), "--rollouts",
            str(practice.defaults.rollouts_per_group), "--learning-rate", f"{practice.defaults.learning_rate:g}",
            "--num-scenarios", str(practice.num_to_train), "--max-completion-tokens", "100", *words[end + 1 :],
        )  # fmt: skip


def run(*arguments: str) -> None:
    sys.stdout.write(f"art {shlex.join(arguments)}\n")
    sys.stdout.flush()
    # Without this, litellm downloads a table of prices.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    subprocess.run([sys.executable, "-m", "art.cli.main", *arguments], cwd=HERE, env=environment, check=True)


@contextlib.contextmanager
def serving(server: str) -> Iterator[str]:
    """Run one of the two servers while the block runs, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(HERE / server / "server.py"), "--http", "--port", str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server {server} did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
