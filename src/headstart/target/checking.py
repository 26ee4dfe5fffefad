"""Whether forwards of ours give what the model itself gives, tried at every loading, and whether bit for bit.

Shape suffixes: K tokens of a path, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.support.compiled import why_no_vectors
from headstart.target import cpu_attention
from headstart.target.captured import Recorded
from headstart.target.fitting import Fitting
from headstart.target.frozen import FrozenModel, cannot_tree
from headstart.target.prepacked import in_panels
from headstart.tree.tree import Tree

_CHECKED, _SMALL_WINDOW = 20, 512
"""Tokens before the tree, and windows up to which it stands beyond the window."""
_CLOSE, _ROUNDED, _IN_8_BITS = 0.02, 0.25, 0.5
"""Differences of logits, as a share of their spread, that rounding explains in float32, in shorter dtypes and with
products in 8 bits: bfloat16 rounds them by some percent, quantised layers by more, and 8 bits of rows and weights by
23 % (float32) or 30 % (bfloat16) on this text of no sense. With SmolLM2-135M a token that leaks moves them by 54 or
65 %, one that is hidden by 17 to 76 %, whichever it is: float32 alone is sure to show it. What runs in 8 bits has
passed in full before."""
FAILS = (RuntimeError, TypeError, KeyError, IndexError, AttributeError, ValueError, AssertionError)
"""What a model raises that cannot do what it is asked."""


@torch.inference_mode()
def check_tree(
    target: FrozenModel,
    path_logits: Callable[[Sequence[int], Tree, Sequence[int]], Tensor],
    limit: int | None,
    rounds: bool = False,
) -> None:
    """A path through a tree must have the logits that the model itself gives the same text, read at once; the text
    reaches beyond a sliding window, where that is small enough to read at every loading.

    Args:
        target: whose model it is.
        path_logits: what our forwards give after a text and after each node on a path of a tree, [1 + K, V].
        limit: of tokens, at which rotary frequencies change; None for none.
        rounds: whether our forwards multiply in 8 bits.

    Raises:
        UserError: it has others, or cannot be asked.
    """
    path = [0, 2, 4]  # root, second child, its child
    longest = min(target.max_length, limit or target.max_length) - len(path)
    wanted = _CHECKED if target.window is None or target.window > _SMALL_WINDOW else max(_CHECKED, target.window + 8)
    text = [1 + (31 * i * i + 7 * i) % (target.vocab_size - 1) for i in range(max(1, min(wanted, longest)))]
    tree = Tree([(7 * i + 2) % target.vocab_size for i in range(5)], [-1, 0, 0, 1, 2])
    try:
        ours_KV = path_logits(text, tree, path).float()
        text_1T = torch.tensor([[*text, *(tree.tokens[node] for node in path)]], device=target.device)
        stock = target.model(text_1T, use_cache=False, logits_to_keep=len(path) + 1).logits
        stock_KV = stock[0, -len(path) - 1 :].to(target.device).float()
    except FAILS as error:
        raise cannot_tree(target.name, f"{type(error).__name__}: {error}") from error
    difference = (ours_KV - stock_KV).square().mean().sqrt().item() / (stock_KV.std().item() + 1e-6)
    explained = _IN_8_BITS if rounds else _CLOSE if target.dtype == torch.float32 else _ROUNDED
    if not difference <= explained:
        raise cannot_tree(
            target.name, f"logits of a tree differ from the model's own by {difference:.0%} of their spread"
        )


def refuse_rounding(target: FrozenModel, fitting: Fitting, record: Callable[[], Recorded]) -> None:
    """Refuse exact="bits" where products or attention run without the compiled kernels; `record` records forwards."""
    device, dtype, prepacked = target.device, target.dtype, fitting.prepacked
    why, fix = None, ""
    if device.type != "cpu":
        why = "it is on a GPU"
    elif dtype not in (torch.bfloat16, torch.float32):
        why, fix = f"they do not compute in {target.dtype_name}", "Use --dtype bfloat16"
    elif not in_panels(torch.zeros(32, 32, dtype=dtype)) or not cpu_attention.serves(1, dtype, device):
        why, fix = why_no_vectors()
    elif (captured := (recorded := record()).captured) is None:
        why = recorded.refused
    elif not prepacked:
        why = "memory has no room for prepacked copies of its weights"
    elif prepacked != fitting.matrices:
        why = "some of its weights are packed, or not those of a linear layer"
    else:
        why = captured.rounds
    if why is not None:
        raise UserError(
            f"exact='bits' needs the compiled CPU kernels, and {target.name} cannot run on them throughout: {why}.",
            f"{f'{fix}, or leave' if fix else 'Leave'} out --exact bits; in float32 the tokens are those of plain "
            "decoding.",
        )
