"""Drafting with the multi-token-prediction modules that a target's checkpoint brings along; nothing is trained.

Entry p of a module reads the state of token p and the embedding of a later token, with a cache of its own. A single
module takes every step and is fed its own output, as serving engines use it; several take one step each, module k
reading what module k - 1 made of the same token.

Each draft of a chain is one forward of one module: over what it has not read of the text, whose last entry is the
root's, and over all drafts so far. Entries of the text before the root's are committed. The root's own is read again
for each draft and in the next round, so that drafts always follow a node.

Shape suffixes: B rows, P pending entries of the text, N drafts so far, E hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.drafters.heads import grow
from headstart.errors import UserError
from headstart.support.uploads import upload
from headstart.target.cache import TreeCache
from headstart.target.model import Target
from headstart.target.shipped import ShippedModule, read_shipped
from headstart.tree.tree import Committed, Request, Tree, TreeBatch

DRAFT_STEPS = 3
"""Steps of a single module where nobody says how many: it was trained for the first, and each further one is fed a
guess."""
_SPARE = 512
"""Entries that a cache takes before it grows."""


class Queue:
    """Outputs of a module (or states of the target) that the next module has not read yet: of each row's values,
    padded on the right, so many (`counts`) are real."""

    def __init__(self, values_BPE: Tensor, counts: Sequence[int]) -> None:
        self.values_BPE, self.counts = values_BPE, list(counts)

    def joined(self, values_BPE: Tensor, counts: Sequence[int]) -> Queue:
        """With these after each row's."""
        if not self.values_BPE.shape[1]:
            return Queue(values_BPE, counts)
        rows_B1, columns_BP = _slots(self.counts, values_BPE.shape[1], values_BPE.device)
        width = max(self.counts) + values_BPE.shape[1]
        joined = F.pad(self.values_BPE, (0, 0, 0, width - self.values_BPE.shape[1]))
        joined[rows_B1, columns_BP] = values_BPE
        return Queue(joined, [a + b for a, b in zip(self.counts, counts, strict=True)])

    def after(self, counts: Sequence[int]) -> Queue:
        """Without the first so many of each row."""
        remaining = [have - gone for have, gone in zip(self.counts, counts, strict=True)]
        rows_B1, columns_BP = _slots(counts, max(remaining), self.values_BPE.device)
        return Queue(self.values_BPE[rows_B1, columns_BP.clamp(max=self.values_BPE.shape[1] - 1)], remaining)

    def reorder(self, rows: Sequence[int]) -> None:
        self.values_BPE = self.values_BPE[upload(rows, self.values_BPE.device)]
        self.counts = [self.counts[row] for row in rows]


def _slots(starts: Sequence[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows [B, 1] and columns [B, width] of the entries from each row's start on."""
    rows_B1 = torch.arange(len(starts), device=device)[:, None]
    return rows_B1, upload(list(starts), device)[:, None] + torch.arange(width, device=device)


@dataclass
class _Session:
    """One generation.

    Attributes:
        caches: of each module.
        queues: what each module reads next, beside the embeddings.
        tokens_BT: committed tokens (`lengths` of each row), and the root after them; padded on the right.
        drafts_BN: of this round.
        made_BNE: what was made of the root and of all drafts but the last.
    """

    caches: list[TreeCache]
    queues: list[Queue]
    tokens_BT: Tensor
    lengths: list[int]
    drafts_BN: Tensor
    made_BNE: Tensor

    def place(self, tokens_BP: Tensor) -> None:
        """Write tokens after each row's committed ones."""
        more = tokens_BP.shape[1]
        short = max(self.lengths) + more - self.tokens_BT.shape[1]
        if short > 0:
            self.tokens_BT = F.pad(self.tokens_BT, (0, max(short, self.tokens_BT.shape[1])))
        self.tokens_BT[_slots(self.lengths, more, tokens_BP.device)] = tokens_BP


class MtpDrafter:
    """Draft chains with a target's own MTP modules: of `draft_steps` at most, by default `DRAFT_STEPS` with one module,
    and as many as there are modules with several."""

    def __init__(self, target: Target, draft_steps: int | None = None) -> None:
        self._target = target
        self._shipped = read_shipped(target)
        self._reading = threading.Lock()  # a module holds what it reads: only one thread at a time may have it do so
        count = len(self.modules)
        if count > 1 and draft_steps is not None and draft_steps > count:
            raise UserError(
                f"{target.name} ships {count} multi-token-prediction modules, one for each draft, and {draft_steps} "
                "drafts are asked for.",
                f"Ask for {count} at most.",
            )
        self.draft_steps = draft_steps or (DRAFT_STEPS if count == 1 else count)
        self.max_nodes = self.draft_steps + 1
        self.aux_layers: tuple[int, ...] = (self._shipped.state_layer,)
        self.draft_to_target_D = torch.arange(target.vocab_size, device=target.device)
        # Of keys and values twice what is needed: caches grow by doubling. Of states those that a module reads next.
        states = target.hidden_size * target.dtype.itemsize
        keys = sum(module.bytes_per_token for module in self.modules)
        self.bytes_per_token = 2 * (keys + torch.long.itemsize) + count * states
        lm_head = target.lm_head_weight.numel()
        self.draft_share = self.draft_steps * (self.modules[0].parameters + lm_head) / target.parameters

    @property
    def modules(self) -> list[ShippedModule]:
        """First to last."""
        return self._shipped.modules

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> _Session:
        states_BPE = states[self._shipped.state_layer]
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        padded = [[*prompt, *[0] * (width + 1 - len(prompt))] for prompt in prompts]
        tokens_BT, nothing = torch.tensor(padded, device=states_BPE.device), states_BPE[:, :0]
        later = [Queue(nothing, [0] * len(prompts)) for _ in self.modules[1:]]
        caches = [module.new_cache(len(prompts), width + _SPARE) for module in self.modules]
        return _Session(caches, [Queue(states_BPE, lengths), *later], tokens_BT, lengths, tokens_BT[:, :0], nothing)

    def propose(self, session: _Session, roots: TreeBatch, request: Request) -> list[Tree]:
        if min(session.lengths) < len(self.modules):  # a module in the middle would have nothing to read
            return roots.trees
        for cache in session.caches:
            cache.watch(request.check)
        return grow(self, session, roots, replace(request, chain=True))

    def draft_step(self, session: _Session, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        """See `DraftHead.draft_step`; a level is one draft of a chain, so every parent is the draft before."""
        number = depth if len(self.modules) > 1 else 0
        if depth == 0:
            session.place(tokens_BW)
            session.drafts_BN = tokens_BW[:, :0]
            feedback_BNE = session.queues[0].values_BPE[:, :0]
        else:
            session.drafts_BN = torch.cat([session.drafts_BN, tokens_BW], dim=1)
            feedback_BNE = session.made_BNE
        made_BPE, counts = self._read_text(session, number)
        session.made_BNE = self._read_drafts(session, number, feedback_BNE)
        if number + 1 < len(self.modules):
            session.queues[number + 1] = session.queues[number + 1].joined(made_BPE, counts)
        hidden_B1E = session.made_BNE[:, -1:]
        if self._shipped.lm_head_VE is None:
            return self._target.lm_head(hidden_B1E)
        return self._target.finish(F.linear(hidden_B1E, self._shipped.lm_head_VE))

    def commit(self, session: _Session, committed: Committed) -> None:
        states_BPE = committed.states[self._shipped.state_layer]
        session.queues[0] = session.queues[0].joined(states_BPE, committed.counts)
        session.place(committed.tokens_BP)
        session.lengths = [a + b for a, b in zip(session.lengths, committed.counts, strict=True)]

    def reorder(self, session: _Session, rows: Sequence[int]) -> None:
        for cache in session.caches:
            cache.reorder(rows)
        for queue in session.queues:
            queue.reorder(rows)
        session.tokens_BT = session.tokens_BT[upload(rows, session.tokens_BT.device)]
        session.lengths = [session.lengths[row] for row in rows]

    def _read_text(self, session: _Session, number: int) -> tuple[Tensor, list[int]]:
        """Read and commit the pending entries of the text but the last, which is the root's; what became of them."""
        queue, module = session.queues[number], self.modules[number]
        counts = [count - 1 for count in queue.counts]
        width = max(counts)
        if not width:
            return queue.values_BPE[:, :0], counts
        cache = self._with_room(session, number, width)
        joined_BPE = self._joined(session, number, queue.values_BPE[:, :width])
        if min(counts) > 0:
            with self._reading:
                made_BPE = module.read(cache, joined_BPE, counts)
        else:  # rows that have nothing to read read something that is not committed
            parents = [list(range(-1, max(1, count) - 1)) for count in counts]
            with self._reading:
                made_BPE = module.read_tree(cache, joined_BPE, parents)
            cache.commit([range(count) for count in counts])
        session.queues[number] = queue.after(counts)
        return made_BPE, counts

    def _read_drafts(self, session: _Session, number: int, feedback_BNE: Tensor) -> Tensor:
        """What a module makes of the root and of the drafts so far, [B, 1 + N, E]; nothing is committed."""
        module, queue = self.modules[number], session.queues[number]
        cache = self._with_room(session, number, 1 + feedback_BNE.shape[1])
        root_B1E = self._joined(session, number, queue.values_BPE[:, :1])
        draft_BNE = module.joined(self._embed(session.drafts_BN, feedback_BNE), feedback_BNE)
        parents = list(range(-1, draft_BNE.shape[1]))
        joined_BNE = torch.cat([root_B1E, draft_BNE], dim=1)
        with self._reading:
            return module.read_tree(cache, joined_BNE, [parents] * len(draft_BNE))

    def _joined(self, session: _Session, number: int, states_BPE: Tensor) -> Tensor:
        """What a module's layer reads at the next entries of the text."""
        starts = [length + number + 1 for length in session.caches[number].lengths]
        rows_B1, columns_BP = _slots(starts, states_BPE.shape[1], states_BPE.device)
        tokens_BP = session.tokens_BT[rows_B1, columns_BP.clamp(max=session.tokens_BT.shape[1] - 1)]
        return self.modules[number].joined(self._embed(tokens_BP, states_BPE), states_BPE)

    def _embed(self, tokens_BP: Tensor, like: Tensor) -> Tensor:
        if self._shipped.embedding_VE is not None:
            return F.embedding(tokens_BP, self._shipped.embedding_VE)
        embedded: Tensor = self._target.model.get_input_embeddings()(tokens_BP)
        return embedded.to(like)

    def _with_room(self, session: _Session, number: int, more: int) -> TreeCache:
        cache = session.caches[number]
        session.caches[number] = cache = cache.with_room(max(cache.lengths) + more, self.modules[number].new_cache)
        return cache
