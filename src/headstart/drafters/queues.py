"""What multi-token-prediction modules read next: states of the target, or what the module before made of the text.

Shape suffixes: B rows, T tokens, P entries of a row, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Queue:
    """Outputs of a module (or states of the target) that the next module has not read yet, of each row.

    Attributes:
        values_BPE: padded on the right.
        counts: how many are real, for each row.
    """

    def __init__(self, values_BPE: Tensor, counts: Sequence[int]) -> None:
        self.values_BPE, self.counts = values_BPE, list(counts)

    def joined(self, values_BPE: Tensor, counts: Sequence[int]) -> Queue:
        """With these after those of each row."""
        if not self.values_BPE.shape[1]:
            return Queue(values_BPE, counts)
        rows_B1, columns_BP = self._columns(values_BPE.shape[1], self.counts)
        width = max(self.counts) + values_BPE.shape[1]
        joined = F.pad(self.values_BPE, (0, 0, 0, width - self.values_BPE.shape[1]))
        joined[rows_B1, columns_BP] = values_BPE
        return Queue(joined, [a + b for a, b in zip(self.counts, counts, strict=True)])

    def after(self, counts: Sequence[int]) -> Queue:
        """Without the first so many of each row."""
        remaining = [have - gone for have, gone in zip(self.counts, counts, strict=True)]
        rows_B1, columns_BP = self._columns(max(remaining), counts)
        return Queue(self.values_BPE[rows_B1, columns_BP.clamp(max=self.values_BPE.shape[1] - 1)], remaining)

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.values_BPE, self.counts = self.values_BPE[list(rows)], [self.counts[row] for row in rows]

    def _columns(self, width: int, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        device = self.values_BPE.device
        rows_B1 = torch.arange(len(starts), device=device)[:, None]
        return rows_B1, torch.tensor(list(starts), device=device)[:, None] + torch.arange(width, device=device)


def first_read(prompts: Sequence[Sequence[int]], states_BPE: Tensor, modules: int) -> tuple[Tensor, list[Queue]]:
    """What modules begin with after the target has read the prompts.

    Args:
        prompts: of each row.
        states_BPE: the target's states of them, padded on the right.
        modules: how many there are.

    Returns:
        The prompts padded on the right, with room for each row's root, int64 [B, T]; and the queue of each module, of
        which the first alone has something to read.
    """
    width, lengths = max(map(len, prompts)), [len(prompt) for prompt in prompts]
    padded = [[*prompt, *[0] * (width + 1 - len(prompt))] for prompt in prompts]
    later = [Queue(states_BPE[:, :0], [0] * len(prompts)) for _ in range(1, modules)]
    return torch.tensor(padded, device=states_BPE.device), [Queue(states_BPE, lengths), *later]


def placed(tokens_BT: Tensor, lengths: Sequence[int], tokens_BP: Tensor) -> Tensor:
    """Tokens with others written after the first `lengths` of each row; in place where there is room for them.

    >>> placed(torch.tensor([[5, 6, 0], [7, 0, 0]]), [2, 1], torch.tensor([[8], [9]])).tolist()
    [[5, 6, 8], [7, 9, 0]]
    """
    device = tokens_BP.device
    columns_BP = torch.tensor(lengths, device=device)[:, None] + torch.arange(tokens_BP.shape[1], device=device)
    short = max(lengths) + tokens_BP.shape[1] - tokens_BT.shape[1]
    if short > 0:
        tokens_BT = F.pad(tokens_BT, (0, max(short, tokens_BT.shape[1])))
    tokens_BT[torch.arange(len(tokens_BP), device=device)[:, None], columns_BP] = tokens_BP
    return tokens_BT
