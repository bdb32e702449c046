"""Checkpoints and exports on the Hugging Face hub, or on a compatible one named by HF_ENDPOINT. HF_TOKEN is the key."""

from __future__ import annotations

from pathlib import Path

from art.errors import StorageError
from art.protocol.checkpoint_calls import HubTarget


def push_to_hub(folder: Path, target: HubTarget, message: str) -> str:
    """Upload a folder as one commit and return its address. The repository is created if it does not exist.

    Raises:
        StorageError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        if target.revision is not None:
            api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=target.repo_id, folder_path=folder, revision=target.revision, commit_message=message
        )
    except Exception as error:  # the hub's errors, httpx's and bad repository names have no narrower class in common
        raise StorageError(f"cannot push to {target.repo_id!r}: {type(error).__name__}: {error}") from error
    return f"{made}@{commit.oid}"
