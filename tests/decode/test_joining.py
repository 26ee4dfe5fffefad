"""Rows that join a running batch get the drafts, logits and tokens that they get alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from headstart.decode.drafting import Drafter
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import warp
from headstart.decode.verify import make_verifier
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.memory import MemoryDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.eval.memoized import MemoizedTarget
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.tree.tree import Request, Tree, TreeBatch
from tests.drafters.helpers import heads_drafter, random_texts
from tests.heads.test_contract import CASES
from tests.replay.test_chains import hybrid
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model

TEXTS = random_texts(5, 17, 9, 3, 30, 7, vocab=12)
SPANS = [(0, 4), (2, 7), (4, 8), (5, 8), (5, 8), (7, 8)]
"""Rounds that each text takes part in. The second joins; the first leaves, and the third takes its place; two join
together; the last joins, and the second leaves before the next draft."""
DRAFTING = [True, False, True, True, True, False, True, True]
"""Rounds with drafts. After a plain round trained heads have several unread tokens."""
GREEDY = DecodeOptions(seed=0)
SAMPLED = DecodeOptions(
    seed=0,
    temperature=1.0,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    processors=(NoRepeatNGramLogitsProcessor(2),),
    min_new_tokens=3,
    stop_token_ids=(5,),
)
TEXT_DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "ngram": lambda _: NgramDrafter(),
    "memory": lambda target: remembering(target),
    "lookahead": lambda _: LookaheadDrafter(),
    "early-exit": lambda target: EarlyExitDrafter(target, 2),
}


def remembering(target: Target) -> MemoryDrafter:
    drafter = MemoryDrafter(target.vocab_size)
    drafter._index.add(random_texts(60, 40, 50, vocab=12))
    return drafter


@dataclass
class Row:
    """A text's drafted trees, emitted tokens, and logits after each root."""

    trees: list[Tree] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Batch:
    """Rows that are decoded together, round by round."""

    @torch.inference_mode()
    def __init__(self, target: Target, drafter: Drafter, numbers: Sequence[int], options: DecodeOptions) -> None:
        self.target, self.drafter, self.options = target, drafter, options
        texts = [TEXTS[number] for number in numbers]
        self.cache: Any = target.new_cache(len(texts), 160)
        out = target.prefill(self.cache, texts, drafter.aux_layers)
        self.verifier: Any = make_verifier([replace(options, seed=number) for number in numbers], texts, target)
        self.roots = TreeBatch.roots(self.verifier.first(out.logits_BTV[:, 0]), target.device)
        self.session = drafter.prefill(texts, out.aux_hidden_states)
        self.rows = [Row(tokens=[root]) for root in self.roots.root_tokens]

    @torch.inference_mode()
    def round(self, drafting: bool) -> None:
        request = Request(
            8,
            chain=self.target.chains_only,
            sample_drafts=self.verifier.samples_drafts,
            warp=partial(warp, self.options),
            generators=self.verifier.draft_generators,
            temperature=self.options.temperature,
        )
        batch = self.roots
        if drafting:
            trees = self.drafter.propose(self.session, self.roots, request)
            batch = TreeBatch.of(trees, self.target.device)
            for row, tree in zip(self.rows, trees, strict=True):
                row.trees.append(tree)
        out = self.target.forward_tree(self.cache, batch, self.drafter.aux_layers)
        for row, logits_NV in zip(self.rows, out.logits_BTV, strict=True):
            row.logits.append(logits_NV[0].cpu())
        committed, self.roots = self.verifier.accept(batch, out)
        self.cache.commit(committed.paths, committed.paths_BP, committed.counts_B)
        self.drafter.commit(self.session, committed)
        for row, tokens, root in zip(self.rows, committed.tokens, self.roots.root_tokens, strict=True):
            row.tokens += [*tokens[1:], root]

    @torch.inference_mode()
    def join(self, other: Batch) -> None:
        self.cache = self.cache.join(other.cache, self.target.new_cache)
        self.session = self.drafter.join(self.session, other.session)
        self.verifier.join(other.verifier)
        self.roots = TreeBatch.roots(self.roots.root_tokens + other.roots.root_tokens, self.target.device)
        self.rows = self.rows + other.rows

    @torch.inference_mode()
    def drop_first(self) -> None:
        """Drop the first row, which leaves NaN behind."""
        for store in stores(self.cache, self.session):
            store[0] = torch.nan
        kept = list(range(1, len(self.rows)))
        self.cache.reorder(kept)
        self.drafter.reorder(self.session, kept)
        self.verifier.reorder(kept)
        self.roots = TreeBatch.roots(self.roots.root_tokens[1:], self.target.device)
        for store in stores(self.cache, self.session):
            store[len(kept) :] = torch.nan
        self.rows = self.rows[1:]


def stores(cache: Any, session: Any) -> list[Tensor]:
    """Return the keys and values of the target and of the drafter, [B, ...]."""
    caches = [one for one in (cache, getattr(session, "cache", None)) if isinstance(one, TreeCache)]
    found = [part for one in caches for store in one.stores for part in store if part.is_floating_point()]
    return found + list(chain.from_iterable(getattr(getattr(session, "cache", None), "kv", ())))


def together(target: Target, drafter: Drafter, options: DecodeOptions) -> tuple[list[Row], Batch]:
    """Decode all texts as rows that come and go; return them and the batch."""
    batch = Batch(target, drafter, [0], options)
    rows = list(batch.rows)
    for number, drafting in enumerate(DRAFTING):
        if number == SPANS[0][1]:
            batch.drop_first()
        joining = [text for text, (start, _) in enumerate(SPANS) if start == number > 0]
        if joining:
            cache, memory = batch.cache, getattr(batch.session, "memory", None)
            other = Batch(target, drafter, joining, options)
            rows += other.rows
            batch.join(other)
            if number == SPANS[2][0]:
                assert batch.cache is cache, "the ended row's memory is used again"
                assert getattr(batch.session, "memory", None) is memory
        if number == SPANS[1][1]:
            batch.drop_first()
        batch.round(drafting)
    return rows, batch


def alone(target: Target, drafter: Drafter, number: int, options: DecodeOptions) -> Row:
    batch = Batch(target, drafter, [number], options)
    for drafting in DRAFTING[slice(*SPANS[number])]:
        batch.round(drafting)
    return batch.rows[0]


def assert_joined_equals_alone(
    target: Target, drafter: Drafter, options: DecodeOptions, own: tuple[Target, Drafter] | None = None
) -> Batch:
    """`own` decodes the rows alone; by default the same target and drafter."""
    rows, batch = together(target, drafter, options)
    assert any(tree.size > 1 for row in rows for tree in row.trees), "something was drafted"
    for number, row in enumerate(rows):
        expected = alone(*(own or (target, drafter)), number, options)
        assert row.tokens == expected.tokens
        # Float32 sums in other orders.
        torch.testing.assert_close(torch.stack(row.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
        for tree, same in zip(row.trees, expected.trees, strict=True):
            assert (tree.tokens, tree.parents, list(tree.sampled)) == (same.tokens, same.parents, list(same.sampled))
            assert (tree.accept_probs or []) == pytest.approx(same.accept_probs or [], rel=1e-3)
    return batch


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*CASES, *TEXT_DRAFTERS])
def test_rows_come_and_go(name: str, options: DecodeOptions, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.heads.parts.cache._SPARE", 2)
    monkeypatch.setattr("headstart.drafters.early_exit._SPARE", 2)
    make = TEXT_DRAFTERS.get(name)
    assert_joined_equals_alone(target, make(target) if make else heads_drafter(target, name), options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_with_a_running_state_come_and_go(options: DecodeOptions) -> None:
    target = Target(hybrid())
    for drafter in (NgramDrafter(), heads_drafter(target, "medusa")):
        assert_joined_equals_alone(target, drafter, options)


@pytest.mark.parametrize("name", ["eagle3", "dspark", "hydra", "early-exit"])
def test_rows_that_come_and_go_keep_their_graphs(name: str, device: StandIn) -> None:
    host, target = (Target(tiny_model("llama", vocab_size=61).to(where)) for where in ("cpu", CUDA))
    drafter, own = (
        EarlyExitDrafter(one, 2) if name == "early-exit" else heads_drafter(one, name, host) for one in (target, host)
    )
    batch = assert_joined_equals_alone(target, drafter, GREEDY, (host, own))
    assert batch.cache.memory is not None and batch.cache.memory.stores is batch.cache.stores
    if isinstance(drafter, HeadDrafter):
        session, graphs = batch.session, drafter._graphs
        assert drafter.forwards == "CUDA graphs" and session.memory.rows == 4 and graphs is not None
        if hasattr(session, "cache"):
            assert session.cache.kv[0][0].data_ptr() == session.memory.layer(0)[0].data_ptr()


def test_joined_caches_keep_their_check_and_use_all_their_memory(device: StandIn) -> None:
    target = Target(tiny_model("llama", vocab_size=61).to(CUDA))
    cache, other, third = (target.new_cache(1, capacity) for capacity in (20, 40, 40))
    for one in (cache, other, third):
        target.prefill(one, [TEXTS[0]])
    checks: list[None] = []
    cache.watch(lambda: checks.append(None))
    both = cache.join(other, target.new_cache)
    assert both is not cache and (both.rows, both.capacity) == (2, 40)
    target.forward_tree(both, TreeBatch.roots([3, 4], CUDA))
    assert len(checks) == 1
    cache.reorder([])
    assert cache.join(third, target.new_cache) is cache and cache.capacity == 40, (
        "its memory has more slots than it asked"
    )


def test_rows_of_memoised_targets_join(target: Target) -> None:
    view = MemoizedTarget(target)
    caches = [view.new_cache(count, 40) for count in (1, 2)]
    for cache in caches:
        view.prefill(cache, [[3, 1, 4]] * cache.rows)
        view.forward_tree(cache, TreeBatch.roots(list(range(cache.rows))))
        cache.commit([[0]] * cache.rows)
    joined = caches[0].join(caches[1], view.new_cache)
    assert joined.rows_B == [(0,), (0,), (1,)] and joined.lengths == [4] * 3
