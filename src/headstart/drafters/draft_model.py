"""Drafting with a smaller model of the same vocabulary, or with the target's own first layers (early exit).

Classic speculative decoding (arXiv 2211.17192, 2302.01318): the small model decodes a chain, the target verifies it.
The draft's own KV cache keeps accepted tokens; it prefills the rest of the text at its next draft.

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
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.support.rng import draw
from headstart.tree.tree import Committed, Drawn, Request, Tree, TreeBatch

_SPARE = 512  # tokens of text that the draft's cache takes before it grows


@dataclass
class _Session:
    """The draft's cache (row b holds the first `cache.lengths[b]` tokens of its text, after `propose` drafts too), the
    committed tokens of each row, and the drafts of the last proposal that the cache holds after the root."""

    cache: TreeCache
    texts: list[list[int]]
    read: list[list[int]]


class DraftModelDrafter:
    """Draft a chain of at most `draft_steps` with another language model, of the target's vocabulary.

    The acceptance probability of a draft is the product of the draft model's probabilities of its best tokens up to
    there. A chain ends where it falls below the request's threshold. That depends only on tokens before the last drawn
    one, so drawn chains stay lossless. On a GPU the host waits for each step, and for each row where drafts are drawn,
    so this suits CPUs and small batches.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, draft: Target, target: Target, draft_steps: int = 6) -> None:
        check_tokenizers(draft, target)
        if draft.chains_only:
            raise UserError(
                f"{draft.name} has layers with running states, which cannot forget what was rejected.",
                "Use a draft model with attention in all layers.",
            )
        draft.record()  # now, so that no first answer is delayed
        self.draft = draft
        self.draft_steps = draft_steps
        self.max_nodes = draft_steps + 1
        self.bytes_per_token = draft.kv_bytes_per_token
        # Chains end about half way on average.
        self.draft_share = (draft_steps + 1) / 2 * draft.parameters / target.parameters
        # Models pad their embeddings differently: only the tokens that both have can be drafted.
        self._width = min(draft.vocab_size, target.vocab_size)
        same = self._width == target.vocab_size
        self._draft_to_target_D = None if same else torch.arange(self._width, device=target.device)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> _Session:
        texts = [self._known(prompt) for prompt in prompts]
        cache = self.draft.new_cache(len(texts), max(map(len, texts)) + self.max_nodes + _SPARE)
        return _Session(cache, texts, [[] for _ in texts])

    def propose(self, session: _Session, roots: TreeBatch, request: Request) -> list[Tree]:
        longest = max(map(len, session.texts)) + 1
        steps = min(self.draft_steps, request.max_nodes - 1, self.draft.max_length - longest + 1)
        if steps < 1:
            return roots.trees
        session.cache.watch(request.check)
        chains = [Tree.chain_of([root], [1.0]) for root in roots.root_tokens]
        going = [True] * len(chains)
        for step in range(steps):
            if step == 0:
                logits_BV = self._read_text(session, roots.root_tokens)
            else:
                last = TreeBatch.roots([chain.tokens[-1] for chain in chains], self.draft.device)
                logits_BV = self.draft.forward_tree(session.cache, last).logits_BTV[:, 0]
                session.cache.commit([[0] if goes else [] for goes in going])
                for chain, read, goes in zip(chains, session.read, going, strict=True):
                    read.extend(chain.tokens[-1:] if goes else ())
            going = self._extend(chains, going, logits_BV[:, : self._width], request)
            if not any(going):
                break
        return chains

    def commit(self, session: _Session, committed: Committed) -> None:
        lengths = session.cache.lengths
        for row, tokens in enumerate(committed.tokens):
            before, kept = len(session.texts[row]), common_prefix_length([session.read[row], tokens[1:]])
            lengths[row] = min(lengths[row], before + 1 + kept)  # forget rejected tokens
            session.texts[row] += self._known(tokens)
            session.read[row] = []

    def reorder(self, session: _Session, rows: Sequence[int]) -> None:
        session.cache.reorder(rows)
        session.texts = [session.texts[row] for row in rows]
        session.read = [session.read[row] for row in rows]

    def _read_text(self, session: _Session, tokens: Sequence[int]) -> Tensor:
        """Prefill the tokens of each text that the cache lacks, and the root; logits [B, V] after the roots."""
        texts = zip(session.texts, session.cache.lengths, self._known(tokens), strict=True)
        rows = [[*text[length:], root] for text, length, root in texts]
        room = max(max(map(len, session.texts)) + self.max_nodes, max(session.cache.lengths) + max(map(len, rows)))
        session.cache = session.cache.with_room(room, self.draft.new_cache)
        session.read = [[] for _ in rows]
        if max(map(len, rows)) > 1:
            return self.draft.prefill(session.cache, rows).logits_BTV[:, 0]
        last = TreeBatch.roots([row[0] for row in rows], self.draft.device)
        logits_BTV = self.draft.forward_tree(session.cache, last).logits_BTV
        session.cache.commit([[0]] * len(rows))
        return logits_BTV[:, 0]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Clamp token ids to the draft's vocabulary, which may lack padding of the target's embeddings."""
        last = self.draft.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _extend(self, chains: list[Tree], going: list[bool], logits_BV: Tensor, request: Request) -> list[bool]:
        """Add one draft to each running chain, or end it; return which of them go on."""
        logits_BV = logits_BV.float()
        best_B = logits_BV.max(-1)
        probs = (best_B.values - logits_BV.logsumexp(-1)).exp().tolist()
        tokens = best_B.indices.tolist()
        for row, chain in enumerate(chains):
            assert chain.accept_probs is not None, "these chains know their probabilities"
            accept_prob = chain.accept_probs[-1] * probs[row]
            going[row] = going[row] and accept_prob >= request.threshold
            if not going[row]:
                continue
            node = chain.add(chain.size - 1, tokens[row], accept_prob)
            if request.draws and request.warp is not None:
                q_draft_D = request.warp(logits_BV[row])
                chain.tokens[node] = draw(q_draft_D, request.streams[row])
                chain.drawn[node] = Drawn(q_draft_D, self._draft_to_target_D)
        return going


def check_tokenizers(draft: Target, target: Target) -> None:
    """Refuse (UserError) a draft model with other token ids; only the padding of its embeddings may differ. Models
    without a tokenizer must have equal vocabulary sizes."""
    remedy = f"Use a draft model of the same family as {target.name}, with the same tokenizer."
    if draft.tokenizer is None or target.tokenizer is None:
        if draft.vocab_size != target.vocab_size:
            raise UserError(
                f"The draft model {draft.name} has {draft.vocab_size} tokens and {target.name} has "
                f"{target.vocab_size}.",
                remedy,
            )
        return
    drafts: dict[str, int] = draft.tokenizer.get_vocab()
    targets: dict[str, int] = target.tokenizer.get_vocab()
    if drafts != targets:
        differing = [token for token in drafts.keys() | targets.keys() if drafts.get(token) != targets.get(token)]
        token = min(differing, key=lambda token: (drafts.get(token, len(drafts)), token))
        raise UserError(
            f"The draft model {draft.name} has another tokenizer than {target.name}: token {token!r} is number "
            f"{drafts.get(token)} there and {targets.get(token)} here.",
            remedy,
        )


# -- early exit ------------------------------------------------------------------------------------------------------


def early_exit(target: Target, layers: int) -> Target:
    """Make a draft model of the target's first layers, final norm and LM head, which shares all of its weights.

    Only the modules on the path to the list of layers are copied, without their hooks. The target is not changed.
    """
    assert 1 <= layers <= target.num_layers, "the catalog asks for layers that exist"
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
