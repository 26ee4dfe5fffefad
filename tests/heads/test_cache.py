"""Attention of draft layers over their cache: long texts give the same as with one mask of all entries, without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.parts.cache import cached_attention, text_attention
from headstart.model.model import Target
from headstart.tree.tree import Committed, TreeBatch
from tests.heads.test_contract import build, prefilled
from tests.tiny import tiny_model
from tests.train.test_long_texts import Largest


@pytest.mark.parametrize("starts", [[0, 0], [9, 9], [9, 4]], ids=["first draft", "later", "ragged"])
@pytest.mark.parametrize("width", [1, 3, 1100])
def test_entries_equal_one_mask(starts: list[int], width: int) -> None:
    torch.manual_seed(0)
    slots = max(starts) + width
    queries = torch.randn(2, 2, 2, width, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 3, 2, slots + 5, 8, dtype=torch.float64)  # of two rows and a spare one
    kv = keys, values
    index_BW = torch.tensor(starts)[:, None] + torch.arange(width)
    expected = cached_attention(queries, kv, slots, torch.arange(slots) <= index_BW[:, :, None])
    # The same sums in another order.
    torch.testing.assert_close(text_attention(queries, kv, slots, index_BW, starts), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_first_draft_after_a_long_prompt_makes_no_table_of_all_pairs() -> None:
    target = Target(tiny_model("llama", vocab_size=61, max_length=8192))
    heads, length = build("eagle3", target).eval(), 4096
    prompt = [1 + number % 60 for number in range(length)]
    session = prefilled(heads, target, [prompt])
    roots = TreeBatch.roots([5])
    with Largest() as largest:
        heads.draft_step(session, roots.tokens_BN, torch.zeros_like(roots.tokens_BN), 0)
    assert largest.numbers < length**2


class Padded(TorchDispatchMode):
    """Counts numbers that are copied to make room."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.pad.default):
            self.numbers += args[0].numel()
        return out


def test_plain_rounds_do_not_copy_unread_entries() -> None:
    target = Target(tiny_model("llama"))
    heads = build("eagle3", target).eval()
    prompt, rounds = [3, 4, 5], 100
    states = {layer: torch.zeros(1, len(prompt), target.hidden_size) for layer in heads.aux_layers}
    session = heads.prefill([prompt], states)
    last = {layer: state[:, -1:] for layer, state in states.items()}
    with Padded() as padded, torch.inference_mode():
        for _ in range(rounds):
            heads.commit(session, Committed.of([[7]], last, target.device))
    per_token = len(heads.aux_layers) * target.hidden_size + 1
    assert 0 < padded.numbers <= 2 * (len(prompt) + rounds) * per_token
