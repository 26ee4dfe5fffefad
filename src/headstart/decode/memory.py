"""Whether a batch fits in memory, before decoding starts."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.errors import UserError
from headstart.support.files import format_bytes
from headstart.target.memory import free_bytes
from headstart.target.model import Target

_SHARE = 0.9
"""Of the free memory that may be taken; the activations of MLPs need the rest."""


def reserve(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_nodes: int, free: int | None = None
) -> int:
    """The widest tree (root included, at most `max_nodes`) that fits beside the text, where so many bytes are free on
    each device with layers, by default what is there. Counted are the KV cache, and of one forward the masks, the
    logits, and what attention keeps of a layer.

    Raises:
        UserError: when the text alone does not fit.
    """
    rows, row_tokens = len(prompts), max(map(len, prompts)) + max_new_tokens
    nodes = max_nodes
    for device, token_bytes in target.kv_bytes_by_device.items():
        per_token = rows * token_bytes
        available = int(_SHARE * (free_bytes(device) if free is None else free))
        beside, per_node = target.forward_bytes(rows, row_tokens + max_nodes) if device == target.device else (0, 0)
        needed = per_token * (row_tokens + 1) + beside + per_node
        if needed > available:
            raise UserError(
                f"Decoding {rows} prompts of up to {row_tokens} tokens takes {format_bytes(needed)} for keys, values, "
                f"masks and logits, and {format_bytes(available)} are free on {device}.",
                "Decode fewer prompts at a time, or lower --max-new-tokens.",
            )
        nodes = min(nodes, (available - beside - per_token * row_tokens) // (per_token + per_node))
    return max(1, nodes)
