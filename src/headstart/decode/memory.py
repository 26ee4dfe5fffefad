"""Whether a batch fits in memory, before decoding starts."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.errors import UserError
from headstart.files import format_bytes
from headstart.target import Target
from headstart.target.memory import free_bytes

_SHARE = 0.9
"""Of the free memory that a KV cache may take; activations need the rest."""


def reserve(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_nodes: int, free: int | None = None
) -> int:
    """The widest tree (root included, at most `max_nodes`) whose KV cache fits beside the text.

    Args:
        target: whose cache it is.
        prompts: of the batch.
        max_new_tokens: longest answer.
        max_nodes: what the drafter would like.
        free: bytes of free memory on each device with layers; by default what is there.

    Raises:
        UserError: when the text alone does not fit.
    """
    row_tokens = max(map(len, prompts)) + max_new_tokens
    nodes = max_nodes
    for device, token_bytes in target.kv_bytes_by_device.items():
        per_token = len(prompts) * token_bytes
        left = int(_SHARE * (free_bytes(device) if free is None else free))
        if per_token * (row_tokens + 1) > left:
            raise UserError(
                f"The KV cache of {len(prompts)} prompts of up to {row_tokens} tokens takes "
                f"{format_bytes(per_token * (row_tokens + 1))}, and {format_bytes(left)} are free on {device}.",
                "Decode fewer prompts at a time, or lower --max-new-tokens.",
            )
        nodes = min(nodes, left // per_token - row_tokens)
    return max(1, nodes)
