"""Split the frozen base weights over processes with torch's FSDP2, for models that do not fit one device.

The weights of a decoder layer are gathered when it runs, forward and backward, and freed afterwards. The adapter is not
sharded: it is injected later, and `fully_shard` manages only what exists when it is called. Embedding, final norm and
head stay whole, because the head is read outside of the model's forward pass. Gathering needs every process, so all
processes must run the model equally often.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from art.trainer.attention.tree_attention import TreeLayout
from art.trainer.policy.layers import decoder_layers


def shard_layers(model: Any, device: torch.device) -> None:
    """Split the decoder layers of a Hugging Face causal LM over all processes, and move them to `device`.

    Raises:
        ConfigError: the model does not name its decoder layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = decoder_layers(model, option="shard_base")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = set(model.parameters())
    for layer in layers:
        whole -= set(layer.parameters())
        fully_shard(layer, mesh=mesh)
    backbone = getattr(model, model.base_model_prefix)
    fully_shard(backbone, mesh=mesh, ignored_params=whole)  # the root, which overlaps gathering with computing


def idle_layout(device: torch.device) -> TreeLayout:
    """Make a layout of one token, for an empty pass while another process computes one more micro-batch."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return TreeLayout(token_ids=token, positions=token, subtree_end=token + 1, chains=[], kernel="dense")
