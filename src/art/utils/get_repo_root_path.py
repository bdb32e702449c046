"""`art.compat.get_repo_root_path` under the name that older code uses."""

from art.compat.get_repo_root_path import get_repo_root_path

__all__ = ["get_repo_root_path"]
