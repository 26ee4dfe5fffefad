"""Estimate which batches fit into memory, and split larger ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from headstart.errors import UserError, out_of_memory
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target
from headstart.support.files import format_bytes

_USABLE_FRACTION = 0.9
"""Usable fraction of free memory; the activations of MLPs need the rest."""


def reserve(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_nodes: int,
    drafter_bytes_per_token: int = 0,
    drafter_spare_bytes: int = 0,
    free: int | None = None,
) -> int:
    """Return the most nodes per row (root included, at most `max_nodes`) that fit into memory with the text; 0 if the
    texts of several prompts do not fit. Raises UserError if the text of a single prompt does not fit.

    `free`: bytes available on each device that holds layers; None measures them. Counts the KV cache,
    `drafter_bytes_per_token` for each row, and for one forward the masks, the logits and one layer's attention. A
    single prompt is not refused for the drafters' memory, which only lowers its nodes. Buffers that target and drafters
    hold for their next text (`drafter_spare_bytes`) count as free.
    """
    rows, row_tokens, nodes = len(prompts), max(map(len, prompts)) + max_new_tokens, max_nodes
    for device, token_bytes in target.kv_bytes_by_device.items():
        per_token = rows * token_bytes
        on_main = device == target.device
        spare = target.spare_bytes + (drafter_spare_bytes if on_main else 0)
        available = int(_USABLE_FRACTION * (free_bytes(device) + spare if free is None else free))
        forward, per_node = target.forward_bytes(rows, row_tokens + max_nodes) if on_main else (0, 0)
        drafting = rows * drafter_bytes_per_token if on_main else 0
        needed = per_token * (row_tokens + 1) + forward + per_node
        if rows > 1 and needed + drafting * (row_tokens + 1) > available:
            return 0
        if needed > available:
            raise UserError(
                f"Decoding a prompt to {row_tokens} tokens takes {format_bytes(needed)} for keys, values, masks and "
                f"logits, and {format_bytes(available)} are usable on {device}.",
                "Shorten the prompt, or lower --max-new-tokens.",
            )
        per_token += drafting
        nodes = min(nodes, (available - forward - per_token * row_tokens) // (per_token + per_node))
    return max(1, nodes)


def by_halves(rows: Sequence[int], work: Callable[[list[int]], bool]) -> None:
    """Work on all rows together, or on halves (recursively) if `work` returns false or runs out of memory. With a
    single row an out-of-memory error propagates."""
    groups = [list(rows)]
    while groups:
        group = groups.pop()
        try:
            if work(group):
                continue
        except Exception as error:
            if len(group) == 1 or not out_of_memory(error):
                raise
        # Outside `except`: until here the error holds on to the tensors of its frames.
        free_garbage()
        half = (len(group) + 1) // 2
        groups += [group[half:], group[:half]]


def memory_error(target: Target) -> UserError:
    """Return the error of a single prompt that does not fit into memory."""
    return UserError(
        f"Decoding a single prompt takes more memory than {target.device} has beside {target.name}.",
        "Shorten the prompt, or lower --max-new-tokens.",
    )


def free_garbage() -> None:
    """Free the memory of tensors that nothing uses, after memory has run out."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
