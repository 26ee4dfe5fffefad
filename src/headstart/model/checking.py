"""Checks, at every load, that headstart's forwards match the model's own, and whether they can be bit-exact.

Shape suffixes: K tokens of a path, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.kernels import cpu_attention
from headstart.kernels.prepacked import can_pack
from headstart.model.frozen import cannot_tree
from headstart.support.compiled import why_no_vectors
from headstart.tree.tree import Tree, TreeBatch

_TEXT_LENGTH, _SMALL_WINDOW = 20, 512
"""Tokens before the tree; largest sliding window that the text must exceed."""
_FLOAT32, _SHORT, _INT8 = 0.02, 0.25, 0.5
"""Tolerated logit error, relative to the logits' standard deviation, in float32, shorter dtypes and 8 bits. On this
random text 8 bits cause 23 % (float32) or 30 % (bfloat16). With SmolLM2-135M a leaked token causes 54 or 65 %, a
hidden one 17 to 76 %: only float32 is sure to catch it. Targets in 8 bits were checked in full precision before."""
FAILS = (RuntimeError, TypeError, KeyError, IndexError, AttributeError, ValueError, AssertionError)
"""Exceptions of a model that does not support a forward."""


@torch.inference_mode()
def check_tree(target: Any) -> None:
    """Compare a `Target`'s logits along a tree path with the model's own logits of the same text, which exceeds the
    sliding window if that is small.

    Raises:
        UserError: the logits differ, or the model fails.
    """
    path = [0, 2, 4]  # root, second child, its child
    longest = min(target.max_length, target._patch.limit or target.max_length) - len(path)
    small_window = target.window if target.window is not None and target.window <= _SMALL_WINDOW else 0
    length = max(1, min(longest, max(_TEXT_LENGTH, small_window + 8)))
    text = [1 + (31 * i * i + 7 * i) % (target.vocab_size - 1) for i in range(length)]
    tree = Tree([(7 * i + 2) % target.vocab_size for i in range(5)], [-1, 0, 0, 1, 2])
    try:
        ours_KV = _path_logits(target, text, tree, path).float()
        text_1T = torch.tensor([[*text, *(tree.tokens[node] for node in path)]], device=target.device)
        stock = target.model(text_1T, use_cache=False, logits_to_keep=len(path) + 1).logits
        stock_KV = stock[0, -len(path) - 1 :].to(target.device).float()
    except FAILS as error:
        raise cannot_tree(target.name, f"{type(error).__name__}: {error}") from error
    difference = (ours_KV - stock_KV).square().mean().sqrt().item() / (stock_KV.std().item() + 1e-6)
    tolerance = _INT8 if target._int8 else _FLOAT32 if target.dtype == torch.float32 else _SHORT
    if not difference <= tolerance:
        raise cannot_tree(
            target.name, f"logits of a tree differ from the model's own by {difference:.0%} of their spread"
        )


def _path_logits(target: Any, text: Sequence[int], tree: Tree, path: Sequence[int]) -> Tensor:
    """Compute logits after a text and after each node of a tree path, [1 + K, V]. A target that verifies chains reads
    and rejects another branch first."""
    cache = target._empty_cache(1, len(text) + tree.size)

    def read(tree: Tree) -> Tensor:
        logits_NV: Tensor = target.forward_tree(cache, TreeBatch.of([tree], target.device)).logits_BTV[0]
        return logits_NV

    read_1V = target.prefill(cache, [text]).logits_BTV[0]
    if not target.chains_only:
        return torch.cat([read_1V, read(tree)[list(path)]])
    rejected, accepted = (Tree.chain_of([tree.tokens[node] for node in nodes]) for nodes in ([0, 1, 3], path[1:]))
    root_1V = read(rejected)[:1]
    cache.commit([[0]])
    return torch.cat([read_1V, root_1V, read(accepted)])


def require_batch_invariance(target: Any) -> None:
    """Refuse exact="bits" for a `Target` unless products and attention run in the batch-invariant kernels."""
    device, dtype, prepacked = target.device, target.dtype, target._patch.prepacked
    why, fix = None, ""
    if device.type != "cpu":
        why = "it is on a GPU"
    elif dtype not in (torch.bfloat16, torch.float32):
        why, fix = f"they do not support {target.dtype_name}", "Use --dtype bfloat16"
    elif not can_pack(torch.zeros(32, 32, dtype=dtype)) or not cpu_attention.serves(1, dtype, device):
        why, fix = why_no_vectors()
    elif (replay := (recorded := target.record()).replay) is None:
        why = recorded.refused
    elif not prepacked:
        why = "memory has no room for prepacked copies of its weights"
    elif prepacked != target._patch.matrices:
        why = "some of its weights are quantised, or do not belong to a linear layer"
    else:
        why = replay.not_invariant
    if why is not None:
        raise UserError(
            f"exact='bits' needs the compiled CPU kernels, and {target.name} cannot run on them throughout: {why}.",
            f"{f'{fix}, or leave' if fix else 'Leave'} out --exact bits; in float32 the tokens equal plain decoding's.",
        )
