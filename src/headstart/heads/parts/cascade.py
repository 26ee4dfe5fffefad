"""MTP modules, one for each draft step, each with a cache of its own (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k reads, at position p, what module k - 1 made of the same position (module 0: the target's final state) and the
embedding of token p + k + 1, and predicts token p + k + 2. Its attention sees its own entries up to p. Training runs
one module after the other over whole texts; nothing stands for what the target has not read, so an accepted draft has
computed what the text would have given. On tokens a b c d e f (positions 0-5), where d is the root and e, f are
drafted:

    module 0   entries of a-c, from the states of a, b, c and the embeddings of b, c, d      the last one drafts e
    module 1   entries of a, b, from outputs of module 0 and embeddings of c, d              of the text
               the entry of c, from its output and the embedding of e                        drafts f
    module 2   the entry of a, with the embedding of d                                       of the text
               the entry of b with e, then that of c with f                                  drafts the token after f

So a module is run at its own level alone, over what it has not read of the text and over all nodes so far: a node at
depth j is its entry at position c - (k - j), where c is the position of the last token that the target has read. Text
that is too short for that has no such entry; the node is then hidden.

Shape suffixes: B rows, T tokens, P pending entries of the text, W nodes of a level, N nodes so far without the root, X
entries of a forward (P + N), S cache slots in sight, E hidden size, M predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, origins
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.layer import DraftLayer, LayerCache, LayerConfig, Rotary, cached_attention, normed
from headstart.heads.parts.text_attention import causal_attention, positions_of


class MtpModule(DraftLayer):
    """A decoder layer, with what joins its inputs before it and the norm after it."""

    def __init__(self, config: LayerConfig) -> None:
        size = config.hidden_size
        super().__init__(config, size)
        self.enorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)

    def normed_inputs(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        """What the joining map reads, [..., 2 * E]; the embedding comes first."""
        return torch.cat([normed(self.enorm, embedded), normed(self.hnorm, feedback)], dim=-1)

    def join(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        """The stream that the layer reads and adds to, [..., E]."""
        stream: Tensor = self.eh_proj(self.normed_inputs(feedback, embedded))
        return stream

    def enter(self, feedback: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values as `DraftLayer.read` gives them, and the stream."""
        stream = self.join(feedback, embedded)
        return *self.read(stream, rotary), stream

    def leave(self, stream: Tensor, mixed: Tensor) -> Tensor:
        """What the LM head and the next module read, from the stream and what attention found, [..., E]."""
        return self.close(self.write(stream, mixed))

    def close(self, stream: Tensor) -> Tensor:
        """The layer's output, normed."""
        return normed(self.norm, stream)


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
        left = [have - gone for have, gone in zip(self.counts, counts, strict=True)]
        rows_B1, columns_BP = self._columns(max(left), counts)
        return Queue(self.values_BPE[rows_B1, columns_BP.clamp(max=self.values_BPE.shape[1] - 1)], left)

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


@dataclass
class CascadeState:
    """Drafting of a batch.

    Attributes:
        cache: keys and values; slot p of module k is its entry at position p.
        read: for each module, how many entries of each row's text are in its cache.
        queues: for each module, what it reads next: states of the target, or outputs of the module before.
        tokens_BT: committed tokens, and the root after them; padded on the right.
        lengths: committed tokens of each row.
        found: in this round, for each module that ran, how many entries of the text it read and what it made of them.
        nodes: tokens [B, N] of the nodes of this round, the root left out.
        parents_BN: of each, its parent: 0 for the root, 1 + its index for others.
        levels: nodes of each level, the root's first.
        visible_BNN: nodes that each node sees, itself included.
        made_BNE: what the last module that ran made of the root and the nodes before the last level.
    """

    cache: LayerCache
    read: list[list[int]]
    queues: list[Queue]
    tokens_BT: Tensor
    lengths: list[int]
    found: list[tuple[list[int], Tensor]] = field(default_factory=list)
    nodes: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    parents_BN: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    levels: list[int] = field(default_factory=list)
    visible_BNN: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0, dtype=torch.bool))
    made_BNE: Tensor | None = None

    def place(self, tokens_BP: Tensor) -> None:
        """Write tokens after each row's committed ones."""
        self.tokens_BT = placed(self.tokens_BT, self.lengths, tokens_BP)

    def commit(self, states_BPE: Tensor, tokens_BP: Tensor, counts: Sequence[int]) -> None:
        """Learn what was accepted: entries of the text that modules have read in this round stay, nodes go."""
        for module, (read, made_BPE) in enumerate(self.found):
            self.read[module] = [a + b for a, b in zip(self.read[module], read, strict=True)]
            self.queues[module] = self.queues[module].after(read)
            if module + 1 < len(self.queues):
                self.queues[module + 1] = self.queues[module + 1].joined(made_BPE, read)
        self.found = []
        self.queues[0] = self.queues[0].joined(states_BPE, counts)
        self.place(tokens_BP)
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows; what was drafted in this round is forgotten."""
        self.cache.reorder(rows)
        self.read = [[read[row] for row in rows] for read in self.read]
        for queue in self.queues:
            queue.reorder(rows)
        self.tokens_BT, self.lengths = self.tokens_BT[list(rows)], [self.lengths[row] for row in rows]
        self.found = []


@dataclass(frozen=True)
class Cascade:
    """Modules that run one after the other.

    Attributes:
        config: sizes.
        modules: the first reads the target's final states.
        embed: embeddings of tokens, in the dtype of a tensor.
        rotary: positions.
    """

    config: LayerConfig
    modules: Sequence[MtpModule]
    embed: Callable[[Tensor, Tensor], Tensor]
    rotary: Rotary

    # -- training --------------------------------------------------------------------------------------------------

    def unroll(self, batch: HeadBatch, final_BTE: Tensor, light: Callable[..., Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each step, what the LM head reads and the origins that it stands at, ([M, E], [M]).

        Args:
            batch: see `DraftHead.unroll`.
            final_BTE: the target's final states.
            light: as `DraftHead.light`.
        """
        made_BTE, width = final_BTE, batch.tokens_BT.shape[1]
        rotary = self.rotary.at(positions_of(batch.tokens_BT, batch.starts_BT), made_BTE.dtype, width)
        for step, module in enumerate(self.modules):
            origin_M = origins(batch, step)
            if not len(origin_M):
                return
            tokens_BT = F.pad(batch.tokens_BT[:, step + 1 :], (0, step + 1))
            embedded_BTE = self.embed(tokens_BT, made_BTE)
            queries, keys, values, stream = light(module.enter, made_BTE, embedded_BTE, rotary)
            mixed = causal_attention(queries, keys, values, batch.starts_BT)
            made_BTE = light(module.leave, stream, mixed)
            yield made_BTE.flatten(0, 1)[origin_M], origin_M

    # -- drafting --------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], states_BPE: Tensor) -> CascadeState:
        """See `DraftHead.prefill`."""
        tokens_BT, queues = first_read(prompts, states_BPE, len(self.modules))
        cache = LayerCache(self.config, len(self.modules), len(prompts), tokens_BT.shape[1] - 1, states_BPE)
        read = [[0] * len(prompts) for _ in self.modules]
        return CascadeState(cache, read, queues, tokens_BT, [len(prompt) for prompt in prompts])

    def level(self, state: CascadeState, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        """What the LM head reads at the nodes of one level, [B, W, E]; see `DraftHead.draft_step`."""
        rows_B = torch.arange(len(tokens_BW), device=tokens_BW.device)
        queue = state.queues[depth]
        if depth == 0:
            state.place(tokens_BW)
            state.found, state.levels = [], [1]
            state.nodes = state.parents_BN = tokens_BW[:, :0]
            state.visible_BNN = torch.zeros(len(rows_B), 0, 0, dtype=torch.bool, device=tokens_BW.device)
            pending, feedback_BNE = queue.counts, queue.values_BPE[:, :0]
        else:
            assert len(state.found) == depth and state.made_BNE is not None, "levels in order"
            self._grow(state, tokens_BW, parents_BW, rows_B)
            queue = queue.joined(state.found[-1][1], state.found[-1][0])
            # The output of the last entry of the text waits for the token after the root, which is drafted.
            pending = [max(0, count - 1) for count in queue.counts]
            feedback_BNE = state.made_BNE[rows_B[:, None], state.parents_BN]
        text_BPE = queue.values_BPE[:, : max(pending)]
        made_BXE = self._run(state, depth, text_BPE, pending, feedback_BNE)
        if depth + 1 == len(self.modules):
            return made_BXE
        width = text_BPE.shape[1]
        last_B = torch.tensor([max(0, count - 1) for count in pending], device=tokens_BW.device)
        root_B1E = made_BXE[rows_B, last_B][:, None]
        state.found.append((pending, made_BXE[:, :width]))
        state.made_BNE = torch.cat([root_B1E, made_BXE[:, width:]], dim=1)
        return state.made_BNE[:, -state.levels[-1] :]

    def _grow(self, state: CascadeState, tokens_BW: Tensor, parents_BW: Tensor, rows_B: Tensor) -> None:
        """Add the nodes of a level."""
        before, above = state.nodes.shape[1], state.levels[-1]
        index_BW = parents_BW + (before + 1 - above)  # of the parent, the root being 0
        own_BWW = torch.eye(tokens_BW.shape[1], dtype=torch.bool, device=tokens_BW.device).expand(len(rows_B), -1, -1)
        seen_BNN = F.pad(state.visible_BNN, (0, 0, 1, 0))  # the root is none of the nodes
        state.visible_BNN = torch.cat(
            [
                F.pad(state.visible_BNN, (0, tokens_BW.shape[1])),
                torch.cat([seen_BNN[rows_B[:, None], index_BW], own_BWW], dim=2),
            ],
            dim=1,
        )
        state.nodes = torch.cat([state.nodes, tokens_BW], dim=1)
        state.parents_BN = torch.cat([state.parents_BN, index_BW], dim=1)
        state.levels.append(tokens_BW.shape[1])

    def _run(
        self, state: CascadeState, number: int, text_BPE: Tensor, pending: list[int], feedback_BNE: Tensor
    ) -> Tensor:
        """What a module makes of pending entries of the text and of the nodes so far, [B, P + N, E].

        The last module answers for the nodes of the last level alone.

        Args:
            state: of the session.
            number: of the module.
            text_BPE: what it reads of the text beside the embeddings, padded on the right.
            pending: entries of each row that are no padding.
            feedback_BNE: what it reads for the nodes.
        """
        device, module, cache = text_BPE.device, self.modules[number], state.cache
        read, width, nodes = state.read[number], text_BPE.shape[1], feedback_BNE.shape[1]
        starts = [done + more for done, more in zip(read, pending, strict=True)]  # slots of the nodes
        slots = max(max(read) + width, max(starts) + nodes)
        cache.reserve(slots)
        read_B1, starts_B1, length_B1 = torch.tensor([read, starts, state.lengths], device=device)[:, :, None]
        rows_B1 = torch.arange(len(read), device=device)[:, None]
        text_BP = read_B1 + torch.arange(width, device=device)  # positions
        level_N = torch.repeat_interleave(torch.arange(len(state.levels)), torch.tensor(state.levels))[1:].to(device)
        node_BN = length_B1 - 1 - number + level_N
        last = state.tokens_BT.shape[1] - 1
        tokens_BX = torch.cat([state.tokens_BT[rows_B1, (text_BP + number + 1).clamp(max=last)], state.nodes], dim=1)
        position_BX = torch.cat([text_BP, node_BN.clamp(min=0)], dim=1)
        feedback_BXE = torch.cat([text_BPE, feedback_BNE], dim=1)
        rotary = self.rotary.at(position_BX, feedback_BXE.dtype, max(state.lengths))
        queries, keys, values, stream = module.enter(feedback_BXE, self.embed(tokens_BX, feedback_BXE), rotary)
        cache.put(number, read, keys[:, :, :width], values[:, :, :width])
        cache.put(number, starts, keys[:, :, width:], values[:, :, width:])  # over the padding of the text

        index_BS = torch.arange(slots, device=device) - starts_B1
        node_BNS = state.visible_BNN.new_zeros(len(read), nodes, slots)
        if nodes:
            shown_BNN = state.visible_BNN & (node_BN >= 0)[:, None]
            shown_BNN = shown_BNN | torch.eye(nodes, dtype=torch.bool, device=device)
            inside_BNS = shown_BNN.gather(2, index_BS.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1))
            node_BNS = (index_BS < 0)[:, None] | (inside_BNS & ((index_BS >= 0) & (index_BS < nodes))[:, None])
        text_BPS = torch.arange(slots, device=device) <= text_BP[:, :, None]
        allowed_BXS = torch.cat([text_BPS, node_BNS], dim=1)
        if number + 1 == len(self.modules):
            if number:
                wanted_BW = torch.arange(width + nodes - state.levels[-1], width + nodes, device=device)[None]
            else:  # the root is the last entry of the text
                wanted_BW = torch.tensor(pending, device=device)[:, None] - 1
            wanted_BW = wanted_BW.expand(len(read), -1)
            queries = queries.permute(0, 3, 1, 2, 4)[rows_B1, wanted_BW].permute(0, 2, 3, 1, 4)
            stream, allowed_BXS = stream[rows_B1, wanted_BW], allowed_BXS[rows_B1, wanted_BW]
        return module.leave(stream, cached_attention(queries, cache.kv[number], slots, allowed_BXS))
