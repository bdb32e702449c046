"""The module from which older code imports `get_repo_root_path`; today it is in `art.utils`."""

from art.compat.utils import get_repo_root_path

__all__ = ["get_repo_root_path"]
