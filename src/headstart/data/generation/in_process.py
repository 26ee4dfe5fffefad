"""Batched generation with the target in this process, optimised for throughput, not latency.

A common prefix is prefilled once, rows of similar length are prefilled together, a batch that does not fit in memory is
halved, and ended rows leave the batch.

Shape suffixes: B rows, T tokens, E hidden size, M rows of one temperature, V vocabulary, R candidates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headstart.data.generation.generator import CANDIDATES, Continuation
from headstart.decode.memory import by_halves
from headstart.decode.options import SamplingOptions
from headstart.decode.prefix_cache import common_prefix_length
from headstart.decode.sampling import warp
from headstart.errors import UserError, out_of_memory
from headstart.kernels.draft_kernels import argmax
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target, group_by_length
from headstart.support.rng import draw_at
from headstart.tree.tree import TreeBatch

_KEPT = 0.875
"""Ended rows are dropped once at most this fraction is alive, as dropping copies the cache."""
CACHE_PEAK = 1 + _KEPT
"""Peak memory of a cache as a multiple of its size, during that copy."""
_CPU_SHARE, _GPU_SHARE = 0.4, 0.85
"""Fraction of free memory for a batch; on a CPU two run side by side."""
_STATES_SHARE = 0.05
"""Largest fraction of free memory for the hidden states of a batch."""
_COLDEST = 1e-4
"""Lowest temperature above 0."""


class InProcess:
    """A `TextGenerator` on the target in this process.

    Each row has its own random stream, so its text does not depend on the other rows, up to rounding.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._max_tokens = math.inf  # rows times tokens; larger batches ran out of memory

    @property
    def has_fixed_rotary(self) -> bool:
        """False if the rotary tables depend on the text length, so that caches and threads cannot share them."""
        rotary = str(getattr(self._target.config, "rope_parameters", ""))
        return not any(kind in rotary for kind in ("dynamic", "longrope"))

    @property
    def window(self) -> int:
        return self._target.max_length

    def concurrent_batches(self, rows: int) -> int | None:
        return None if self.has_fixed_rotary else 1

    @torch.inference_mode()
    def continue_rows(self, rows: Sequence[Sequence[int]], continuation: Continuation) -> list[list[int]]:
        """Continue each row, halving batches that do not fit in memory; hidden states are kept if they fit."""
        if not self.has_fixed_rotary:
            for turn in continuation.turns:
                turn.drop()
        added: dict[int, list[int]] = {}

        def generate(numbers: list[int]) -> bool:
            count, length = len(numbers), max(len(rows[number]) for number in numbers) + continuation.max_new_tokens
            if count > 1 and not self._fits(count, length):
                return False
            try:
                generated = _Batch(self._target, rows, numbers, continuation).generate()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if count == 1:
                    raise UserError(
                        f"A text of {length} tokens does not fit the memory of {self._target.device} beside "
                        f"{self._target.name}.",
                        "Lower data.max_new_tokens or data.max_prompt_tokens, or use another device.",
                    ) from error
                self._max_tokens = min(self._max_tokens, count * length / 2)
                for turn in continuation.turns:  # their text is prefilled again
                    turn.drop()
                raise
            added.update(zip(numbers, generated, strict=True))
            return True

        by_halves(range(len(rows)), generate)
        return [added[number] for number in range(len(rows))]

    def _fits(self, rows: int, length: int) -> bool:
        target = self._target
        free = (_CPU_SHARE if target.device.type == "cpu" else _GPU_SHARE) * (
            free_bytes(target.device) + target.spare_bytes  # left by the last batch, reused by this one
        )
        needed = rows * length * target.kv_bytes_per_token * CACHE_PEAK
        return rows * length <= self._max_tokens and needed <= free


class _Batch:
    """A batch of the rows with these numbers."""

    def __init__(
        self, target: Target, rows: Sequence[Sequence[int]], numbers: Sequence[int], continuation: Continuation
    ) -> None:
        self._target, self._numbers, self._continuation = target, numbers, continuation
        self._rows = [rows[number] for number in numbers]
        self._temperatures = [continuation.temperatures[number] for number in numbers]
        self._random = [random.Random(f"{continuation.seed} {number}") for number in numbers]
        self._added: list[list[int]] = [[] for _ in numbers]
        self._ended = [False] * len(numbers)
        capacity = max(map(len, self._rows)) + continuation.max_new_tokens
        self._cache = target.new_cache(len(numbers), capacity)
        self._alive = sorted(range(len(numbers)), key=lambda row: len(self._rows[row]))  # rows in the cache
        shape, layers = (len(numbers), capacity, target.hidden_size), continuation.aux_layers
        size = math.prod(shape) * len(layers) * target.dtype.itemsize
        if target.device.type != "cpu" or size > _STATES_SHARE * free_bytes(target.device):
            layers = ()  # on a GPU each step would wait for the copy
        self._aux_layers = layers
        self._states = {layer: torch.zeros(shape, dtype=target.dtype) for layer in layers}

    def generate(self) -> list[list[int]]:
        logits_BV = self._prefill_all()
        while not all(self._ended):
            self._continuation.check()
            tokens = self._sample(logits_BV)
            remaining = self._append(tokens)
            if not remaining:
                break
            if len(remaining) <= _KEPT * len(self._alive):
                self._keep_turns(sorted(set(range(len(self._alive))) - set(remaining)))
                self._cache.reorder(remaining)
                self._alive = [self._alive[index] for index in remaining]
                tokens = [tokens[index] for index in remaining]
            logits_BV = self._forward(tokens)
        self._keep_turns(range(len(self._alive)))
        for row, number in enumerate(self._numbers if self._continuation.turns else ()):
            length = len(self._rows[row]) + len(self._added[row])
            states = {layer: batch_BTE[row, :length] for layer, batch_BTE in self._states.items()}
            self._continuation.turns[number].states = states
        return self._added

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _prefill_all(self) -> Tensor:
        if self._restore_turns():
            groups = [(index, index + 1) for index in range(len(self._alive))]  # cached lengths differ
        else:
            self._prefill_common_prefix()
            groups = group_by_length([len(self._rows[row]) - self._cache.lengths[0] for row in self._alive])
        return torch.cat([self._prefill(start, stop) for start, stop in groups])

    def _restore_turns(self) -> bool:
        """Restore caches of earlier turns; return False if there are none."""
        turns, has_restored = self._continuation.turns, False
        for index, row in enumerate(self._alive if turns else ()):
            turn = turns[self._numbers[row]]
            cache, turn.cache = turn.cache, None
            if cache is not None and (turn.states or not self._states):
                has_restored = True
                self._cache.load_row(index, cache)
                states = {layer: turn.states[layer][None, : self._cache.lengths[index]] for layer in self._aux_layers}
                self._store([row], [0], states)
        return has_restored

    def _prefill_common_prefix(self) -> None:
        """Prefill the common prefix of all rows once, such as a chat template's header."""
        if not (length := _common_length(self._rows)):
            return
        prefix = self._target.new_cache(1, length)
        out = self._target.prefill(prefix, [self._rows[0][:length]], self._aux_layers)
        for row in range(self._cache.rows):
            self._cache.load_row(row, prefix)
        of_all = {layer: state.expand(len(self._rows), -1, -1) for layer, state in out.aux_hidden_states.items()}
        self._store(self._alive, [0] * len(self._rows), of_all)

    def _prefill(self, start: int, stop: int) -> Tensor:
        """Prefill the uncached tokens of some cache rows; return the last logits [B, V]."""
        self._continuation.check()
        part, rows = self._cache.slice_rows(start, stop), self._alive[start:stop]
        before = list(part.lengths)
        texts = [self._rows[row][length:] for row, length in zip(rows, before, strict=True)]
        out = self._target.prefill(part, texts, self._aux_layers)
        self._store(rows, before, out.aux_hidden_states)
        self._cache.lengths[start:stop] = part.lengths
        return out.logits_BTV[:, 0]

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _sample(self, logits_BV: Tensor) -> list[int]:
        temperatures = [self._temperatures[row] for row in self._alive]
        uniform = [self._random[row].random() for row in self._alive]
        return next_tokens(logits_BV, temperatures, self._continuation.top_p, uniform)

    def _append(self, tokens: Sequence[int]) -> list[int]:
        """Append a token to each alive row; return the cache indices of rows that need another forward."""
        remaining = []
        for index, (row, token) in enumerate(zip(self._alive, tokens, strict=True)):
            if not self._ended[row]:
                self._added[row].append(token)
                is_full = len(self._added[row]) == self._continuation.max_new_tokens
                self._ended[row] = is_full or token in self._continuation.ends
            # The last token of a row is forwarded only for its hidden states.
            is_cached = len(self._rows[row]) + len(self._added[row]) <= self._cache.lengths[index]
            if not self._ended[row] or (self._states and not is_cached):
                remaining.append(index)
        return remaining

    def _forward(self, tokens: Sequence[int]) -> Tensor:
        """Forward the last token of each cache row; return logits [B, V]."""
        roots = TreeBatch.roots(tokens, self._target.device)
        out = self._target.forward_tree(self._cache, roots, self._aux_layers)
        self._store(self._alive, self._cache.lengths, out.aux_hidden_states)
        self._cache.commit([[0]] * len(self._alive))
        return out.logits_BTV[:, 0]

    def _store(self, rows: Sequence[int], starts: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Store states [B, T, E] of batch rows, from index `starts` of each row on, if states are captured."""
        if not self._states:
            return
        rows_B1 = torch.tensor(list(rows))[:, None]
        index_BT = torch.tensor(list(starts))[:, None] + torch.arange(next(iter(states.values())).shape[1])
        for layer, batch_BTE in self._states.items():
            batch_BTE[rows_B1, index_BT] = states[layer].to(batch_BTE)

    def _keep_turns(self, indices: Iterable[int]) -> None:
        """Keep these rows' caches if another turn may follow."""
        turns = self._continuation.turns
        for index in indices if turns else ():
            row = self._alive[index]
            if self._added[row][-1] in self._continuation.ends:
                length = min(self._cache.lengths[index], len(self._rows[row]) + len(self._added[row]))
                turns[self._numbers[row]].keep(self._target, self._cache, index, length)


def next_tokens(logits_BV: Tensor, temperatures: Sequence[float], top_p: float, uniform: Sequence[float]) -> list[int]:
    """Return each row's next token: argmax at temperature 0, else sampled from the top candidates by inverse CDF.

    >>> logits_BV = torch.tensor([[0.0, 2.0, 1.0]])  # probabilities 0.09, 0.67, 0.24
    >>> [next_tokens(logits_BV, [1.0], 1.0, [u])[0] for u in (0.0, 0.6, 0.7, 0.92, 1.0)]
    [1, 1, 2, 0, 0]
    """
    tokens_B = argmax(logits_BV) if 0 in temperatures else logits_BV.new_empty(len(logits_BV), dtype=torch.long)
    for temperature in {temperature for temperature in temperatures if temperature > 0}:
        index = [index for index, of_row in enumerate(temperatures) if of_row == temperature]
        index_M = torch.tensor(index, device=logits_BV.device)
        logits_MV = logits_BV if len(index) == len(logits_BV) else logits_BV[index_M]
        top_MR, tokens_MR = logits_MV.topk(min(CANDIDATES, logits_MV.shape[-1]), dim=-1)
        probs_MR = warp(SamplingOptions(temperature=max(temperature, _COLDEST), top_p=top_p), top_MR)
        uniform_M = torch.tensor([uniform[i] for i in index], dtype=torch.float64, device=logits_BV.device)
        sampled_M, _ = draw_at(probs_MR, uniform_M)
        tokens_B[index_M] = tokens_MR.gather(1, sampled_M[:, None])[:, 0]
    return list(tokens_B.tolist())


def _common_length(rows: Sequence[Sequence[int]]) -> int:
    """Return the length of the rows' common prefix, leaving at least one token of each; 0 for a single row.

    >>> _common_length([[1, 2, 3], [1, 2, 4, 5], [1, 2]]), _common_length([[1, 2]])
    (1, 0)
    """
    return min(common_prefix_length(rows), min(map(len, rows)) - 1) if len(rows) > 1 else 0
