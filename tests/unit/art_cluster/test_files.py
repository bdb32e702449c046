"""What travels between server and nodes arrives as it was sent, by the object store or by a folder that both see."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("art_cluster.files", reason="Ray is not installed: `make test-cluster` does")

from art.errors import ConfigError, StorageError
from art_cluster.files import Parcel, digest_of, discard, own_folder, pack, unpack


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "0003"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "weights").write_bytes(bytes(range(256)) * 100)
    (folder / "optimizer").write_bytes(b"moments")
    (folder / "empty").touch()
    return folder


@pytest.fixture(params=["object store", "folder", "bucket"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    folders = {"folder": str(tmp_path / "common" / "parcel"), "bucket": "memory://bucket/art/parcel"}
    return folders.get(request.param)


def test_a_folder_arrives_whole(checkpoint: Path, tmp_path: Path, address: str | None) -> None:
    there = tmp_path / "there" / "0003"
    unpack(pack(checkpoint, ("optimizer",), address), there, digest_of(checkpoint, ("optimizer",)))
    assert digest_of(there) == digest_of(checkpoint, ("optimizer",))
    assert sorted(file.name for file in there.rglob("*") if file.is_file()) == ["empty", "weights"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "optimizer").write_bytes(b"moments")
    unpack(pack(tmp_path / "more", (), address and f"{address}-2"), there, digest_of(tmp_path / "more"))
    assert digest_of(there) == digest_of(checkpoint)


def test_a_file_arrives(checkpoint: Path, tmp_path: Path, address: str | None) -> None:
    unpack(pack(checkpoint / "optimizer", (), address), tmp_path / "a" / "b", digest_of(checkpoint / "optimizer"))
    assert (tmp_path / "a" / "b").read_bytes() == b"moments"


def test_what_was_changed_on_the_way_is_not_written(checkpoint: Path, tmp_path: Path, address: str | None) -> None:
    content = pack(checkpoint, (), address)
    if isinstance(content, dict):
        content["optimizer"] = b"other"
    elif "://" not in content.address:
        (Path(content.address) / "optimizer").write_bytes(b"other")
    else:
        content = Parcel(content.address, tuple(name for name in content.names if name != "optimizer"))
    with pytest.raises(StorageError, match="after the transfer, expected"):
        unpack(content, tmp_path / "there", digest_of(checkpoint))
    assert not (tmp_path / "there").exists()


def test_a_node_that_does_not_see_the_folder_says_so(checkpoint: Path, tmp_path: Path) -> None:
    content = pack(checkpoint, (), str(tmp_path / "common"))
    discard(str(tmp_path / "common"))
    with pytest.raises(StorageError, match=r"does not see .*common, where the server has put files"):
        unpack(content, tmp_path / "there", digest_of(checkpoint))


def test_what_a_killed_server_left_is_deleted_by_the_next_one(checkpoint: Path, tmp_path: Path) -> None:
    folder = own_folder(str(tmp_path / "common"), tmp_path / "data")
    other = own_folder(str(tmp_path / "common"), tmp_path / "data2")
    for one in (folder, other):
        pack(checkpoint, (), f"{one}/1")
    assert own_folder(str(tmp_path / "common"), tmp_path / "data") == folder
    assert not Path(folder).exists()
    assert Path(other).exists()


def test_an_address_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'moon://bucket': Protocol not known: moon"):
        own_folder("moon://bucket", tmp_path)
