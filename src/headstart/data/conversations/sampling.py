"""Batched plain sampling from the target, for writing data. Decoding for users is `decode/`'s.

Shape suffixes: B rows, V vocabulary, R candidates kept.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from headstart.data.conversations.conversations import alike
from headstart.errors import UserError
from headstart.support.files import format_bytes
from headstart.target.cache import TreeCache
from headstart.target.memory import free_bytes, out_of_memory
from headstart.target.model import Target
from headstart.tree.tree import TreeBatch

CANDIDATES = 64
"""Likeliest tokens that are drawn from."""
_KEPT = 0.875
"""Rows are dropped from the cache once no more than this share of them goes on: dropping copies it."""
CACHE_PEAK = 1 + _KEPT
"""Most that a batch's cache takes, as a multiple of itself: the copy stands beside it for a moment."""
_MAX_PADDING = 64
"""Tokens of padding that a group of rows may be read with in any case: a forward of its own costs as much."""
_SHARE = {"cpu": 0.4}
"""Of free memory, what a batch may take: two are written side by side on a CPU (`headstart.data.conversations.workers`)."""
_SHARE_ELSEWHERE = 0.85
_TURN_SHARE = 0.01
"""Of free memory, what the keys and values of one conversation may take that waits for its next turn."""
_STATES_SHARE = 0.05
"""Of free memory, what the hidden states of a batch may take."""


class Room:
    """How large a batch memory holds: learned from what did not fit, and shared by all batches of a run.

    Args:
        say: told, once, that batches are written in parts.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._maximum: float = float("inf")

    def holds(self, target: Target, rows: int, length: int) -> bool:
        """Whether the cache of so many rows of this length fits, as far as anyone can tell before trying."""
        if rows * length > self._maximum:
            return False
        free = _SHARE.get(target.device.type, _SHARE_ELSEWHERE) * free_bytes(target.device)
        return rows * length * target.kv_bytes_per_token * CACHE_PEAK <= free

    def failed(self, rows: int, length: int) -> None:
        """A batch that seemed to fit did not; larger ones than half of it are not tried again."""
        self._maximum = min(self._maximum, rows * length / 2)

    def note(self, target: Target, rows: int, length: int) -> None:
        """Say that this batch is written in parts, unless that was said before."""
        if self._say is not None:
            size = format_bytes(rows * length * target.kv_bytes_per_token)
            self._say(
                f"Memory does not hold {rows} conversations of up to {length} tokens at a time (a KV cache of {size}): "
                "such batches are written in halves. A smaller data.batch_size avoids it."
            )
        self._say = None


class RowStates:
    """Hidden states of rows that are written, kept as they are computed.

    Args:
        aux_layers: which.

    Attributes:
        of_row: by row and layer, [tokens of the row and added to it, E].
    """

    def __init__(self, aux_layers: Sequence[int]) -> None:
        self.aux_layers = tuple(aux_layers)
        self.of_row: dict[int, dict[int, Tensor]] = {}
        self._kept: dict[int, Tensor] = {}

    def bytes(self, target: Target, rows: int, length: int) -> int:
        """That rows of this length take."""
        return rows * length * len(self.aux_layers) * target.hidden_size * target.dtype.itemsize

    def begin(self, target: Target, rows: int, length: int) -> None:
        """Make room for a batch."""
        shape = (rows, length, target.hidden_size)
        self._kept = {layer: torch.zeros(shape, dtype=target.dtype) for layer in self.aux_layers}

    def add(self, rows: Sequence[int], starts: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Note states [B, T, E] of rows of the batch, from an index of each on."""
        width = next(iter(states.values())).shape[1]
        rows_B1 = torch.tensor(list(rows))[:, None]
        index_BT = torch.tensor(list(starts))[:, None] + torch.arange(width)
        for layer, kept_BTE in self._kept.items():
            kept_BTE[rows_B1, index_BT] = states[layer].to(kept_BTE)

    def end(self, numbers: Sequence[int], lengths: Sequence[int]) -> None:
        """Take what the batch has given, and its memory back."""
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            self.of_row[number] = {layer: kept_BTE[row, :length] for layer, kept_BTE in self._kept.items()}
        self._kept = {}


class Turns:
    """What is kept of conversations from one turn to the next, so that no text is read twice."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._wanted: set[int] = set()
        self._caches: dict[int, TreeCache] = {}
        self._states: dict[int, Mapping[int, Tensor]] = {}

    def begin(self, asked: Sequence[tuple[int, bool, Mapping[int, Tensor]]]) -> None:
        """The next turn.

        Args:
            asked: for each row, the number of its conversation, whether another turn may follow, and the hidden states
                of its text so far, empty where they are not known.
        """
        self._numbers = [number for number, _, _ in asked]
        self._wanted = {number for number, more, _ in asked if more}
        self._states = {number: states for number, _, states in asked if states}
        self._caches = {number: self._caches[number] for number in self._numbers if number in self._caches}

    def known(self, row: int, with_states: bool) -> tuple[TreeCache, Mapping[int, Tensor]] | None:
        """What was read of a row's conversation, which is then not kept any longer; None where it has to be read."""
        number = self._numbers[row]
        states = self._states.get(number, {})
        return (
            None if number not in self._caches or (with_states and not states) else (self._caches.pop(number), states)
        )

    def keep(self, target: Target, row: int, cache: TreeCache, index: int, length: int) -> None:
        """Keep what a cache holds of a row that has ended, if another turn may follow and memory has room."""
        size = length * target.kv_bytes_per_token
        if self._numbers[row] in self._wanted and size <= _TURN_SHARE * free_bytes(target.device):
            self._caches[self._numbers[row]] = cache.kept(index, length)

    def forget(self) -> None:
        """Keep nothing: memory is short."""
        self._caches.clear()
        self._wanted.clear()


@torch.inference_mode()
def sample_rows(
    target: Target,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    top_p: float,
    ends: frozenset[int],
    seed: int,
    check: Callable[[], None] | None = None,
    room: Room | None = None,
    states: RowStates | None = None,
    turns: Turns | None = None,
) -> list[list[int]]:
    """Continue each row until an end token (kept) or `max_new_tokens`.

    Rows that memory does not hold at a time are written half by half. Each row has draws of its own, so that what it
    says does not depend on which rows were written beside it (beyond rounding).

    Args:
        target: the model.
        rows: token ids; any lengths.
        max_new_tokens: most tokens to add to a row.
        temperatures: one per row; 0 is greedy.
        top_p: nucleus for rows with a temperature, taken among the 64 likeliest tokens.
        ends: tokens that end a row.
        seed: of the draws.
        check: called before each step; what it raises ends the work.
        room: what is known of memory from earlier batches.
        states: takes the hidden states of rows and added tokens, but for batches whose states memory may not hold.
        turns: of the conversations that the rows belong to, kept from one call to the next.

    Returns:
        The added tokens of each row.

    Raises:
        UserError: memory does not hold a single row.
    """
    room = room or Room()
    rngs = [random.Random(f"{seed} {row}") for row in range(len(rows))]
    added: dict[int, list[int]] = {}
    waiting = [list(range(len(rows)))]
    while waiting:
        part = waiting.pop()
        length = max(len(rows[row]) for row in part) + max_new_tokens
        written = None
        if len(part) == 1 or room.holds(target, len(part), length):
            before = {row: rngs[row].getstate() for row in part}
            try:
                written = _continue(
                    target,
                    [rows[row] for row in part],
                    max_new_tokens,
                    [temperatures[row] for row in part],
                    top_p,
                    ends,
                    [rngs[row] for row in part],
                    check,
                    states if states is not None and _holds(target, states, len(part), length) else None,
                    part,
                    turns,
                )
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if len(part) == 1:
                    raise UserError(
                        f"A text of {length} tokens does not fit the memory of {target.device} beside {target.name}.",
                        "Lower data.max_new_tokens or data.max_prompt_tokens, or use another device.",
                    ) from error
            if written is None:  # out here, where the error no longer holds on to what it could not extend
                room.failed(len(part), length)
                if turns is not None:  # what is not kept is read again
                    turns.forget()
                _release(target.device)
                for row, state in before.items():
                    rngs[row].setstate(state)
        if written is None:
            room.note(target, len(part), length)
            half = (len(part) + 1) // 2
            waiting += [part[half:], part[:half]]
        else:
            added.update(zip(part, written, strict=True))
    return [added[row] for row in range(len(rows))]


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _continue(
    target: Target,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperatures: Sequence[float],
    top_p: float,
    ends: frozenset[int],
    rngs: Sequence[random.Random],
    check: Callable[[], None] | None,
    states: RowStates | None,
    numbers: Sequence[int],
    turns: Turns | None,
) -> list[list[int]]:
    """`sample_rows` for rows that are written together, which have these numbers among all."""
    aux_layers = states.aux_layers if states is not None else ()
    added: list[list[int]] = [[] for _ in rows]
    cache = target.new_cache(len(rows), max(map(len, rows)) + max_new_tokens)
    alive = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # rows of alike length side by side
    if states is not None:
        states.begin(target, len(rows), cache.capacity)
    known = {} if turns is None else {row: turns.known(numbers[row], states is not None) for row in alive}
    if any(known.values()):
        logits_BV = _go_on(target, cache, alive, rows, known, states, check)
    else:
        logits_BV = _begin(target, cache, alive, rows, states)

    def keep(indices: Iterable[int]) -> None:
        for index in indices:
            row = alive[index]
            if turns is not None and added[row][-1] in ends:
                length = min(cache.lengths[index], len(rows[row]) + len(added[row]))
                turns.keep(target, numbers[row], cache, index, length)

    ended = [False] * len(rows)
    for step in range(max_new_tokens):
        if check is not None:
            check()
        temperature_B = torch.tensor([temperatures[row] for row in alive], device=target.device)
        uniform_B = torch.tensor([rngs[row].random() for row in alive], device=target.device)
        picked = _pick(logits_BV, temperature_B, top_p, uniform_B).tolist()
        for row, token in zip(alive, picked, strict=True):
            if not ended[row]:
                added[row].append(token)
                ended[row] = token in ends
        # A token that nothing follows is read for its states alone.
        unread = [len(rows[row]) + len(added[row]) > length for row, length in zip(alive, cache.lengths, strict=True)]
        going = [i for i, row in enumerate(alive) if not ended[row] or (states is not None and unread[i])]
        if not going or (step == max_new_tokens - 1 and states is None):
            break
        if len(going) <= _KEPT * len(alive):
            keep(sorted(set(range(len(alive))) - set(going)))
            cache.reorder(going)
            alive, picked = [alive[index] for index in going], [picked[index] for index in going]
        out = target.forward_tree(cache, TreeBatch.roots(picked, target.device), aux_layers)
        logits_BV = out.logits_BTV[:, 0]
        if states is not None:
            states.add(alive, cache.lengths, out.aux_hidden_states)
        cache.commit([[0]] * len(alive))
    keep(range(len(alive)))
    if states is not None:
        states.end(numbers, [len(row) + len(more) for row, more in zip(rows, added, strict=True)])
    return added


def _begin(
    target: Target, cache: TreeCache, order: Sequence[int], rows: Sequence[Sequence[int]], states: RowStates | None
) -> Tensor:
    """Read rows in this order, shortest first; logits [B, V]."""
    shared = _shared(rows)
    if shared:  # what a chat template puts in front of every row is read once
        prefix = target.new_cache(1, shared)
        out = target.prefill(prefix, [rows[0][:shared]], () if states is None else states.aux_layers)
        cache.begin_with(prefix)
        if states is not None:
            of_all = {layer: state.expand(len(rows), -1, -1) for layer, state in out.aux_hidden_states.items()}
            states.add(order, [0] * len(rows), of_all)
    return _read(target, cache, order, [row[shared:] for row in rows], states)


def _go_on(
    target: Target,
    cache: TreeCache,
    order: Sequence[int],
    rows: Sequence[Sequence[int]],
    known: MutableMapping[int, tuple[TreeCache, Mapping[int, Tensor]] | None],
    states: RowStates | None,
    check: Callable[[], None] | None,
) -> Tensor:
    """Read what is new of rows, in this order, one by one: what they go on from differs in length; logits [B, V]."""
    logits = []
    for index, row in enumerate(order):
        if check is not None:
            check()
        if (before := known.pop(row)) is not None:
            cache.go_on_with(index, before[0])
            if states is not None:
                read = {layer: before[1][layer][None, : cache.lengths[index]] for layer in states.aux_layers}
                states.add([row], [0], read)
        part = cache.part(index, index + 1)
        start = part.lengths[0]
        out = target.prefill(part, [rows[row][start:]], () if states is None else states.aux_layers)
        logits.append(out.logits_BTV[:, 0])
        if states is not None:
            states.add([row], [start], out.aux_hidden_states)
        cache.lengths[index] = part.lengths[0]
    return torch.cat(logits)


def _read(
    target: Target, cache: TreeCache, order: Sequence[int], rows: Sequence[Sequence[int]], states: RowStates | None
) -> Tensor:
    """Read rows in this order, shortest first, so many at a time that there is little padding; logits [B, V]."""
    logits = []
    for start, stop in _groups([len(rows[row]) for row in order]):
        part, group = cache.part(start, stop), order[start:stop]
        before = list(part.lengths)
        out = target.prefill(part, [rows[row] for row in group], () if states is None else states.aux_layers)
        logits.append(out.logits_BTV[:, 0])
        if states is not None:
            states.add(group, before, out.aux_hidden_states)
        cache.lengths[start:stop] = part.lengths
    return torch.cat(logits)


def _holds(target: Target, states: RowStates, rows: int, length: int) -> bool:
    """Whether there is room for the hidden states of a batch. On a GPU each step would wait for them to be copied."""
    if target.device.type != "cpu":
        return False
    return states.bytes(target, rows, length) <= _STATES_SHARE * free_bytes(target.device)


def _groups(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Starts and stops of rows that are read together, from their lengths in ascending order.

    >>> _groups([1, 1, 2, 100, 100, 120, 300])
    [(0, 3), (3, 6), (6, 7)]
    """
    groups: list[tuple[int, int]] = []
    start = 0
    for row, length in enumerate(lengths):
        padding = (row - start + 1) * length - sum(lengths[start : row + 1])
        if padding > max(_MAX_PADDING, 0.1 * sum(lengths[start : row + 1])):
            groups.append((start, row))
            start = row
    return [*groups, (start, len(lengths))]


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all of several rows begin with alike, at least one of each left over.

    >>> _shared([[1, 2, 3], [1, 2, 4, 5], [1, 2]]), _shared([[1, 2]])
    (1, 0)
    """
    if len(rows) < 2:
        return 0
    lists = [list(row) for row in rows]
    return min(alike(min(lists), max(lists)), min(map(len, rows)) - 1)  # in order, the first and last differ most


def _pick(logits_BV: Tensor, temperature_B: Tensor, top_p: float, uniform_B: Tensor) -> Tensor:
    """Next token of each row, int64 [B]: argmax at temperature 0, else what a number from [0, 1) draws of the nucleus.

    >>> logits_BV, warm_B = torch.tensor([[0.0, 2.0, 1.0]]), torch.ones(1)  # probabilities 0.09, 0.67, 0.24
    >>> [int(_pick(logits_BV, warm_B, 1.0, torch.tensor([uniform]))) for uniform in (0.0, 0.6, 0.7, 0.92, 1.0)]
    [1, 1, 2, 0, 0]
    """
    if not bool((temperature_B > 0).any()):
        return logits_BV.max(-1).indices
    top_BR, ids_BR = logits_BV.topk(min(CANDIDATES, logits_BV.shape[-1]), dim=-1)
    probs_BR = torch.softmax(top_BR.float() / temperature_B.clamp(min=1e-4)[:, None], dim=-1)
    before_BR = probs_BR.cumsum(-1) - probs_BR
    reached_BR = probs_BR.masked_fill(before_BR >= top_p, 0.0).cumsum(-1)
    aim_B1 = uniform_B[:, None].float().clamp(max=1 - 1e-6) * reached_BR[:, -1:]
    drawn_B1 = (reached_BR <= aim_B1).sum(-1, keepdim=True)
    drawn_B1 = torch.where(temperature_B[:, None] > 0, drawn_B1, 0)
    return ids_BR.gather(1, drawn_B1)[:, 0]
