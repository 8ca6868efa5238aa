"""PyTorch's fused attention: a whole causal row, or one row of a sequence against all keys so far."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Attention of ``query`` [b, n, s, d] over ``keys`` and ``values``, each a list of [b, g, s_i, d]: [b, n, s, d].

    The last key block belongs to the query's own tokens, earlier ones lie before them. ``mask`` [b, 1, s, all keys] is
    True where a query must not look; None is causal.
    """
    if len(keys) > 1 and mask is None and query.device.type == "cpu":
        return PrefixAttention.apply(query, *keys, *values)
    key, value = (blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), 2) for blocks in (keys, values))
    grouped = query.shape[1] != key.shape[1]
    allowed: Tensor | None = None
    if mask is not None:
        allowed = ~mask
    elif len(keys) > 1:  # is_causal would align the first query with the first key, and be silently wrong for a later row
        allowed = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=allowed is None, enable_gqa=grouped)


def takes_grouped_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel takes fewer key heads than ``query`` has: those of GPUs do in 16 bits and without a mask.

    Elsewhere PyTorch would spell all scores out, which takes memory of the sequence squared; heads that are repeated have a fused kernel.
    """
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and mask is None


class PrefixAttention(torch.autograd.Function):
    """A later row of a causal sequence: fused causal attention on its own block, fused full attention on the prefix.

    Both are merged by their log-sum-exp, which is exact. Backward of each block is exact too when it is given the merged
    output and log-sum-exp, since the kernel rebuilds probabilities as exp(score - log-sum-exp) (Dao et al., 2022).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, *blocks: Tensor) -> Tensor:
        """``blocks``: keys [b, n, s_i, d] of earlier rows and the own, then values alike."""
        half = len(blocks) // 2
        key, value = blocks[half - 1], blocks[-1]
        prefix_key, prefix_value = torch.cat(blocks[: half - 1], 2), torch.cat(blocks[half:-1], 2)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own, own_lse = kernel(query, key, value, 0.0, True)  # [b, n, s, d], [b, n, s]
        prefix, prefix_lse = kernel(query, prefix_key, prefix_value, 0.0, False)
        lse = torch.logaddexp(own_lse, prefix_lse)
        share = (own_lse - lse).exp_().unsqueeze(-1)  # [b, n, s, 1], in fp32 at least, as is the merge
        out: Tensor = torch.lerp(prefix.to(share.dtype), own.to(share.dtype), share).to(own.dtype)
        ctx.save_for_backward(query, out, lse, *blocks)  # earlier rows hold their blocks anyway; their concatenation would be more
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        query, out, lse, *blocks = ctx.saved_tensors
        half = len(blocks) // 2
        prefix_key, prefix_value = torch.cat(blocks[: half - 1], 2), torch.cat(blocks[half:-1], 2)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_query, d_key, d_value = kernel(d_out, query, blocks[half - 1], blocks[-1], out, lse, 0.0, True)
        d_query_prefix, *d_prefix = kernel(d_out, query, prefix_key, prefix_value, out, lse, 0.0, False)
        d_prefix_keys, d_prefix_values = (d.split([block.shape[2] for block in blocks[: half - 1]], 2) for d in d_prefix)
        return (d_query.add_(d_query_prefix), *d_prefix_keys, d_key, *d_prefix_values, d_value)
