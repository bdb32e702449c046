"""Imports every module of the user's side and prints those that fail. It is run as on another operating system."""

from __future__ import annotations

import importlib
import pkgutil

import art
import art_cloud
import art_recipes
import art_tasks
import art_trackers
import openpipe_art

SERVER_SIDE = {
    "credit", "engines", "exports", "gateway", "kernels", "losses", "memory", "record", "runtime", "server", "testing",
    "trainer", "worker",
}  # fmt: skip
ELSEWHERE = {"art.cli.server"}
"""The command of the server, which has Linux or macOS."""

if __name__ == "__main__":
    names = [
        module.name
        for package in (art, art_cloud, art_recipes, art_tasks, art_trackers, openpipe_art)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None)
        if module.name.split(".")[1] not in SERVER_SIDE and module.name not in ELSEWHERE
    ]
    failed = 0
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("art"):
                from tests.support.windows import LACKING

                if error.name not in LACKING:  # a library of an extra that is not installed
                    continue
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
    print(f"{len(names)} modules, {failed} failed")
