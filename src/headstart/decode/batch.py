"""Batches whose rows come and go: `Batch.round` is one round.

Rows with equal options and drafters form a lane, which drafts and verifies together and has one budget. All lanes share
the KV cache and one forward of the target. Rows start in a batch of their own, and may then join another one.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from headstart.decode.drafting import Drafting
from headstart.decode.memory import reserve
from headstart.decode.options import DecodeOptions
from headstart.decode.prefix_cache import CachedText
from headstart.decode.sampling import token_logprobs, warp
from headstart.decode.texts import Check, Generation, OnTokens, Round
from headstart.decode.verify import make_verifier
from headstart.errors import out_of_memory
from headstart.model.model import Target, TargetOutput
from headstart.replay.cache import TreeCache
from headstart.replay.cuda_graphs import capture_count
from headstart.support.cores import FreeCores
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, union

_NO_ROOM = "memory ran out while drafting: shorten the prompt, or lower --max-new-tokens or the drafter's max_nodes"
DRAFTER_ERRORS: type[Exception] | tuple[()] = Exception
"""Exceptions that drop a drafter; decoding continues without it."""


@dataclass(eq=False)
class Row:
    """A text that is being decoded.

    Attributes:
        started: `perf_counter` at the call, from which the times of tokens count.
        number: passed to `on_tokens` and to `options.stop_test`.
        cached: the text that the target has read, if a later prompt may continue it.
        cancelled: whether the row leaves before the next round; set by any thread.
        left: whether the batch drops the row now.
        max_nodes: most nodes of a tree that memory has room for, root included.
    """

    prompt: Sequence[int]
    options: DecodeOptions
    started: float
    number: int = 0
    text: Generation = field(init=False)
    on_tokens: OnTokens | None = None
    cached: CachedText | None = None
    cancelled: bool = False
    left: bool = False
    max_nodes: int = 1

    def __post_init__(self) -> None:
        self.text = Generation(seed=None if self.options.greedy else self.options.seed)

    @property
    def ended(self) -> bool:
        return self.cancelled or bool(self.text.finish_reason)

    @property
    def tokens(self) -> list[int]:
        """Prompt and tokens so far."""
        return [*self.prompt, *self.text.tokens]

    def emit(self, target: Target, tokens: Sequence[int], logprobs: Sequence[dict[int, float]], now: float) -> None:
        """Append tokens of a round to the text; `logprobs` is empty if not requested."""
        text, before = self.text, len(self.text.tokens)
        text.extend(tokens, self.number, self.options, target)
        added = text.tokens[before:]
        text.token_ms += [1e3 * (now - self.started)] * len(added)
        text.logprobs += logprobs[: len(added)]
        if self.on_tokens is not None and added:
            self.on_tokens(self.number, added, min(len(added), len(tokens) - 1))


class Lane:
    """Rows with equal options and drafters.

    Args:
        check: see `Check`.
        serves: whether rows may join later, so that drafters read the text even while they pause.

    Attributes:
        places: each row's place in the batch, ascending.
        sessions: of the drafters still in use, by their index in the loop.
        roots: each row's newest token, which the target has not read yet.
    """

    roots: TreeBatch

    def __init__(self, loop: Drafting, rows: Sequence[Row], check: Check | None = None, serves: bool = False) -> None:
        self.loop, self.target, self.drafters = loop, loop.target, loop.drafters
        self.rows, self.options, self.check, self.serves = list(rows), rows[0].options, check, serves
        self.places: list[int] = list(range(len(rows)))
        self.budget = loop.budget([row.tokens for row in rows], self.options)
        self.verifier = make_verifier([row.options for row in rows], [row.prompt for row in rows], loop.target)
        self.verifier.resume([row.text.tokens for row in rows])
        drafts = self.options.draft != "off" if serves else self.budget.will_draft
        self.sessions = dict[int, Any].fromkeys(range(len(self.drafters)) if drafts else ())
        self._drafting = False
        self._logprobs: Sequence[Sequence[dict[int, float]]] = ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose states the drafters read, now or for a later prompt that continues a text."""
        keeps = any(row.cached is not None for row in self.rows)
        return self.loop.aux_layers(range(len(self.drafters)) if keeps else self.sessions)

    @property
    def max_nodes(self) -> int:
        return min(row.max_nodes for row in self.rows)

    def new_cache(self) -> TreeCache | None:
        """Create a cache for the rows; None if several do not fit into memory together."""
        drafters = [self.drafters[index] for index in self.sessions]
        max_nodes = 1 + sum(drafter.max_nodes - 1 for drafter in drafters)
        memory = (sum(getattr(one, name, 0) for one in drafters) for name in ("bytes_per_token", "spare_bytes"))
        prompts, longest = [row.prompt for row in self.rows], max(row.options.max_new_tokens for row in self.rows)
        max_nodes = reserve(self.target, prompts, longest, max_nodes, *memory)
        if not max_nodes:
            return None
        for row in self.rows:
            row.max_nodes = max_nodes
        cache = self.target.new_cache(len(self.rows), max(map(len, prompts)) + longest + max_nodes)
        if self.check is not None:
            cache.watch(self.check)
        return cache

    def begin(self, out: TargetOutput) -> None:
        """Emit the first tokens and start the drafters, after a prefill with the states of all tokens."""
        self.roots = TreeBatch.roots(self.verifier.first(out.logits_BTV[:, 0]), self.target.device)
        texts = [row.tokens for row in self.rows]
        for index in list(self.sessions):
            self._store(index, self.drafters[index].prefill, texts, out.aux_hidden_states)
        if (most_likely := self.options.logprobs) is not None:
            self._logprobs = token_logprobs(out.logits_BTV, self.roots.tokens_BN, most_likely)
        self._emit([[token] for token in self.roots.root_tokens])

    def accepts(self, other: Lane) -> bool:
        """Whether the rows of another lane can join this one. Deterministic rows share no budget."""
        alike = self.loop is other.loop and _shared(self.options) == _shared(other.options)
        alike = alike and not self.options.deterministic and type(self.verifier) is type(other.verifier)
        return alike and self.sessions.keys() == other.sessions.keys()

    def join(self, other: Lane) -> None:
        """Append the rows of another lane."""
        self.rows += other.rows
        self.places += other.places
        for index in list(self.sessions):
            self._store(index, self.drafters[index].join, self.sessions[index], other.sessions[index])
        self.verifier.join(other.verifier)  # type: ignore[arg-type]  # of the same type
        self.budget.join(other.budget)
        self.budget.plan(self.loop.experience(len(self.rows)))
        tokens_B = torch.cat([self.roots.root_B, other.roots.root_B])
        self.roots = TreeBatch.roots([*self.roots.root_tokens, *other.roots.root_tokens], on_device=tokens_B)

    def drop_ended(self, running: Sequence[int]) -> None:
        """Keep only the running rows; `running` are those of the whole batch, by their place before."""
        rows = [index for index, row in enumerate(self.rows) if not row.left]
        self.places = [place for place, before in enumerate(running) if before in self.places]
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[row] for row in rows]
        if not rows:
            return
        self.roots = TreeBatch.roots([self.roots.root_tokens[row] for row in rows], self.target.device)
        for part in (self.verifier, self.budget):
            part.reorder(rows)
        if self.serves:
            self.budget.plan(self.loop.experience(len(rows)))
        self._notify("reorder", rows)

    # -- one round ---------------------------------------------------------------------------------------------------

    def propose(self, deepest: int | None) -> TreeBatch:
        """Draft trees at most `deepest` deep; return the roots alone if no draft pays."""
        # Drafters get the node limit up front: cutting a sampled tree afterwards could depend on its tokens.
        max_nodes = self.max_nodes if deepest is None else min(self.max_nodes, deepest + 1)
        self._drafting = self.budget.drafts and max_nodes > 1 and bool(self.sessions)
        return self._draft(max_nodes) if self._drafting else self.roots

    def _draft(self, max_nodes: int) -> TreeBatch:
        """Merge the trees of all drafters and prune them; return the roots alone if no node pays.

        `reserve` (memory), `max_depth` (target) and `Budget.node_limit` cap the nodes of a row. Within these limits
        drafters leave out nodes below the thresholds; `Budget.prune` then chooses the nodes to verify.
        """
        request = Request(
            self.budget.node_limit(max_nodes),
            self.budget.threshold,
            self.budget.level_threshold,
            chain=self.target.chains_only,
            sample_drafts=self.verifier.samples_drafts,
            warp=partial(warp, self.options),
            generators=self.verifier.draft_generators,
            temperature=self.options.temperature,
            check=self.check,
        )
        trees = self.roots.trees
        for index in list(self.sessions):
            trees = self._call(index, self._merge, index, trees, request) or trees
            if any(tree.sampled for tree in trees):  # only one drafter may sample: one draft vocabulary per lane
                request = replace(request, sample_drafts=False)
        trees = self.budget.prune(trees)
        return TreeBatch.of(trees, self.target.device) if any(tree.size > 1 for tree in trees) else self.roots

    def _merge(self, index: int, trees: list[Tree], request: Request) -> list[Tree]:
        """Merge another drafter's trees into these."""
        earlier = trees if trees is not self.roots.trees else ()
        own_request = replace(request, earlier_trees=earlier)
        proposed = self.drafters[index].propose(self.sessions[index], self.roots, own_request)
        return [union(tree, other, request) for tree, other in zip(trees, proposed, strict=True)]

    def accept(self, batch: TreeBatch, out: TargetOutput) -> Committed:
        """Verify the lane's trees, and set the next roots."""
        committed, self.roots = self.verifier.accept(batch, out)
        if (most_likely := self.options.logprobs) is not None:
            self._logprobs = token_logprobs(committed.logits_BPV, committed.emitted_BP(self.roots), most_likely)
        return committed

    def commit(self, committed: Committed) -> None:
        """Pass the committed tokens to the texts that are kept, and to the drafters."""
        for index, row in enumerate(self.rows):
            if row.cached is not None:
                row.cached.append(committed, index)
        self._notify("commit", committed)

    def end_round(self, committed: Committed, draft_ms: float, lap: Lap) -> None:
        """Emit the tokens of a round, and record it in the budget."""
        emitted = [[*tokens[1:], root] for tokens, root in zip(committed.tokens, self.roots.root_tokens, strict=True)]
        self._emit(emitted)
        trees = committed.batch.trees
        paused = bool(self.drafters) and self.options.draft == "auto" and not self.budget.drafts
        spent_ms = (draft_ms, 1e3 * (lap.committed - lap.drafted)) if lap.timed else None
        self.budget.record(trees, list(map(len, emitted)), spent_ms, could_draft=self._drafting)
        if not (self.serves or self.budget.will_draft):
            self.sessions.clear()  # no overhead in the remaining plain rounds
        ms = (draft_ms, 1e3 * (lap.verified - lap.drafted), 1e3 * (perf_counter() - lap.verified))
        for row, tree, tokens in zip(self.rows, trees, emitted, strict=True):
            row.text.rounds.append(Round(tree.size, len(tokens), *ms, tree.depth, paused, tree.likeliest))

    def _emit(self, emitted: Sequence[Sequence[int]]) -> None:
        """Append tokens to the texts."""
        now = perf_counter()
        for row, tokens, logprobs in zip(self.rows, emitted, self._logprobs or [()] * len(emitted), strict=True):
            row.emit(self.target, tokens, logprobs, now)

    def _call(self, index: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call a drafter. If it raises, drop it and return None; but re-raise if memory runs out with several rows, so
        that the batch is split."""
        try:
            return work(*arguments)
        except DRAFTER_ERRORS as error:
            if len(self.rows) > 1 and out_of_memory(error):
                raise
            del self.sessions[index]
            message = _NO_ROOM if out_of_memory(error) else f"{type(error).__name__}: {error}"
            for row in self.rows:
                row.text.drafter_error = message

    def _store(self, index: int, work: Callable[..., Any], *arguments: Any) -> None:
        """Call a drafter for a new session."""
        session = self._call(index, work, *arguments)
        if index in self.sessions:
            self.sessions[index] = session

    def _notify(self, method: str, *arguments: Any) -> None:
        """Call a method of every drafter in use."""
        for index, session in list(self.sessions.items()):
            self._call(index, getattr(self.drafters[index], method), session, *arguments)


def _shared(options: DecodeOptions) -> DecodeOptions:
    """Return the options that the rows of a lane have in common."""
    return replace(
        options,
        max_new_tokens=max(1, options.min_new_tokens),
        seed=None,
        stop=(),
        ignore_end=False,
        stop_test=None,
        raw=False,
        tools=(),
        chat_template_kwargs=None,
        source="",
    )


@dataclass(frozen=True)
class Lap:
    """Readings of `perf_counter` in a round: after the drafts, after acceptance and after the commit. `timed`: whether
    the times say what such a round costs."""

    drafted: float
    verified: float
    committed: float
    timed: bool


class Batch:
    """Rows that share a KV cache and the target's forwards, in lanes."""

    def __init__(self, lane: Lane, cache: TreeCache, free_cores: FreeCores | None = None) -> None:
        self.target, self.lanes, self.cache, self._free_cores = lane.target, [lane], cache, free_cores

    @property
    def rows(self) -> list[Row]:
        return [row for lane in self.lanes for row in lane.rows]

    def join(self, other: Batch) -> None:
        """Append the rows of another batch, which has one lane."""
        before, (lane,) = self.cache.rows, other.lanes
        self.cache = self.cache.join(other.cache, self.target.new_cache, self._capacity(lane))
        lane.places = [before + place for place in lane.places]
        host = next((own for own in self.lanes if own.accepts(lane)), None)
        if host is None:
            self.lanes.append(lane)
        else:
            host.join(lane)

    def join_bytes(self, lane: Lane) -> int:
        """Bytes that a join of this lane's rows allocates."""
        capacity = self._capacity(lane)
        rows = self.cache.grown_rows(self.cache.rows + len(lane.rows), capacity)
        return rows * capacity * self.target.kv_bytes_per_token

    def _capacity(self, lane: Lane) -> int:
        """Tokens of the longest row after a join; the widest tree of any lane pads the others."""
        longest = max(len(row.prompt) + row.options.max_new_tokens for row in [*self.rows, *lane.rows])
        return longest + max(each.max_nodes for each in [*self.lanes, lane])

    def drop_ended(self, on_leave: Callable[[Row, int], None] | None = None) -> bool:
        """Drop ended rows from the cache and the lanes; return whether any row is left. `on_leave` gets each ended row
        with its place, before it is dropped."""
        running = []
        for row, place in [pair for lane in self.lanes for pair in zip(lane.rows, lane.places, strict=True)]:
            row.left = row.ended  # read once: another thread may cancel a row meanwhile
            if not row.left:
                running.append(place)
            elif on_leave is not None:
                on_leave(row, place)
        running.sort()
        if running and len(running) < self.cache.rows:
            self.cache.reorder(running)
            for lane in self.lanes:
                lane.drop_ended(running)
            self.lanes = [lane for lane in self.lanes if lane.rows]
        return bool(running)

    def round(self) -> None:
        """Draft, verify, commit and emit in every lane, and record the round in the budgets."""
        timers, captured_before = [perf_counter()], capture_count()
        deepest, parts = self.target.max_depth(self.cache), list[TreeBatch]()
        for lane in self.lanes:
            parts.append(lane.propose(deepest))
            timers.append(perf_counter())
        outs = self._forward(parts)
        committed = [lane.accept(part, out) for lane, part, out in zip(self.lanes, parts, outs, strict=True)]
        verified = perf_counter()
        self._commit(committed)
        for lane, of_lane in zip(self.lanes, committed, strict=True):
            lane.commit(of_lane)
        ended = perf_counter()
        timed = capture_count() == captured_before and len(self.lanes) == 1
        if self._free_cores is not None and self._free_cores.update():
            timed = False
            for lane in self.lanes:
                lane.budget.threads_changed()
        lap = Lap(timers[-1], verified, ended, timed)
        for lane, of_lane, (start, stop) in zip(self.lanes, committed, pairwise(timers), strict=True):
            lane.end_round(of_lane, 1e3 * (stop - start), lap)

    def _forward(self, parts: Sequence[TreeBatch]) -> list[TargetOutput]:
        """Run one forward over the trees of all lanes; return each lane's part of the output."""
        aux_layers = tuple(dict.fromkeys(layer for lane in self.lanes for layer in lane.aux_layers))
        if len(parts) == 1:
            return [self.target.forward_tree(self.cache, parts[0], aux_layers)]
        trees = self._by_place([part.trees for part in parts])
        out = self.target.forward_tree(self.cache, TreeBatch.of(trees, self.target.device), aux_layers)
        outs = []
        for lane, part in zip(self.lanes, parts, strict=True):
            rows_B = torch.tensor(lane.places, device=self.target.device)
            states = {layer: state_BTE[rows_B, : part.size] for layer, state_BTE in out.aux_hidden_states.items()}
            outs.append(TargetOutput(out.logits_BTV[rows_B, : part.size], states))
        return outs

    def _commit(self, committed: Sequence[Committed]) -> None:
        if len(committed) == 1:
            self.cache.commit(committed[0].paths, committed[0].paths_BP, committed[0].counts_B)
        else:
            self.cache.commit(self._by_place([of_lane.paths for of_lane in committed]))

    def _by_place(self, of_lanes: Sequence[Sequence[Any]]) -> list[Any]:
        """Merge lists with an entry for each row of each lane."""
        entries = {
            place: entry
            for lane, of_lane in zip(self.lanes, of_lanes, strict=True)
            for place, entry in zip(lane.places, of_lane, strict=True)
        }
        return [entries[place] for place in range(self.cache.rows)]
