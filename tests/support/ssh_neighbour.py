"""A second machine beside `SshMachine`: the same account through another sshd, in a network of its own.

    10.213.8.1    this machine, with the account, its home directory and its sshd on the loopback
    10.213.8.2    a network namespace, in which another folder is mounted over the account's home directory

What is shared is the system's disk outside of the home directory, and the list of processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.ssh_machine import SshMachine, wait_for_sshd

ALIAS = "gpu-box2"
HERE, THERE, PORT = "10.213.8.1", "10.213.8.2", 2022


def missing() -> str | None:
    """What this machine lacks to make another one; `None` if nothing."""
    lacking = [name for name in ("ip", "iptables", "unshare") if shutil.which(name) is None]
    return f"there is no {', '.join(lacking)}" if lacking else None


class SshNeighbour:
    """The second machine. The ssh configuration of the first one knows it as `ALIAS`."""

    def __init__(self, machine: SshMachine, *, own_home: bool = True) -> None:
        """
        Args:
            own_home: whether it has a home directory of its own, or that of the first machine.
        """
        self.machine = machine
        self.folder = machine.folder / "neighbour"
        self.folder.mkdir()
        self.home = self.folder / "home" if own_home else machine.home
        self._name = f"art-ssh-{os.getpid()}"
        self._commands = [
            f"netns add {self._name}",
            "link add art-near type veth peer name art-far",
            f"link set art-far netns {self._name}",
            f"addr add {HERE}/24 dev art-near",
            "link set art-near up",
            f"-n {self._name} addr add {THERE}/24 dev art-far",
            f"-n {self._name} link set art-far up",
            f"-n {self._name} link set lo up",
            f"-n {self._name} route add default via {HERE}",
        ]
        if own_home:
            self.home.mkdir(mode=0o700)
            shutil.chown(self.home, machine.user)
            machine.let_key_in(self.home)
            machine.use_pip_settings_of_this_user(self.home)
        self._write_settings()
        self._sshd: subprocess.Popen[bytes] | None = None
        try:
            for command in self._commands:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
            subprocess.run(["iptables", "-t", "nat", "-A", *self._masquerade()], check=True)  # pip needs an index
            self.start_sshd()
        except BaseException:
            self.close()
            raise

    def start_sshd(self) -> None:
        mount = f"mount --bind {self.home} {self.machine.home} && " if self.home != self.machine.home else ""
        script = f"{mount}exec /usr/sbin/sshd -D -e -f {self.folder}/sshd_config"
        with (self.folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                ["ip", "netns", "exec", self._name, "unshare", "-m", "sh", "-c", script], stderr=log
            )
        wait_for_sshd(THERE, PORT, self.folder / "sshd.log")

    def stop_sshd(self) -> None:
        """End its sshd; sessions go on."""
        assert self._sshd is not None
        self._sshd.kill()
        self._sshd.wait()

    def processes(self) -> dict[int, str]:
        """Command lines of the account's processes on this machine, by process id."""
        network = Path(f"/run/netns/{self._name}").stat().st_ino
        found = {}
        for pid, command in self.machine.processes().items():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/ns/net").stat().st_ino == network:
                    found[pid] = command
        return found

    def close(self) -> None:
        for pid in self.processes() if Path(f"/run/netns/{self._name}").exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._sshd is not None:
            self.stop_sshd()
        for command in (
            ["iptables", "-t", "nat", "-D", *self._masquerade()], ["ip", "link", "del", "art-near"],
            ["ip", "netns", "del", self._name],
        ):  # fmt: skip
            subprocess.run(command, check=False, capture_output=True)

    def _masquerade(self) -> list[str]:
        return ["POSTROUTING", "-s", f"{HERE}/24", "!", "-o", "art-near", "-j", "MASQUERADE"]

    def _write_settings(self) -> None:
        folder, machine = self.folder, self.machine
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key")], check=True)
        settings = (machine.folder / "sshd_config").read_text()
        for old, new in (
            (f"Port {machine.port}\n", f"Port {PORT}\n"), ("ListenAddress 127.0.0.1", f"ListenAddress {THERE}"),
            (f"{machine.folder}/host_key", f"{folder}/host_key"),
        ):  # fmt: skip
            assert old in settings
            settings = settings.replace(old, new)
        (folder / "sshd_config").write_text(settings)
        host_key = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        with (machine.folder / "known_hosts").open("a") as file:
            file.write(f"[{THERE}]:{PORT} {host_key}\n")
        with (machine.folder / "ssh_config").open("a") as file:
            file.write(
                f"Host {ALIAS}\n  HostName {THERE}\n  Port {PORT}\n  User {machine.user}\n"
                f"  IdentityFile {machine.folder}/key\n  IdentitiesOnly yes\n"
                f"  UserKnownHostsFile {machine.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
                "  StrictHostKeyChecking yes\n"
            )
