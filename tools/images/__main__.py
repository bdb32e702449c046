"""Build an image of the Dockerfile without Docker, then start it and hold it to what docs/images.md promises.

    python -m tools.images cpu
    python -m tools.images cpu --base docker.io/library/python:3.11-slim-bookworm
    python -m tools.images cpu -- --build-arg TORCH_INDEX=https://pypi.org/simple --volume /etc/pip.conf:/etc/pip.conf

Buildah runs the Dockerfile's own lines, each in a chroot, and podman runs the image with the restrictions of
compose.yaml. Both need root; they and mmdebstrap are packages of Debian. Without --base, the base image is made from
Debian's packages, so that no registry of images is asked. What follows `--` goes to `buildah build`.
"""

from __future__ import annotations

import argparse
import sys

from tools.images.building import build_image, stand_in
from tools.images.walk import walk


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m tools.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=["cpu", "cuda"], help="the target of the Dockerfile")
    parser.add_argument(
        "--base", metavar="IMAGE", help="the Python image to build on (default: made from Debian's packages)"
    )
    parser.add_argument(
        "--only", choices=["build", "walk"], help="stop after the build, or run an image that was built"
    )
    args = parser.parse_args(argv[:end])
    if args.only != "walk":
        build_image(args.target, args.base or stand_in(), argv[end + 1 :])
    if args.only != "build":
        walk(args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
