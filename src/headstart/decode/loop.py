"""The decode loop: propose, verify with one tree forward, accept, commit.

`_Batch.round` is one round. `DecodeLoop.generate` checks the request and decodes all rows, in batches that fit
into memory. `Generation.extend` finds the end of a text. Verification is in `verify.py`. Plain decoding is the same
loop without a drafter.

Shape suffixes: B rows, T tokens, N tree nodes, P nodes of an accepted path, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from headstart.decode.budget import Budget, Costs
from headstart.decode.experience import Experience, size_of
from headstart.decode.memory import by_halves, reserve
from headstart.decode.options import DecodeOptions, check_kinds, random_seed
from headstart.decode.prefix_cache import PrefixCache
from headstart.decode.sampling import check_processors, check_sampling, token_logprobs, warp
from headstart.decode.verify import SAMPLES_DRAFTS, make_verifier
from headstart.errors import UserError, check_text, nearest, out_of_memory
from headstart.kernels import draft_kernels
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.replay.cuda_graphs import capture_count
from headstart.support.cores import FreeCores
from headstart.support.detokenizer import StopStrings
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, union

_NO_ROOM = "memory ran out while drafting: shorten the prompt, or lower --max-new-tokens or the drafter's max_nodes"
DRAFTER_ERRORS: type[Exception] | tuple[()] = Exception
"""A drafter that raises one of these is dropped, and decoding goes on without it."""


@dataclass
class Round:
    """Outcome and wall-clock milliseconds of one row's round.

    Nodes include the root, and `depth` is the tree's. Emitted tokens include the target's own, before any cut at the
    end of the text. `draft_ms` is proposing and pruning; `forward_ms` the tree forward and acceptance; `host_ms` the
    rest. `paused`: the budget skipped drafting in this round, since a draft would not pay or a plain round was to be
    timed; a round pruned to the root is not marked. `likeliest` is the tree's most likely path.
    """

    nodes: int
    emitted: int
    draft_ms: float
    forward_ms: float
    host_ms: float
    depth: int = 0
    paused: bool = False
    likeliest: Sequence[int] = ()


@dataclass
class Generation:
    """One row's output.

    Attributes:
        tokens: emitted token ids, without the prompt.
        finish_reason: "end", "length" or "stop"; empty while decoding.
        token_ms: milliseconds from the call to each token, prefill included.
        rounds: one entry per round; the first token comes from the prefill and has none.
        drafter_error: error of a drafter that failed; the rest of the row was decoded without it.
        seed: seed of a sampled row; None for a greedy one.
        logprobs: for each token, log-probabilities by token id, see `Answer`; empty without `options.logprobs`.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    token_ms: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    drafter_error: str | None = None
    seed: int | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    _stop_strings: StopStrings | None = field(default=None, repr=False, compare=False)

    @property
    def tokens_per_round(self) -> float:
        """τ: mean tokens per round, the target's own included; 1 for plain decoding."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else 1.0

    @property
    def paused_rounds(self) -> int:
        """Rounds in which the budget skipped drafting, see `Round`."""
        return sum(r.paused for r in self.rounds)

    def extend(self, tokens: Sequence[int], row: int, options: DecodeOptions, target: Target) -> None:
        """Append tokens up to the end of the text, which may fall inside an accepted path, and set `finish_reason`.
        `row` is passed to `options.stop_test`."""
        if options.stop_strings and self._stop_strings is None:
            self._stop_strings = StopStrings(target.tokenizer, options.stop_strings, target.markup)
        for token in tokens:
            self.tokens.append(token)
            stopped = options.stop_test is not None and options.stop_test(row, self.tokens)  # sees every token
            if token in target.end_tokens and not options.ignore_end:
                self.finish_reason = "end"
            elif (
                stopped
                or token in options.stop_token_ids
                or (self._stop_strings is not None and self._stop_strings.seen_after(token))
            ):
                self.finish_reason = "stop"
            elif len(self.tokens) == options.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return


OnTokens = Callable[[int, list[int], int], None]
"""Called every round with (row, new tokens, number of leading ones that were drafts)."""
Check = Callable[[], None]
"""Called before each forward, and before each chunk of a long prompt. To end the decoding it must raise a
`BaseException` outside `Exception`, since drafter errors are caught."""


# -- drafters --------------------------------------------------------------------------------------------------------


class Drafter(Protocol):
    """Interface of a drafter. One object serves many generations; `prefill` returns a session for the other methods.

    Attributes:
        aux_layers: layers of the target that provide its hidden states.
        max_nodes: maximum nodes it proposes, root included; the loop reserves KV cache for them.

    Optional attributes: `draft_share` is the cost of a draft as a fraction of a plain decoding step (default: the cost
    measured for the heads); `bytes_per_token` its memory on the target's device per token of a row, drafts included
    (default 0); `spare_bytes` the memory it holds there for its next text (default 0).
    """

    aux_layers: tuple[int, ...]
    max_nodes: int

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch; see `DraftHead.prefill`."""

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        """Propose a tree for each row, after its root."""

    def commit(self, session: Any, committed: Committed) -> None:
        """Process the committed tokens. Called every round, also without drafts."""

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def join(self, session: Any, other: Any) -> Any:
        """Append the rows of another session, and return the session of all rows. Between two rounds."""


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """Arguments, start time and texts so far of a call of `DecodeLoop.generate`."""

    prompts: Sequence[Sequence[int]]
    options: DecodeOptions
    on_tokens: OnTokens | None
    started: float
    texts: list[Generation]
    check: Check | None
    prefix_cache: PrefixCache | None


class DecodeLoop:
    """A target with its drafters; without drafters it decodes plainly.

    With several drafters the union of their trees is verified. Equal paths share nodes, so a second drafter costs only
    its further nodes. The first drafter has priority where acceptance probabilities do not decide.

    Without costs every proposed node is verified. With them the number of nodes follows the costs. With draft="auto"
    drafting pauses while it does not pay, and in greedy decoding measured rounds correct the costs for this and later
    calls. Sampling and deterministic decoding keep the given costs, so that the text depends neither on the clock nor
    on earlier calls; free memory may still cap the nodes.
    """

    def __init__(self, target: Target, *drafters: Drafter, costs: Costs | None = None) -> None:
        self.target = target
        self.drafters = drafters
        self.costs = costs
        self._experience: dict[int, Experience] = {}  # by the size of the batch
        self.free_cores = FreeCores() if target.device.type == "cpu" else None
        if target.device.type == "cpu":
            draft_kernels.compiled(target.dtype)  # so that the first answer does not compile

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: DecodeOptions,
        on_tokens: OnTokens | None = None,
        check_on: Check | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> list[Generation]:
        """Decode a batch of tokenised prompts of any lengths; a single prompt may come with a `prefix_cache`. Batches
        that do not fit into memory are decoded in halves; each row keeps its number and seed.

        Raises:
            UserError: an empty or too long prompt, an option out of range, or a prompt that memory cannot hold.
        """
        started = perf_counter()
        check(self.target, prompts, options)
        seed = random_seed() if options.seed is None else options.seed
        options = replace(options, seed=seed)
        texts = [Generation(seed=None if options.greedy else seed + row) for row in range(len(prompts))]
        call = _Call(prompts, options, on_tokens, started, texts, check_on, prefix_cache)
        if len(prompts) > 1:  # fail before decoding any prompt if one can never fit
            reserve(self.target, [max(prompts, key=len)], options.max_new_tokens, 1)
        try:
            with self.free_cores.limited() if self.free_cores else nullcontext():
                by_halves(range(len(prompts)), partial(self._decode, call))
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"Decoding a single prompt takes more memory than {self.target.device} has beside {self.target.name}.",
                "Shorten the prompt, or lower --max-new-tokens.",
            ) from error
        return call.texts

    def _decode(self, call: _Call, rows: Sequence[int]) -> bool:
        """Decode these rows from their tokens so far to their ends; return False, with nothing done, if they do not fit
        into memory together."""
        rows = [row for row in rows if not call.texts[row].finish_reason]
        if not rows:
            return True
        batch = _Batch(self, call, rows)
        if not batch.prefill():
            return False
        while batch.running:
            batch.round()
        if call.prefix_cache is not None:
            call.prefix_cache.store(batch.cache)
        return True

    def aux_layers(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Collect the aux layers of these drafters, without duplicates."""
        return tuple(dict.fromkeys(layer for index in indices for layer in self.drafters[index].aux_layers))

    def budget(self, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> Budget:
        """Create the budget of a batch, with this loop's costs and experience."""
        shares = [getattr(drafter, "draft_share", None) for drafter in self.drafters]
        known = [share for share in shares if share is not None]
        draft_ms = None
        if self.costs is not None and known and len(known) == len(shares):
            draft_ms = sum(known) * self.costs.verify(1)
        learns = options.greedy and not options.deterministic
        experience = self._experience.setdefault(size_of(len(prompts)), Experience()) if learns else None
        return Budget(
            self.costs,
            options.draft,
            len(prompts),
            limit=options.max_new_tokens,
            draft_ms=draft_ms,
            prompt=max(map(len, prompts)),
            experience=experience,
        )


class _Batch:
    """Rows that are decoded together.

    Attributes:
        rows: numbers of the rows of this round.
        running: indices into `rows` of texts that have not ended.
        sessions: of the drafters still in use, by their index in the loop.
        roots: each row's newest token, which the target has not read yet.
    """

    cache: TreeCache
    roots: TreeBatch
    running: list[int]

    def __init__(self, loop: DecodeLoop, call: _Call, rows: list[int]) -> None:
        self.loop, self.call, self.rows = loop, call, rows
        self.target, self.options, self.drafters = loop.target, call.options, loop.drafters
        self.prompts = [[*call.prompts[row], *call.texts[row].tokens] for row in rows]
        self.budget = loop.budget(self.prompts, call.options)
        self.verifier = make_verifier(call.options, call.prompts, loop.target)
        self.verifier.reorder(rows)
        self.verifier.resume([call.texts[row].tokens for row in rows])
        self.sessions = dict[int, Any].fromkeys(range(len(self.drafters)) if self.budget.will_draft else ())

    def prefill(self) -> bool:
        """Read the prompts and emit the first tokens; return False if the batch does not fit into memory."""
        target, call, options = self.target, self.call, self.options
        drafters = [self.drafters[index] for index in self.sessions]
        max_nodes = 1 + sum(drafter.max_nodes - 1 for drafter in drafters)
        memory = (sum(getattr(one, name, 0) for one in drafters) for name in ("bytes_per_token", "spare_bytes"))
        full_prompts = [call.prompts[row] for row in self.rows]
        self.max_nodes = reserve(target, full_prompts, options.max_new_tokens, max_nodes, *memory)
        if not self.max_nodes:
            return False
        longest = max(map(len, self.prompts))
        self.cache = target.new_cache(len(self.prompts), longest + options.max_new_tokens + self.max_nodes)
        if call.check is not None:
            self.cache.watch(call.check)
        if call.prefix_cache is None:
            out = target.prefill(self.cache, self.prompts, self.loop.aux_layers(self.sessions))
        else:
            (prompt,) = self.prompts
            # The next answer may draft, even if this one does not.
            out = call.prefix_cache.prefill(target, self.cache, prompt, self.loop.aux_layers(range(len(self.drafters))))
        self.roots = TreeBatch.roots(self.verifier.first(out.logits_BTV[:, 0]), target.device)
        for index in list(self.sessions):
            session = self.call_guarded(index, self.drafters[index].prefill, self.prompts, out.aux_hidden_states)
            if index in self.sessions:
                self.sessions[index] = session
        logprobs = []
        if options.logprobs is not None:
            logprobs = token_logprobs(out.logits_BTV, self.roots.tokens_BN, options.logprobs)
        del out  # the states of a long prompt take much memory
        self.emit([[token] for token in self.roots.root_tokens], logprobs)
        return True

    def round(self) -> None:
        """Draft, verify, commit and emit, and enter the round into the budget."""
        if len(self.running) < len(self.rows):
            self.drop_ended_rows()
        start, captured_before = perf_counter(), capture_count()
        # Drafters get the node limit up front: cutting a sampled tree afterwards could depend on its tokens.
        deepest = self.target.max_depth(self.cache)
        max_nodes = self.max_nodes if deepest is None else min(self.max_nodes, deepest + 1)
        drafting = self.budget.drafts and max_nodes > 1 and bool(self.sessions)
        batch = self.draft(max_nodes) if drafting else self.roots
        drafted = perf_counter()
        aux_readers = self.sessions if self.call.prefix_cache is None else range(len(self.drafters))
        out = self.target.forward_tree(self.cache, batch, self.loop.aux_layers(aux_readers))
        committed, self.roots = self.verifier.accept(batch, out)
        logprobs = []
        if (most_likely := self.options.logprobs) is not None:
            logprobs = token_logprobs(committed.logits_BPV, committed.emitted_BP(self.roots), most_likely)
        verified = perf_counter()
        self.cache.commit(committed.paths, committed.paths_BP, committed.counts_B)
        if self.call.prefix_cache is not None:
            self.call.prefix_cache.append(committed)
        self.notify("commit", committed)
        ended = perf_counter()
        emitted = [[*tokens[1:], root] for tokens, root in zip(committed.tokens, self.roots.root_tokens, strict=True)]
        self.emit(emitted, logprobs)
        paused = bool(self.drafters) and self.options.draft == "auto" and not self.budget.drafts
        timed = capture_count() == captured_before
        if self.loop.free_cores is not None and self.loop.free_cores.update():
            self.budget.threads_changed()
            timed = False
        spent_ms = (1e3 * (drafted - start), 1e3 * (ended - drafted)) if timed else None
        self.budget.record(batch.trees, list(map(len, emitted)), spent_ms, could_draft=drafting)
        if not self.budget.will_draft:
            self.sessions.clear()  # no overhead in the remaining plain rounds
        ms = (1e3 * (drafted - start), 1e3 * (verified - drafted), 1e3 * (perf_counter() - verified))
        for row, tree, tokens in zip(self.rows, batch.trees, emitted, strict=True):
            self.call.texts[row].rounds.append(Round(tree.size, len(tokens), *ms, tree.depth, paused, tree.likeliest))

    def draft(self, max_nodes: int) -> TreeBatch:
        """Merge the trees of all drafters and prune them; return the roots alone if no node pays.

        `reserve` (memory), `max_depth` (target) and `Budget.node_limit` cap the nodes of a row. Within these
        limits drafters leave out nodes below the thresholds; `Budget.prune` then chooses the nodes to verify.
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
            check=self.call.check,
        )
        trees = self.roots.trees
        for index in list(self.sessions):
            trees = self.call_guarded(index, self._merge, index, trees, request) or trees
            if any(tree.sampled for tree in trees):  # only one drafter may sample: one draft vocabulary a batch
                request = replace(request, sample_drafts=False)
        trees = self.budget.prune(trees)
        return TreeBatch.of(trees, self.target.device) if any(tree.size > 1 for tree in trees) else self.roots

    def _merge(self, index: int, trees: list[Tree], request: Request) -> list[Tree]:
        """Merge another drafter's trees into these."""
        earlier = trees if trees is not self.roots.trees else ()
        own_request = replace(request, earlier_trees=earlier)
        proposed = self.drafters[index].propose(self.sessions[index], self.roots, own_request)
        return [union(tree, other, request) for tree, other in zip(trees, proposed, strict=True)]

    def emit(self, emitted: Sequence[Sequence[int]], logprobs: Sequence[Sequence[dict[int, float]]]) -> None:
        """Append to the texts of the running rows, and set `running`. `logprobs` is empty if not asked for."""
        call = self.call
        now_ms = 1e3 * (perf_counter() - call.started)
        for index, (row, tokens) in enumerate(zip(self.rows, emitted, strict=True)):
            text, before = call.texts[row], len(call.texts[row].tokens)
            text.extend(tokens, row, self.options, self.target)
            added = text.tokens[before:]
            text.token_ms += [now_ms] * len(added)
            text.logprobs += logprobs[index][: len(added)] if logprobs else []
            if call.on_tokens is not None and added:
                call.on_tokens(row, added, min(len(added), len(tokens) - 1))
        self.running = [index for index, row in enumerate(self.rows) if not call.texts[row].finish_reason]

    def drop_ended_rows(self) -> None:
        """Keep only the running rows, everywhere."""
        self.rows = [self.rows[index] for index in self.running]
        self.roots = TreeBatch.roots([self.roots.root_tokens[index] for index in self.running], self.target.device)
        for part in (self.cache, self.verifier, self.budget):
            part.reorder(self.running)
        self.notify("reorder", self.running)

    def call_guarded(self, index: int, work: Callable[..., Any], *arguments: Any) -> Any:
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
                self.call.texts[row].drafter_error = message

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method of every drafter in use."""
        for index, session in list(self.sessions.items()):
            self.call_guarded(index, getattr(self.drafters[index], method), session, *arguments)


# -- before the loop ---------------------------------------------------------------------------------------------------


def check_options(options: DecodeOptions, rows: int = 1) -> None:
    """Refuse (UserError) options that no target could decode with; needs no loaded target."""
    check_kinds(options)
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {options.max_new_tokens}.", "Ask for at least 1 token.")
    if options.logprobs is not None and options.logprobs < 0:
        raise UserError(f"logprobs is {options.logprobs}.", "Use the number of most likely tokens to add, or 0.")
    if options.min_new_tokens < 0:
        raise UserError(f"min_new_tokens is {options.min_new_tokens}.", "Use 0 for none, or a number of tokens.")
    if options.min_new_tokens > options.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {options.min_new_tokens}, and max_new_tokens {options.max_new_tokens}.",
            "Raise --max-new-tokens, or lower --min-new-tokens.",
        )
    check_sampling(options)
    if options.verifier != "auto" and options.verifier not in SAMPLES_DRAFTS:
        raise UserError(f"Unknown verifier {options.verifier!r}.", nearest(options.verifier, ["auto", *SAMPLES_DRAFTS]))
    if options.draft not in ("auto", "on", "off"):
        raise UserError(f"draft is {options.draft!r}.", "Use auto, on or off.")
    if not all(options.stop_strings):
        raise UserError("A stop string is empty.", "Leave it out.")
    for stop in options.stop_strings:
        check_text(stop, "A stop string")
    if options.seed is not None and not -(1 << 63) <= options.seed <= (1 << 63) - max(rows, 1):
        raise UserError(
            f"seed is {options.seed}.", f"Use a number from -2^63 to 2^63 - {max(rows, 1)}; row b uses seed + b."
        )


def check(target: Target, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Refuse (UserError) prompts and options that the target cannot decode, before any work."""
    check_options(options, len(prompts))
    check_processors(options, target.vocab_size, target.device)
    for name, ids in (("stop_token_ids", options.stop_token_ids), ("logit_bias", options.logit_bias or ())):
        if unknown := [token for token in ids if not 0 <= token < target.vocab_size]:
            raise UserError(
                f"{name} has {unknown[0]}, and the target's token ids end at {target.vocab_size - 1}.",
                "Use its own ids.",
            )
    if options.stop_strings and target.tokenizer is None:
        raise UserError("Stop strings need a tokenizer.", "Load the target with its tokenizer.")
    if not prompts:
        raise UserError("There is no prompt.", "Give at least one prompt.")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"Prompt {number} is empty.", "Give each prompt at least one token.")
        if len(prompt) + options.max_new_tokens > target.max_length:
            which = "The prompt" if len(prompts) == 1 else f"Prompt {number}"
            raise UserError(
                f"{which} ({len(prompt)} tokens) plus {options.max_new_tokens} new tokens exceeds {target.name}'s "
                f"context of {target.max_length}.",
                "Shorten the prompt, or lower --max-new-tokens.",
            )
