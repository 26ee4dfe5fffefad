"""Drafting state of recurrent heads (see `recurrent`). Glossary:

- Entry: keys and values of one (state, next token) pair in a row's cache; one per committed token or tree node.
- Pending: committed, not in the cache yet. The next round's first level writes these entries (long texts: `read_text`).
- Root's entry: the last pending entry. Its next token is the root, which is not known before the round begins.
- Above: the input states of a level: the previous level's feedback, or the target's states for pending entries.
- Feedback: a level's output states [B, W, E], which its nodes' children read instead of the target's.

Shape suffixes: B rows, P pending entries, W nodes of a level, X a family's inputs from the target, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.heads.parts.cache import Entries, LayerCache
from headstart.heads.parts.graphed import IntArray
from headstart.heads.parts.layer import LayerConfig, Rotary
from headstart.kernels import draft_kernels
from headstart.replay.cache import KVMemory
from headstart.replay.cuda_graphs import WIDTHS
from headstart.support.uploads import upload


@dataclass
class RecurrentSession:
    """Drafting state of a batch. `RecurrentHead.draft_tree` does not update `feedback_BWE`, `paths` and `nodes`.

    Attributes:
        pending_BPX: target states of the pending entries, `counts` per row, with spare room.
        next_tokens: next tokens of the pending entries, without the root.
        drafted: whether this round has written the pending entries to the cache.
        root_slots: cache slot of each row's root's entry.
        feedback_BWE: feedback of the last level's nodes.
        memory: buffers of CUDA graphs.
        paths: per row and node of the last level, the cache slots on its path after the root's.
        nodes: number of nodes of the levels after the first in this round.
        kernel_heads: the heads for the C kernels; weights do not change while drafting.
    """

    cache: LayerCache
    pending_BPX: Tensor
    next_tokens: list[list[int]]
    counts: list[int]
    root_slots: list[int]
    feedback_BWE: Tensor
    drafted: bool = False
    memory: RecurrentMemory | None = None
    paths: list[list[list[int]]] = field(default_factory=list)
    nodes: int = 0
    kernel_heads: draft_kernels.Recurrent | None = None

    def begin_round(self) -> None:
        """Start a round. Its first level is the pending entries."""
        self.root_slots = [length + count - 1 for length, count in zip(self.cache.lengths, self.counts, strict=True)]
        self.paths, self.nodes = [[[]] for _ in self.root_slots], 0
        self.drafted = True

    def pending_tokens(self, roots: Sequence[int], width: int) -> list[list[int]]:
        """Return the next tokens of the pending entries: each row's root last, then zeros."""
        rows = ([*tokens, root] for tokens, root in zip(self.next_tokens, roots, strict=True))
        return [row + [0] * (width - len(row)) for row in rows]

    def next_piece(self, width: int) -> tuple[list[int], list[list[int]]]:
        """Return counts and next tokens of each row's first pending entries, at most `width`, without the root's. Zeros
        pad the rows; later entries overwrite the cache slots of the padding."""
        counts = [min(width, count - 1) for count in self.counts]
        rows = zip(self.next_tokens, counts, strict=True)
        return counts, [tokens[:count] + [0] * (width - count) for tokens, count in rows]

    def drop_pending(self, read: Sequence[int]) -> None:
        """Drop the first `read` pending entries of each row, which are in the cache now."""
        width, device = self.pending_BPX.shape[1], self.pending_BPX.device
        left = max(pending - count for pending, count in zip(self.counts, read, strict=True))
        if len(set(read)) == 1:
            self.pending_BPX = self.pending_BPX[:, read[0] :]
        else:
            rows_B1 = torch.arange(len(read), device=device)[:, None]
            index_BP = upload(read, device)[:, None] + torch.arange(left, device=device)
            self.pending_BPX = self.pending_BPX[rows_B1, index_BP.clamp(max=width - 1)]
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, read, strict=True)]
        self.counts = [pending - count for pending, count in zip(self.counts, read, strict=True)]
        self.next_tokens = [tokens[count:] for tokens, count in zip(self.next_tokens, read, strict=True)]

    def next_entries(self, parents_BW: IntArray) -> Entries:
        """Entries of the next level's nodes, which see the text, their ancestors, and themselves."""
        entries = []
        for row, (root, above, parents) in enumerate(
            zip(self.root_slots, self.paths, parents_BW.tolist(), strict=True)
        ):
            slots = range(root + 1 + self.nodes, root + 1 + self.nodes + len(parents))
            self.paths[row] = [[*above[parent], slot] for slot, parent in zip(slots, parents, strict=True)]
            entries.append([(row, path[-1], root + len(path), root + 1, *path) for path in self.paths[row]])
        self.nodes += len(entries[0])
        return Entries.of(entries)


class RecurrentMemory(KVMemory):
    """Buffers of CUDA graphs. Inputs: keys and values, pending states, the previous level's feedback `feedback_in_BWE`,
    rotary tables. The graphs' output: `feedback_out_BWE`."""

    def __init__(
        self, config: LayerConfig, layers: int, rotary: Rotary, pending_BPX: Tensor, rows: int, capacity: int
    ) -> None:
        super().__init__(LayerCache.layers_like(config, layers, pending_BPX), rows, capacity)
        widest = WIDTHS[-1]
        with torch.inference_mode(False):
            self.pending_BPX = pending_BPX.new_zeros(rows, widest, pending_BPX.shape[2])
            self.feedback_in_BWE, self.feedback_out_BWE = pending_BPX.new_zeros(
                2, rows, widest, config.hidden_size
            ).unbind()
        self.rotary = rotary.table(capacity, pending_BPX.device, pending_BPX.dtype)

    def clear(self) -> None:
        super().clear()
        for buffer in (self.pending_BPX, self.feedback_in_BWE):
            buffer.zero_()
