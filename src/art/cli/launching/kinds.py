"""The kinds of machines that `art launch` knows, by the name that its records have.

A kind is a module with the functions of `Kind`. Another kind is a module more, and a line in `KINDS`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from art.backends.ssh.launched import Launched, LaunchRecord
from art.backends.ssh.ssh_backend import SshBackend
from art.errors import ConfigError

KINDS = {"ssh": "art.cli.launching.ssh_kind", "skypilot": "art.cli.launching.sky_kind"}
"""Modules by the name of the kind."""


class Kind(Protocol):
    """What a module of a kind has."""

    OPTIONS: tuple[str, ...]
    """Names of the options that only this kind has."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this kind has. No module of weight may be imported for it."""

    def serves(self, cloud: str | None, args: argparse.Namespace) -> bool:
        """Whether this kind is meant by `--cloud CLOUD`, or, without one, by the other options."""

    async def do_instead(self, args: argparse.Namespace) -> bool:
        """Do what an option asks for in place of a launch, and return whether one did."""

    def new_backend(self, args: argparse.Namespace, name: str | None) -> SshBackend:
        """Make the backend for a launch; it is not opened."""

    async def prepare(
        self, launched: Launched, args: argparse.Namespace, backend: SshBackend, name: str | None
    ) -> None:
        """Make sure that what a launch leaves on the machine is recorded, even if it fails."""

    def new_record(self, args: argparse.Namespace, backend: SshBackend, name: str | None) -> LaunchRecord:
        """Make the record of a launch whose backend is open."""

    def share_questions(self, backends: Sequence[SshBackend]) -> None:
        """Let backends of this kind, which are about to be asked how they are, ask together what they can."""

    def backend(self, record: LaunchRecord) -> SshBackend:
        """Make the backend for a server that was launched. It installs nothing."""


def kind_named(name: str) -> Kind:
    """Return the kind of a record.

    Raises:
        ConfigError: this version of ART does not know it.
    """
    if name not in KINDS:
        raise ConfigError(f"this version of ART knows no machines of the kind {name!r}, only {', '.join(KINDS)}")
    return cast(Kind, importlib.import_module(KINDS[name]))


def kind_for(args: argparse.Namespace) -> Kind:
    """Return the kind that the options of `art launch` mean.

    Raises:
        ConfigError: no kind is meant by them.
    """
    for name in KINDS:
        if (kind := kind_named(name)).serves(args.cloud, args):
            _check_options(name, args)
            return kind
    raise ConfigError(
        "nothing says where; try `art launch --gpu H100:1`, or `art launch --cloud ssh --host USER@MACHINE`"
    )


def _check_options(chosen: str, args: argparse.Namespace) -> None:
    """Refuse options that only another kind has, rather than ignore them."""
    for name in KINDS:
        for option in () if name == chosen else kind_named(name).OPTIONS:
            if getattr(args, option) not in (None, False):
                raise ConfigError(f"--{option.replace('_', '-')} is for machines of the kind {name!r}, not {chosen!r}")
