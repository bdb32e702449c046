"""Run an ART server on any machine that ssh reaches, and use it from here. docs/ssh.md draws what talks to what."""

from art.backends.ssh.install import Install
from art.backends.ssh.remote_server import RemoteServer, ServerState
from art.backends.ssh.ssh import Completed, Ssh
from art.backends.ssh.ssh_backend import SshBackend
from art.backends.ssh.ssh_nodes import Nodes, SshNode
from art.backends.ssh.tunnel import Tunnel

__all__ = ["Completed", "Install", "Nodes", "RemoteServer", "ServerState", "Ssh", "SshBackend", "SshNode", "Tunnel"]
