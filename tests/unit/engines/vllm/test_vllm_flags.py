"""Every flag that ART writes is one of vLLM's argument parsers: the lists of 0.26 and 0.32, and the parser itself.

The lists were printed by `python tests/support/vllm_parser.py` in an environment of each release, without the `--no-`
forms. With vLLM installed (`make test-vllm`) the command lines also go through its own parser.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.config import VllmConfig
from art.engine import EngineInfo
from art.engines.vllm.command import Installation, installed_vllm_python, server_command

SUPPORT = Path(__file__).parents[3] / "support"
RELEASES = ("0.26", "0.32")
INFO = EngineInfo(vocab_size=151_936, max_context=32_768, dtype="bfloat16", device="cuda", draws_by_index=False)
RAY = {
    "distributed_executor_backend": "ray", "tensor_parallel_size": 8, "pipeline_parallel_size": 2,
    "gpu_memory_utilization": 0.8,
}  # fmt: skip


def command_lines() -> dict[str, list[str]]:
    """Every kind of command line, without the program."""
    gpu = Installation("python", "0.32.0", "2.13.0", "cuda")
    cpu = replace(gpu, device="cpu")
    with_grammars = replace(INFO, grammars=True)
    return {
        name: server_command(installation, "m", config, info, lora_rank=rank, sleeps=sleeps)[3:]
        for name, (installation, config, info, rank, sleeps) in {
            "cuda": (gpu, VllmConfig(max_running=320), INFO, 16, False),
            "cuda, asleep": (gpu, VllmConfig(), with_grammars, 16, True),
            "merged": (gpu, VllmConfig(weights="merged"), INFO, None, False),
            "ray": (gpu, VllmConfig(flags=RAY), INFO, 64, False),
            "cpu": (cpu, VllmConfig(), with_grammars, 8, True),
        }.items()
    }


@pytest.mark.parametrize("name", command_lines())
@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_is_one_of_vllm(release: str, name: str) -> None:
    known = (SUPPORT / "vllm_flags" / f"{release}.txt").read_text().split()
    flags = [word.partition("=")[0] for word in command_lines()[name] if word.startswith("--")]
    assert len(flags) == len({*flags})
    assert [flag for flag in flags if flag not in known and flag.replace("--no-", "--", 1) not in known] == []
    assert "--uds" in known  # `VllmServer.start` adds it


def parsed(arguments: list[str]) -> dict[str, Any]:
    python = installed_vllm_python()
    assert python is not None
    command = [python, str(SUPPORT / "vllm_parser.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


@pytest.mark.skipif(installed_vllm_python() is None, reason="vLLM is not installed: `make test-vllm`")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", command_lines())
def test_vllms_own_parser_takes_the_command_line(name: str) -> None:
    values = parsed(command_lines()[name])
    assert (values["model"], values["max_model_len"]) == ("m", 32_769)
    assert (values["logprobs_mode"], values["max_logprobs"]) == ("processed_logprobs", -1)
    assert isinstance(values["seed"], int)
    expected: dict[str, dict[str, Any]] = {
        "cuda": {"max_num_seqs": 320, "long_prefill_token_threshold": 512, "max_lora_rank": 16, "enable_lora": True},
        "cuda, asleep": {"enable_sleep_mode": True, "skip_tokenizer_init": False},
        "merged": {"enable_lora": False, "skip_tokenizer_init": True},
        "ray": {**RAY, "max_lora_rank": 64},
        "cpu": {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32, "max_num_seqs": 64},
    }
    found = {key: values[key] for key in expected[name]}
    assert {key: value or False for key, value in found.items()} == expected[name]
