"""Checkpoints and exports on a hub that speaks as Hugging Face's; HF_ENDPOINT and HF_TOKEN say which, and as whom."""

from __future__ import annotations

from pathlib import Path

from art.errors import StorageError
from art.protocol.checkpoint_calls import HubTarget


def push_to_hub(folder: Path, target: HubTarget, message: str) -> str:
    """Upload a folder as one commit, to a repository that is made if there is none; its address.

    Raises:
        StorageError: the hub refused, or is not to be reached.
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
    except Exception as error:  # the hub's errors, httpx's and bad repository names have no common class but this
        raise StorageError(f"cannot push to {target.repo_id!r}: {type(error).__name__}: {error}") from error
    return f"{made}@{commit.oid}"
