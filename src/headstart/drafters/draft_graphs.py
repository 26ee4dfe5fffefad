"""CUDA graphs of draft heads: a level of a tree takes one upload, one launch and one read.

`GraphedHead` defines the captured forwards; buckets, memory and pools come from `replay.cuda_graphs`. The graph also
returns the host's input: the best drafts of each node with their log-probabilities.

Shape suffixes: B rows, W nodes of a level, R ranks, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.parts.graphed import GraphedHead, Level
from headstart.kernels import draft_kernels
from headstart.kernels.memory import Memory
from headstart.replay.cuda_graphs import WIDTHS, GraphPool, next_power_of_two
from headstart.support.uploads import upload_into

Forward = Callable[[Tensor], tuple[Tensor, ...]]
"""Maps the integer inputs of a level to outputs."""
Write = Callable[[Tensor, Tensor], None]
"""Writes integers into an input buffer."""
_SPARE = 256
"""Spare slots beyond the prompt in a new session."""


class DraftGraphs(GraphPool[Memory]):
    """The CUDA graphs of one drafter's heads."""

    def __init__(self, heads: GraphedHead) -> None:
        super().__init__(heads.bytes_per_token, heads.draft_to_target_D.device)
        self._heads = heads

    def prepare(self, session: Any, rows: int, nodes: int) -> bool:
        """Make room for a round of up to this many nodes a level; false if it must be drafted without graphs."""
        heads, memory = self._heads, session.memory
        if self.refused is not None or nodes > WIDTHS[-1]:
            return False
        slots = heads.slots(session) + heads.draft_steps * next_power_of_two(nodes)
        if memory is None or memory.capacity < slots or memory.rows < rows:
            if any(weight.device != self._device for weight in heads.weights()):
                self.disable("their weights are on several devices")
                return False
            power = next_power_of_two(rows)  # rows may join
            larger = self.lend(partial(heads.new_memory, session), power, slots + _SPARE, heads.weights())
            heads.leave_memory(session)
            self.return_when_collected(session, larger)
            heads.move(session, larger)
        for level in heads.pending_levels(session):
            self._run(session.memory, level, None, upload_into, partial(_read, heads, session.memory, level))
        return True

    def run_level(
        self,
        session: Any,
        root_B: Tensor,
        nodes: tuple[list[list[int]], list[list[int]]],
        depths: range,
        ranks: int,
        write: Write,
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [B, W, D] after the nodes of a level (or at these depths), valid until the next level, and their
        `best_drafts`; None if this level must be drafted without a graph. `nodes` are tokens and parents."""
        heads, memory = self._heads, session.memory
        tokens_BW, parents_BW = map(np.array, nodes)
        level = heads.level(session, root_B, tokens_BW, parents_BW, depths)
        if level is None:
            return None

        def forward(numbers_BX: Tensor) -> tuple[Tensor, Tensor]:
            logits_BWD = heads.draft_level(memory, numbers_BX, level.sizes).float()
            return logits_BWD, best_drafts(logits_BWD, ranks, heads.draft_to_target_D)

        logits_BWD, best = self._run(memory, level, ranks, write, forward)
        count = len(level.inputs_BX)
        return logits_BWD[:count, : level.width], best[:, :count, : level.width]

    def _run(self, memory: Any, level: Level, ranks: int | None, write: Write, forward: Forward) -> tuple[Tensor, ...]:
        """Outputs of a forward over a level's inputs, valid until the next one; replayed from a graph if possible.
        `ranks` distinguishes graphs of equal levels."""
        count = len(level.inputs_BX)
        rows = min(next_power_of_two(count), memory.rows)
        numbers_BX = np.pad(level.inputs_BX, ((0, rows - count), (0, 0)), mode="edge")
        bucket = (rows, ranks, level.sizes)
        graph = memory.graphs.get(bucket)
        inputs = torch.empty(numbers_BX.shape, dtype=torch.long, device=self._device) if graph is None else graph.inputs
        if inputs.numel():
            write(inputs, torch.from_numpy(numbers_BX))
        if graph is None and self.refused is None:
            graph = self.capture(memory, bucket, inputs, partial(forward, inputs))
        if graph is None:  # capture was refused in the middle of a round
            return forward(inputs)
        graph.graph.replay()
        outputs: tuple[Tensor, ...] = graph.outputs
        return outputs


def _read(heads: GraphedHead, memory: Any, level: Level, numbers_BX: Tensor) -> tuple[Tensor, ...]:
    """Append a level to the memory without drafting."""
    heads.draft_level(memory, numbers_BX, level.sizes)
    return ()


def best_drafts(logits_BWD: Tensor, ranks: int, draft_to_target_D: Tensor) -> Tensor:
    """The host's view of a level, int32 [3, B, W, R], best draft first: log-probabilities (float bits), indices in the
    draft vocabulary, tokens of the target. One tensor, since each read waits for the device."""
    if functions := draft_kernels.kernels_for(logits_BWD):
        return draft_kernels.best_drafts(functions, logits_BWD, ranks, draft_to_target_D)
    logits_BWD = logits_BWD.float()
    top = logits_BWD.topk(ranks, dim=-1)
    log_probs_BWR = top.values - logits_BWD.logsumexp(-1, keepdim=True)
    return torch.stack([log_probs_BWR.view(torch.int32), top.indices.int(), draft_to_target_D[top.indices].int()])
