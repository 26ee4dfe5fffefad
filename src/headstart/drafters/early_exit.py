"""Drafting with the target's own first layers (early exit).

Classic speculative decoding (arXiv 2211.17192, 2302.01318): the first layers, the final norm and the LM head decode a
chain, and the target verifies it. They have a KV cache of their own, which keeps accepted tokens; the rest of the text
is prefilled at the next draft.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.decode.prefix_cache import common_prefix_length
from headstart.errors import UserError
from headstart.model.model import Target, group_by_length
from headstart.replay.cache import TreeCache
from headstart.support.rng import draw
from headstart.tree.tree import Committed, DraftDistribution, Request, Tree, TreeBatch

_SPARE = 512
"""Spare tokens of a new cache beyond the longest prompt."""


@dataclass
class _Session:
    """A batch of texts and the KV cache of their first tokens.

    Attributes:
        cache: of row b, the first `cache.lengths[b]` tokens, which include drafts between `propose` and `commit`.
        texts: committed tokens of each row.
        cached_drafts: drafts of each row that the cache holds after the root.
    """

    cache: TreeCache
    texts: list[list[int]]
    cached_drafts: list[list[int]]


class EarlyExitDrafter:
    """Drafter of chains of at most `draft_steps`, with the target's first `layers`.

    A draft's acceptance probability is the product of the probabilities of the best tokens up to it. A chain ends where
    that product falls below the request's threshold. The product never depends on the last sampled token, so sampled
    chains stay lossless. On a GPU the host waits for each step, and for each row if drafts are sampled.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, target: Target, layers: int, draft_steps: int = 6) -> None:
        self.first_layers = first_layers(target, layers)
        if self.first_layers.chains_only:
            raise UserError(
                f"{target.name} has layers with a running state, which cannot drop rejected drafts.",
                "Use another drafter than early-exit.",
            )
        self.first_layers.record()  # now, so that no first answer is delayed
        self.draft_steps = draft_steps
        self.max_nodes = draft_steps + 1
        self.bytes_per_token = self.first_layers.kv_bytes_per_token
        # Chains end about half way on average.
        self.draft_share = (draft_steps + 1) / 2 * self.first_layers.parameters / target.parameters

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> _Session:
        cache = self.first_layers.new_cache(len(prompts), max(map(len, prompts)) + self.max_nodes + _SPARE)
        return _Session(cache, [list(prompt) for prompt in prompts], [[] for _ in prompts])

    def propose(self, session: _Session, roots: TreeBatch, request: Request) -> list[Tree]:
        longest = max(map(len, session.texts)) + 1
        steps = min(self.draft_steps, request.max_nodes - 1, self.first_layers.max_length - longest + 1)
        if steps < 1:
            return roots.trees
        session.cache.watch(request.check)
        chains = [Tree.chain_of([root], [1.0]) for root in roots.root_tokens]
        running = [True] * len(chains)
        for step in range(steps):
            if step == 0:
                logits_BV = self._read_text(session, roots.root_tokens)
            else:
                logits_BV = self._step(session, [chain.tokens[-1] for chain in chains], running)
                for chain, cached, runs in zip(chains, session.cached_drafts, running, strict=True):
                    cached.extend(chain.tokens[-1:] if runs else ())
            running = _extend(chains, running, logits_BV, request)
            if not any(running):
                break
        return chains

    def commit(self, session: _Session, committed: Committed) -> None:
        lengths = session.cache.lengths
        for row, tokens in enumerate(committed.tokens):
            accepted = common_prefix_length([session.cached_drafts[row], tokens[1:]])
            lengths[row] = min(lengths[row], len(session.texts[row]) + 1 + accepted)  # drop rejected drafts
            session.texts[row] += tokens
            session.cached_drafts[row] = []

    def reorder(self, session: _Session, rows: Sequence[int]) -> None:
        session.cache.reorder(rows)
        session.texts = [session.texts[row] for row in rows]
        session.cached_drafts = [session.cached_drafts[row] for row in rows]

    def join(self, session: _Session, other: _Session) -> _Session:
        cache = session.cache.join(other.cache, self.first_layers.new_cache)
        return _Session(cache, session.texts + other.texts, session.cached_drafts + other.cached_drafts)

    def _read_text(self, session: _Session, roots: Sequence[int]) -> Tensor:
        """Prefill the uncached tokens of each text and the root; return the logits [B, V] after the roots."""
        texts = zip(session.texts, session.cache.lengths, roots, strict=True)
        rows = [[*text[length:], root] for text, length, root in texts]
        room = max(max(map(len, session.texts)) + self.max_nodes, max(session.cache.lengths) + max(map(len, rows)))
        session.cache = session.cache.with_room(room, self.first_layers.new_cache)
        session.cached_drafts = [[] for _ in rows]
        counts, logits = list(map(len, rows)), []
        if max(counts) == 1:
            return self._step(session, roots, [True] * len(rows))
        for start, stop in group_by_length(counts):  # a row that has just joined reads its prompt alone
            part = session.cache.slice_rows(start, stop)
            logits.append(self.first_layers.prefill(part, rows[start:stop]).logits_BTV[:, 0])
            session.cache.lengths[start:stop] = part.lengths
        return torch.cat(logits)

    def _step(self, session: _Session, tokens: Sequence[int], running: Sequence[bool]) -> Tensor:
        """Read a token per row, and keep it in the cache of running rows; return the logits [B, V] after it."""
        batch = TreeBatch.roots(tokens, self.first_layers.device)
        logits_BTV = self.first_layers.forward_tree(session.cache, batch).logits_BTV
        session.cache.commit([[0] if runs else [] for runs in running])
        return logits_BTV[:, 0]


def _extend(chains: list[Tree], running: list[bool], logits_BV: Tensor, request: Request) -> list[bool]:
    """Add a draft to each running chain, or end it; return which chains still run."""
    logits_BV = logits_BV.float()
    best_B = logits_BV.max(-1)
    probs = (best_B.values - logits_BV.logsumexp(-1)).exp().tolist()
    tokens = best_B.indices.tolist()
    for row, chain in enumerate(chains):
        assert chain.accept_probs is not None, "these chains know their probabilities"
        accept_prob = chain.accept_probs[-1] * probs[row]
        running[row] = running[row] and accept_prob >= request.threshold
        if not running[row]:
            continue
        node = chain.add(chain.size - 1, tokens[row], accept_prob)
        if request.sample_drafts and request.warp is not None:
            q_draft_V = request.warp(logits_BV[row])
            chain.tokens[node] = draw(q_draft_V, request.generators[row])
            chain.sampled[node] = DraftDistribution(q_draft_V)
    return running


def first_layers(target: Target, layers: int) -> Target:
    """Make a model of the target's first layers, final norm and LM head that shares the target's weights.

    Only the modules on the path to the list of layers are copied, without their hooks. The target is not changed.
    """
    assert 1 <= layers <= target.num_layers, "the catalog checks the number of layers"
    model = target.model
    copied = [name for name, module in model.named_modules() if any(part is target.layers for part in module.modules())]
    memo: dict[int, Any] = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    memo |= {id(module): module for name, module in model.named_modules() if name not in copied}
    for name in copied:
        module = model.get_submodule(name)
        memo |= {id(module._forward_hooks): OrderedDict(), id(module._forward_pre_hooks): OrderedDict()}
    short = copy.deepcopy(model, memo)
    for name in copied:
        if (config := getattr(short.get_submodule(name), "config", None)) is not None:
            text_config = config.get_text_config()
            text_config.num_hidden_layers = layers
            if getattr(text_config, "layer_types", None) is not None:
                text_config.layer_types = list(text_config.layer_types[:layers])
    del short.get_submodule(copied[-1])[layers:]  # the list of layers itself is the innermost
    return Target(short, target.tokenizer, f"{target.name} ({layers} of {target.num_layers} layers)", "tokens")
