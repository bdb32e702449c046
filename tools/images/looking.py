"""Looks at an image and at a running container: what they must not have, and what they must be able to do."""

from __future__ import annotations

from collections.abc import Sequence

from tools.images.containers import Containers

LABELS = ("title", "description", "version", "licenses")
EMPTY = ("/root", "/tmp", "/var/tmp", "/var/cache/apt", "/var/lib/apt/lists")
"""Folders where installing leaves files; root's home has some of the shell besides."""
VOLUMES = ("/data", "/models")


def look_at_files(containers: Containers, image: str) -> None:
    """Check an image's labels, its version, and that its files belong to root and hold no caches.

    Raises:
        AssertionError: one of them is not as docs/images.md says.
    """
    labels = containers.config(image)["Labels"]
    said = {name: labels.get(f"org.opencontainers.image.{name}") for name in LABELS}
    assert all(said.values()), said
    as_root = ("run", "--rm", "--no-healthcheck", *containers.limits(), "--network", "none", "--user", "0")
    assert containers.call(*as_root, "--entrypoint", "art", image, "--version") == f"art {said['version']}"
    find = (*as_root, "--entrypoint", "find", image)
    # Files and folders that everyone may write (but for folders such as /tmp), or that belong to the server's user.
    everyone = ("(", "-perm", "-o+w", "!", "-perm", "-1000", ")")
    kinds = ("(", "-type", "f", "-o", "-type", "d", ")")
    theirs = ("/", "-xdev", *kinds, "(", *everyone, "-o", "-user", "10001", "-o", "-group", "10001", ")")
    assert set(containers.call(*find, *theirs).split()) <= set(VOLUMES)
    of_the_shell = ("!", "-name", ".bashrc", "!", "-name", ".profile")
    left = containers.call(*find, *EMPTY, "-xdev", "-type", "f", "-size", "+0", *of_the_shell)
    assert not left, f"left in the image: {left}"


def look_for_compiler(containers: Containers, image: str, flags: Sequence[str]) -> None:
    """Check that g++ makes a program that runs, and that vLLM is imported, under the restrictions of `flags`.

    Raises:
        AssertionError: one of them is missing.
        RuntimeError: one of them failed.
    """
    run = ("run", "--rm", "--interactive", "--no-healthcheck", *flags, "--entrypoint", "sh", image, "-c")
    program = '#include <cstdio>\nint main() { std::puts("compiled"); }\n'
    compile_it = "g++ -x c++ -o /tmp/program - && /tmp/program"
    assert containers.call(*run, compile_it, text=program) == "compiled"
    vllm = containers.call(*run, "python -c 'import vllm; print(vllm.__version__)'")
    assert vllm.splitlines()[-1][:1].isdigit(), vllm


def look_at_processes(containers: Containers, name: str) -> None:
    """Check the processes of the running container: user, capabilities, root folder, process 1, open ports.

    Raises:
        AssertionError: one of them is not as docs/images.md says.
    """

    def inside(*command: str) -> str:
        return containers.call("exec", name, *command)

    status = dict(line.split(":\t", 1) for line in inside("cat", "/proc/1/status").splitlines() if ":\t" in line)
    assert status["Name"] == "tini"
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('x')"
    may_write = {"/data": True, "/models": True, "/tmp": True, "/": False, "/opt/art": False, "/etc": False}
    for folder, may in may_write.items():
        done = containers.attempt("exec", name, "python", "-c", write, f"{folder}/probe")
        assert (done.returncode == 0) is may, (folder, done.stderr)
    listening = [line.split() for line in inside("cat", "/proc/net/tcp").splitlines()[1:]]
    assert {words[1] for words in listening if words[3] == "0A"} == {"00000000:1388"}, "5000 and no other port"
