"""Build an image of the Dockerfile, then start it and hold it to what docs/images.md promises.

    python -m tools.images cpu --docker
    python -m tools.images cpu
    python -m tools.images cpu -- --build-arg TORCH_INDEX=https://pypi.org/simple --volume /etc/pip.conf:/etc/pip.conf

Without --docker, buildah runs the Dockerfile's own lines, each in a chroot, and podman runs the image. Both need root;
they, runc and mmdebstrap are packages of Debian. The base image is then made from Debian's packages, so that no
registry of images is asked. Either way the image runs with the restrictions of compose.yaml. What follows `--` goes to
`docker build` or `buildah build`.
"""

from __future__ import annotations

import argparse
import sys

from tools.images.building import build_image
from tools.images.containers import DOCKER, PODMAN
from tools.images.walk import Walk


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m tools.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=["cpu", "cuda"], help="the target of the Dockerfile")
    parser.add_argument("--docker", action="store_true", help="build and run with Docker (default: buildah and podman)")
    parser.add_argument(
        "--base",
        metavar="IMAGE",
        help="the Python image to build on (default: with --docker the Dockerfile's, else one of Debian's packages)",
    )
    parser.add_argument(
        "--only", choices=["build", "walk"], help="stop after the build, or run an image that was built"
    )
    args = parser.parse_args(argv[:end])
    if args.only != "walk":
        build_image(args.target, args.base, argv[end + 1 :], args.docker)
    if args.only != "build":
        Walk(DOCKER if args.docker else PODMAN, args.target).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
