"""`art.utils.get_repo_root_path` under the name that older code uses."""

from art.compat.utils import get_repo_root_path

__all__ = ["get_repo_root_path"]
