"""Safetensors files that are written in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from art.errors import AdapterError
from art.trainer import tensor_files
from art.trainer.tensor_files import read_named, stream_named


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.half": torch.randn(3, 5, generator=generator).bfloat16(),
        "a.half": torch.randn(7, generator=generator).bfloat16(),
        "z": torch.randn(40, 11, generator=generator),
        "c.whole": torch.arange(6),
        "a.scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "é": torch.randn(2, 3, generator=generator).half(),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6, generator=generator).T,
    }


@pytest.mark.parametrize("piece_bytes", [1, 64, 2**26])
def test_the_bytes_are_those_of_the_library(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", piece_bytes)
    tensors = make_tensors()
    data = b"".join(stream_named(tensors))
    assert data == save({name: t.contiguous() for name, t in tensors.items()}, metadata={"format": "pt"})
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(data).items())


def test_tensors_are_read_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    tensors = {name: t for name, t in make_tensors().items() if t.is_floating_point()}
    (tmp_path / "file").write_bytes(b"".join(stream_named(tensors)))
    back = list(read_named(tmp_path / "file", tensors, "test"))
    assert [name for name, _ in back] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back)


def test_of_a_file_with_one_bad_number_nothing_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, float("inf")])}
    (tmp_path / "file").write_bytes(b"".join(stream_named(tensors)))
    with pytest.raises(AdapterError, match="'b' that are not finite"):
        next(read_named(tmp_path / "file", tensors, "test"))
