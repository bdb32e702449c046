"""Models for benchmarks: the Qwen3 architecture with random weights, and a LoRA adapter, written as files to load.

transformers and peft are imported where they are used: the processes of some benchmarks need neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from art.config import LoraConfig

LORA = LoraConfig()
"""Rank 16 on every linear layer: the product's own default."""


def _shape(vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int]) -> dict[str, int]:
    """`heads`: those of queries, those of keys, and the size of each."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
    }


def _with_window(shape: dict[str, int], window: int) -> dict[str, int]:
    """Return the shape with a sliding window in all layers but the first."""
    return shape | {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}


_TINY = _shape(512, 64, 128, 2, (2, 1, 32))
_TWO_LAYERS_OF_4_B = _shape(151936, 2560, 9728, 2, (32, 8, 128))

SHAPES = {
    "0.1 M": _TINY,
    "0.1 M window": _with_window(_TINY, 100),
    "1.2 M": _shape(3072, 128, 384, 4, (4, 2, 32)),
    "5 M": _shape(4096, 256, 768, 5, (4, 2, 64)),
    "30 M": _shape(8192, 512, 1536, 8, (8, 4, 64)),
    "100 M": _shape(32768, 768, 2048, 12, (12, 4, 64)),
    "0.6 B": _shape(151936, 1024, 3072, 28, (16, 8, 128)),
    "4 B 2 layers": _TWO_LAYERS_OF_4_B,
    "4 B 2 layers window": _with_window(_TWO_LAYERS_OF_4_B, 4096),
    "4 B": _TWO_LAYERS_OF_4_B | {"num_hidden_layers": 36},
}
"""The shape of each model, named by its number of parameters: 0.6 B and 4 B are Qwen3-0.6B and Qwen3-4B."""

QUICK_MODELS = ["0.1 M"]

_MAX_CONTEXT = {"cpu": 2048, "cuda": 32768}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    name: str
    """Its number of parameters."""
    base: Path
    adapter: Path
    vocab_size: int


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, bfloat16 on cuda")
    group.add_argument(
        "--models", metavar="A,B", type=_names_of_models, help=f"of {', '.join(SHAPES)} (default: each benchmark's own)"
    )


def _names_of_models(text: str) -> list[str]:
    """`100M` and `100 M` are the same."""
    names = {name.replace(" ", ""): name for name in SHAPES}
    asked = [word.replace(" ", "") for word in text.split(",")]
    if unknown := [word for word in asked if word not in names]:
        raise argparse.ArgumentTypeError(f"no model {unknown[0]!r}; there are {', '.join(SHAPES)}")
    return [names[word] for word in asked]


def choose_dtype(args: argparse.Namespace) -> str:
    dtype: str = args.dtype or {"cpu": "float32", "cuda": "bfloat16"}[args.device]
    return dtype


@contextmanager
def model_files(name: str, device: str = "cpu") -> Iterator[ModelFiles]:
    """The model `name` with an adapter of random A and B, as files that are removed at the end.

    The base is float32, or bfloat16 where it is made for CUDA.
    """
    import peft
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as directory:
        base, adapter = Path(directory) / "base", Path(directory) / "adapter"
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            **SHAPES[name],
            max_position_embeddings=_MAX_CONTEXT[device],
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with torch.device(device):
            model = transformers.Qwen3ForCausalLM(config)
        if device == "cuda":
            model.to(torch.bfloat16)
        model.save_pretrained(base)
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"
        )
        adapted = peft.get_peft_model(model, settings)
        for parameter_name, parameter in adapted.named_parameters():
            if ".lora_B." in parameter_name:  # zero in a fresh adapter, which would then compute nothing
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(adapter)
        del model, adapted
        yield ModelFiles(name, base, adapter, config.vocab_size)


def backbone_weights(name: str) -> int:
    """Weights of the linear layers of the decoder, without embedding and head."""
    shape = SHAPES[name]
    queries, keys = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    attention = shape["hidden_size"] * (2 * queries + 2 * keys)
    return shape["num_hidden_layers"] * (attention + 3 * shape["hidden_size"] * shape["intermediate_size"])


def load_peft_model(
    files: ModelFiles, *, device: str, dtype: str, is_trainable: bool, gradient_checkpointing: bool = False
) -> Any:
    """The same model and adapter in transformers and peft, as their documentation loads them."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(files.base, dtype=getattr(torch, dtype)).to(device)
    adapted = peft.PeftModel.from_pretrained(model, files.adapter, is_trainable=is_trainable)
    if gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return adapted.train()
    return adapted.eval()
