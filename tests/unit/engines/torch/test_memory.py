from __future__ import annotations

from pathlib import Path

import pytest

from art.errors import ConfigError
from tests.support.engine import load


def test_the_cache_is_what_was_asked_for(qwen3: Path) -> None:
    assert load(qwen3, kv_cache_tokens=777).stats()["kv_tokens_budget"] == 777


def test_by_default_it_fits_the_running_requests(qwen3: Path) -> None:
    assert load(qwen3, max_running=10).stats()["kv_tokens_budget"] == 10 * 512


def test_one_full_request_must_fit(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_tokens.*100.*max_context.*512"):
        load(qwen3, kv_cache_tokens=100)


def test_memory_bounds_the_default(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head dimension, float32
    monkeypatch.setattr("art.engines.torch.base_model._device_bytes", lambda device: 4 * 1000 * token_bytes)
    assert load(qwen3, max_running=10).stats()["kv_tokens_budget"] == 1000
    monkeypatch.setattr("art.engines.torch.base_model._device_bytes", lambda device: 100 * token_bytes)
    with pytest.raises(ConfigError, match="memory allows"):
        load(qwen3)


def test_an_absent_device_is_named(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="'mps'"):
        load(qwen3, device="mps")
