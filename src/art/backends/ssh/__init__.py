"""Run an ART server on any machine that ssh reaches, and use it from here. docs/ssh.md draws what talks to what."""

from art.backends.ssh.remote_server import Install, RemoteServer, ServerState
from art.backends.ssh.ssh import Completed, Ssh
from art.backends.ssh.ssh_backend import SshBackend
from art.backends.ssh.tunnel import Tunnel

__all__ = ["Completed", "Install", "RemoteServer", "ServerState", "Ssh", "SshBackend", "Tunnel"]
