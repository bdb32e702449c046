"""A machine to reach over ssh: a fresh user account of this one, with an sshd of its own on a loopback port.

It needs root, `useradd` and `sshd` (Debian: `apt install openssh-server`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from art_cloud.ssh import Ssh
from tests.support.processes import is_running

ALIAS = "gpu-box"


def missing() -> str | None:
    """What this machine lacks to make another one; `None` if nothing."""
    if os.geteuid() != 0:
        return "it takes root to make a user account"
    lacking = [name for name in ("ssh", "ssh-keygen", "useradd", "userdel") if shutil.which(name) is None]
    if not Path("/usr/sbin/sshd").exists():
        lacking.append("sshd (Debian: apt install openssh-server)")
    return f"there is no {', '.join(lacking)}" if lacking else None


class SshMachine:
    """One account with its sshd. `ssh()` reaches it without any setting of the user who runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.user = f"art{secrets.token_hex(4)}"
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", self.user], check=True, capture_output=True)
        subprocess.run(["usermod", "--password", "*", self.user], check=True)  # no password, but not locked
        account = pwd.getpwnam(self.user)
        self.uid, self.home = account.pw_uid, Path(account.pw_dir)
        self.use_pip_settings_of_this_user(self.home)
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self._write_settings()
        self._sshd: subprocess.Popen[bytes] | None = None
        self.start_sshd()

    def ssh(self) -> Ssh:
        return Ssh(ALIAS, config=self.config)

    @property
    def config(self) -> str:
        return str(self.folder / "ssh_config")

    def start_sshd(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")], stderr=log
            )
        wait_for_sshd("127.0.0.1", self.port, self.folder / "sshd.log")

    def stop_sshd(self) -> None:
        assert self._sshd is not None
        self._sshd.kill()
        self._sshd.wait()

    def processes(self) -> dict[int, str]:
        """Command lines of the account's processes, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == self.uid and is_running(int(entry.name)):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def kill_everything(self) -> None:
        """End all processes of the account at once, as a reboot does."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        deadline = time.monotonic() + 20
        while self.processes() and time.monotonic() < deadline:
            self.kill_everything()
            time.sleep(0.05)
        self.stop_sshd()
        # It refuses while the last processes are on their way out.
        while subprocess.run(
            ["userdel", "--remove", "--force", self.user], check=False, capture_output=True
        ).returncode:
            assert time.monotonic() < deadline + 20, f"the account {self.user} cannot be removed"
            time.sleep(0.2)

    def _write_settings(self) -> None:
        folder = self.folder
        self.let_key_in(self.home)
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile .ssh/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nAllowUsers {self.user}\nMaxStartups 100\n"
        )
        host_key = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        (folder / "ssh_config").write_text(
            f"Host {ALIAS}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {self.user}\n"
            f"  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        )

    def let_key_in(self, home: Path) -> None:
        """Let the key of the tests log in to the account, with this home directory."""
        folder = home / ".ssh"
        folder.mkdir(mode=0o700)
        shutil.copy(self.folder / "key.pub", folder / "authorized_keys")
        for path in (folder, folder / "authorized_keys"):
            shutil.chown(path, self.user)

    def use_pip_settings_of_this_user(self, home: Path) -> None:
        """Let pip of the account find packages where that of this user does."""
        settings, gid = Path.home() / ".config" / "pip" / "pip.conf", pwd.getpwnam(self.user).pw_gid
        if settings.exists():
            folder = home / ".config" / "pip"
            folder.mkdir(parents=True)
            shutil.copy(settings, folder / "pip.conf")
            for path in (folder.parent, folder, folder / "pip.conf"):
                os.chown(path, self.uid, gid)


def wait_for_sshd(host: str, port: int, log: Path) -> None:
    """Return once an sshd, which writes to `log`, takes connections."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(log.read_text())
