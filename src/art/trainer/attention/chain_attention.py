"""Softmax attention over a prefix tree, chain by chain (unbranched runs of tokens), as one autograd function.

Rows are kept as [G, T + 1, R, D]: key head, place in the layout, query head of that key head. So one matrix product per
block serves all query heads that share a key. The last place is not part of the layout. It is zero, for padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from art.trainer.tree.chains import Block, Work

_KEEP_BYTES = 2**26
"""Attention probabilities of a layer are kept for the backward pass up to this size. Above it they are recomputed."""


def attend_chains(
    query: Tensor, key: Tensor, value: Tensor, work: Work, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention over a prefix tree in float32: each query sees the keys on its path from the root.

    query [1, H, T, D], key [1, G, T, D], value [1, G, T, E]; returns [1, T, H, E]. `sinks` [H] are logits that take
    part in the softmax and have no value.
    """
    return _ChainAttention.apply(query[0], key[0], value[0], sinks, work, scale)[None]


class _ChainAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """query [H, T, D], key [G, T, D], value [G, T, E] and optional sinks [H] give [T, H, E].

    The backward pass is that of softmax attention, block by block. A sink is a key whose value is 0, so its gradient dp
    is 0 too, and the formulas for the other keys do not change.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, work: Work, scale: float
    ) -> Tensor:
        queries = _by_group(query.transpose(0, 1), len(key)).mul_(scale)
        key_rows, value_rows = (_by_group(x.transpose(0, 1), len(x)).squeeze(2) for x in (key, value))
        sink_rows = None if sinks is None else sinks.detach().float().view(len(key), -1)  # [G, R]
        out = queries.new_zeros(*queries.shape[:-1], value.shape[-1])
        kept: list[Tensor] = []
        kept_bytes = 0
        for item in work:
            keys, values = item.gather(key_rows), item.gather(value_rows)
            for block in item.blocks:
                seen = slice(block.first, block.last)
                p = _probabilities(_read(queries, block), keys[:, seen], block, sink_rows)
                _write(out, block, torch.bmm(p, values[:, seen]))
                kept_bytes += p.numel() * p.element_size()
                if kept_bytes <= _KEEP_BYTES:
                    kept.append(p)
        kept = kept if kept_bytes <= _KEEP_BYTES else []
        ctx.save_for_backward(queries, key_rows, value_rows, out, sink_rows, *kept)
        ctx.work, ctx.scale, ctx.dtypes = work, scale, (query.dtype, key.dtype, value.dtype)
        return _by_token(out).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, key_rows, value_rows, out, sink_rows, *kept = ctx.saved_tensors
        grad_out = _by_group(grads[0], len(key_rows))
        # The softmax's backward pass subtracts sum(p * dp) over a query's keys from dp. That sum is out . grad_out.
        dots = (out * grad_out).sum(-1, keepdim=True)
        grad_queries, grad_keys, grad_values = (torch.zeros_like(x) for x in (queries, key_rows, value_rows))
        grad_sinks = torch.zeros_like(sink_rows) if ctx.needs_input_grad[3] else None
        probabilities = iter(kept)
        for item in ctx.work:
            keys, values = item.gather(key_rows), item.gather(value_rows)
            dkeys, dvalues = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
            for block in item.blocks:
                seen = slice(block.first, block.last)
                rows, douts = _read(queries, block), _read(grad_out, block)
                p = next(probabilities) if kept else _probabilities(rows, keys[:, seen], block, sink_rows)
                dvalues[:, seen] += torch.bmm(p.transpose(1, 2), douts)
                dscores = torch.bmm(douts, values[:, seen].transpose(1, 2))
                block_dots = _read(dots, block)
                if grad_sinks is not None:
                    rest = (1 - p.sum(-1, keepdim=True)).mul_(block_dots)  # probability of the sink, times dot
                    grad_sinks -= rest.view(len(grad_sinks), -1, grad_sinks.shape[1]).sum(1)
                dscores.sub_(block_dots).mul_(p)
                dkeys[:, seen] += torch.bmm(dscores.transpose(1, 2), rows)
                _write(grad_queries, block, torch.bmm(dscores, keys[:, seen]))
            item.scatter_add(grad_keys, dkeys)
            item.scatter_add(grad_values, dvalues)
        by_token = (
            _by_token(grad_queries).mul_(ctx.scale),
            *(_by_token(x[:, :, None]) for x in (grad_keys, grad_values)),
        )
        by_head = (x.transpose(0, 1).to(dtype) for x, dtype in zip(by_token, ctx.dtypes, strict=True))
        return *by_head, None if grad_sinks is None else grad_sinks.flatten(), None, None


def _probabilities(rows: Tensor, keys: Tensor, block: Block, sinks: Tensor | None) -> Tensor:
    """Attention probabilities: queries [G * B, n * R, D] and keys [G * B, L, D] of a block give [G * B, n * R, L].

    With `sinks` [G, R] each row sums to less than 1.
    """
    scores = torch.bmm(rows, keys.transpose(1, 2))
    num_chains, num_queries, _, width = block.hidden.shape
    by_query = scores.view(-1, num_chains, num_queries, scores.shape[1] // num_queries, scores.shape[2])
    by_query[..., -width:] += block.hidden
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    total = torch.logaddexp(by_query.logsumexp(-1).unflatten(0, (len(sinks), -1)), sinks[:, None, None, None])
    return scores.sub_(total.view(*scores.shape[:2], 1)).exp_()


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """[T, H, D] -> [G, T + 1, R, D] in float32."""
    num_tokens, num_heads, size = rows.shape
    out = rows.new_zeros(groups, num_tokens + 1, num_heads // groups, size, dtype=torch.float32)
    out[:, :-1] = rows.unflatten(1, (groups, -1)).transpose(0, 1)
    return out


def _by_token(rows: Tensor) -> Tensor:
    """[G, T + 1, R, D] -> [T, H, D]: the inverse of `_by_group`."""
    return rows[:, :-1].transpose(0, 1).flatten(1, 2)


def _read(rows: Tensor, block: Block) -> Tensor:
    """Read a block's rows from [G, T + 1, R, D]; returns [G * B, n * R, D]."""
    if isinstance(block.queries, slice):
        return rows[:, block.queries].flatten(1, 2)
    num_chains, num_queries = block.hidden.shape[:2]
    picked = rows.index_select(1, block.queries)
    return picked.view(len(rows) * num_chains, num_queries * rows.shape[2], rows.shape[3])


def _write(rows: Tensor, block: Block, values: Tensor) -> None:
    """Write `values` to the rows that `_read` reads."""
    if isinstance(block.queries, slice):
        rows[:, block.queries] = values.unflatten(1, (-1, rows.shape[2]))
    else:
        rows.index_copy_(1, block.queries, values.reshape(len(rows), -1, *rows.shape[2:]))
