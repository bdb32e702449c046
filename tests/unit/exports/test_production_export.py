"""The export for production servers: files, scale, commands, and what it refuses."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from art import exports
from art.engines.vllm.command import LORA_RANKS
from art.errors import ConfigError
from art.protocol.calls import Export
from art.storage import checkpoints
from tests.unit.exports.test_exports import nothing, write_adapter

PEFT = {"r": 12, "lora_alpha": 24, "target_modules": ["q_proj"], "base_model_name_or_path": "Qwen/Qwen3-0.6B"}


def to_vllm(checkpoint: Path, target: Path, **more: object) -> dict[str, Any]:
    call = Export(
        source=checkpoint, target=target, base_model="Qwen/Qwen3-0.6B", format="vllm-lora",
        model_name="search/agent@promoted", **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return exports.export(call, nothing)


def test_the_folder_has_the_adapter_and_the_commands(tmp_path: Path) -> None:
    checkpoint = write_adapter(tmp_path / "0040", **PEFT)
    described = to_vllm(checkpoint, tmp_path / "out")
    assert described["files"] == ["README.md", *sorted(checkpoints.ADAPTER_FILES)]
    assert described["commands"] == {
        "vllm": "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 16 --lora-modules "
        '"search/agent@promoted=$PWD" --generation-config vllm',
        "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --enable-lora --lora-paths "
        '"search/agent@promoted=$PWD" --sampling-defaults openai',
    }
    text = (tmp_path / "out" / "README.md").read_text()
    assert all(command in text for command in described["commands"].values())
    assert "chat_template_kwargs" not in text
    assert '{"lora_name": "search/agent@promoted", "lora_path": "FOLDER", "load_inplace": true}' in text
    assert "ask SGLang for `Qwen/Qwen3-0.6B:search/agent@promoted`" in text
    weights = checkpoints.ADAPTER_WEIGHTS
    assert (tmp_path / "out" / weights).read_bytes() == (checkpoint / weights).read_bytes()


def test_peft_computes_the_same_with_the_plain_scale_of_a_rslora(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    base = Qwen3ForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=24, lora_alpha=8, use_rslora=True, target_modules="all-linear", init_lora_weights=False)
    trained = peft.get_peft_model(base, lora).eval()
    trained.save_pretrained(tmp_path / "trained")
    saved = json.loads((tmp_path / "trained" / checkpoints.ADAPTER_CONFIG).read_text())
    checkpoint = write_adapter(tmp_path / "0040", **saved)
    shutil.copy(tmp_path / "trained" / checkpoints.ADAPTER_WEIGHTS, checkpoint)
    (checkpoint / checkpoints.MANIFEST).unlink()
    checkpoints.write_manifest(checkpoint)
    to_vllm(checkpoint, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / checkpoints.ADAPTER_CONFIG).read_text())
    assert saved["use_rslora"] is True
    assert exported["use_rslora"] is False
    assert exported["lora_alpha"] / 24 == pytest.approx(8 / math.sqrt(24))
    loaded = peft.PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    tokens = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = trained(tokens).logits, loaded(tokens).logits
        with loaded.disable_adapter():
            without = loaded(tokens).logits
    torch.testing.assert_close(theirs, ours)
    assert float((theirs - without).abs().max()) > 0.1


def test_arguments_of_the_template_are_set_and_told(tmp_path: Path) -> None:
    checkpoint = write_adapter(tmp_path / "0040", **PEFT)
    described = to_vllm(checkpoint, tmp_path / "out", template_kwargs={"enable_thinking": False})
    for command in described["commands"].values():
        arguments = shlex.split(command)
        given = arguments[arguments.index("--default-chat-template-kwargs") + 1]
        assert json.loads(given) == {"enable_thinking": False}
    text = (tmp_path / "out" / "README.md").read_text()
    assert """extra_body={"chat_template_kwargs": {'enable_thinking': False}}""" in text


@pytest.mark.parametrize("release", ["0.26", "0.32"])
def test_every_option_is_one_of_vllm(tmp_path: Path, release: str) -> None:
    adapter = write_adapter(tmp_path / "0040", **PEFT)
    command = exports.serve_commands(adapter, "m", "p/agent@1", {"enable_thinking": False})["vllm"]
    options = {word for word in shlex.split(command) if word.startswith("--")}
    known = (Path(__file__).parents[2] / "support" / "vllm_flags" / f"{release}.txt").read_text().split()
    assert options <= {*known}


def test_a_base_model_with_spaces_in_its_path_is_one_word_of_the_commands(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "0040", **PEFT)
    for command in exports.serve_commands(adapter, "/models/my model", "p/agent@1", {}).values():
        assert "/models/my model" in shlex.split(command)


def test_a_rank_that_no_server_takes_is_refused(tmp_path: Path) -> None:
    assert exports.LORA_RANKS[1:] == LORA_RANKS
    checkpoint = write_adapter(tmp_path / "0040", **PEFT | {"r": 1024})
    with pytest.raises(ConfigError, match="up to rank 512, and this one has 1024; export `merged`"):
        to_vllm(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
