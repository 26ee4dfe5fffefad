"""The decode loop: propose, verify with one tree forward, accept, commit.

`DecodeLoop._decode` is the loop; `generate` checks the request and calls it with the rows that fit into memory. The
file also defines the `Drafter` protocol, greedy verification (`Verifier`; sampling is in `verify.py`) and the end of a
text (`Generation.extend`). Plain decoding is the same loop without a drafter.

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
from transformers import MinNewTokensLengthLogitsProcessor

from headstart.decode.budget import Budget, Costs
from headstart.decode.kept_text import KeptText
from headstart.decode.learned import Experience, size_of
from headstart.decode.memory import by_halves, reserve
from headstart.decode.options import DecodeOptions, Processor, check_kinds, random_seed
from headstart.decode.sampling import check_processors, check_sampling, warp
from headstart.decode.verify import DRAWS, SamplingVerifier, decided_on_device
from headstart.errors import UserError, check_text, nearest, out_of_memory
from headstart.kernels import draft_kernels
from headstart.model.model import Target, TargetOutput
from headstart.replay.graphs import captured
from headstart.support.cores import FreeCores
from headstart.support.detokenizer import StopStrings
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, decided, union

_NO_ROOM = "memory ran out while drafting: shorten the prompt, or lower --max-new-tokens or the drafter's max_nodes"
CAUGHT: type[Exception] | tuple[()] = Exception
"""Exceptions of a drafter that do not end the text."""


@dataclass
class Round:
    """Outcome and wall-clock milliseconds of one round of one generation.

    Nodes include the root, and `depth` is the tree's. Emitted tokens include the target's own, before any cut at the
    end of the text. `draft_ms` is proposing and pruning; `verify_ms` the tree forward and reading the target's choices;
    `host_ms` the rest. `paused`: nothing was drafted because it would not have paid. `likeliest` is the tree's most
    likely path.
    """

    nodes: int
    emitted: int
    draft_ms: float
    verify_ms: float
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
        token_ms: for each token, milliseconds from the call until it was decided, prefill included.
        rounds: one entry per round; the first token comes from the prefill and has none.
        drafter_error: the error of a drafter that failed; the row was decoded without it from then on.
        seed: seed of a sampled row; None for a greedy one.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    token_ms: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    drafter_error: str | None = None
    seed: int | None = None
    _stop_strings: StopStrings | None = field(default=None, repr=False, compare=False)

    @property
    def tokens_per_round(self) -> float:
        """τ: mean tokens emitted a round, the target's own included; 1 for plain decoding."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else 1.0

    @property
    def paused_rounds(self) -> int:
        """Rounds without drafts because they would not have paid."""
        return sum(r.paused for r in self.rounds)

    def extend(self, tokens: Sequence[int], row: int, options: DecodeOptions, target: Target) -> None:
        """Append tokens up to the end of the text, also within an accepted path, and set `finish_reason` there. `row`
        is passed to the caller's own test."""
        if options.stop_strings and self._stop_strings is None:
            self._stop_strings = StopStrings(target.tokenizer, options.stop_strings, target.markup)
        for token in tokens:
            self.tokens.append(token)
            # The caller's test sees every token of the text.
            stopped = options.stop_test is not None and options.stop_test(row, self.tokens)
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
"""Called with (row, new tokens, number of leading ones that were drafts) as soon as they are decided."""
Check = Callable[[], None]
"""Called before each forward, also of a piece of a long prompt. To end the decoding it raises a `BaseException` that is
no `Exception`, since drafter errors are caught."""


# -- drafters --------------------------------------------------------------------------------------------------------


class Drafter(Protocol):
    """Interface of a drafter. One object serves many generations; `prefill` returns a session for the other methods.

    Attributes:
        aux_layers: layers of the target that provide its hidden states.
        max_nodes: the widest tree it proposes, root included; the loop reserves cache for it.

    Optional attributes: `draft_share` is the cost of a draft as a share of a plain decoding step (default: the cost
    measured for the heads); `bytes_per_token` the memory it keeps on the target's device per token of a row, drafts
    included (default 0); `spare_bytes` the memory it holds there for its next text (default 0).
    """

    aux_layers: tuple[int, ...]
    max_nodes: int

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch; see `DraftHead.prefill`."""

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        """A tree for each row, after its root."""

    def commit(self, session: Any, committed: Committed) -> None:
        """Take in the committed tokens. Called every round, also without drafts."""

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call of `DecodeLoop.generate`: its arguments, its start and each row's text so far."""

    prompts: Sequence[Sequence[int]]
    options: DecodeOptions
    on_tokens: OnTokens | None
    started: float
    texts: list[Generation]
    check: Check | None
    kept_text: KeptText | None


class DecodeLoop:
    """Decodes with a target and its drafters; without drafters, plainly.

    With several drafters the union of their trees is verified. Tokens that two propose after the same path become one
    node, so the second costs only what it adds. The first drafter has priority where acceptance probabilities do not
    decide.

    Without costs every proposed node is verified. With them the number of nodes follows the costs, and drafting pauses
    where it does not pay. In greedy decoding, measured rounds correct the costs, and later calls use what was learned;
    sampling and deterministic decoding keep to the given costs, so that the text depends neither on the clock nor on
    earlier calls.
    """

    def __init__(self, target: Target, *drafters: Drafter, costs: Costs | None = None) -> None:
        self.target = target
        self.drafters = drafters
        self.costs = costs
        self._experience: dict[int, Experience] = {}  # by the size of the batch
        self.free_cores = FreeCores() if target.device.type == "cpu" else None
        if target.device.type == "cpu":
            draft_kernels.compiled(target.dtype)  # now, so that no first answer is delayed

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: DecodeOptions,
        on_tokens: OnTokens | None = None,
        check_on: Check | None = None,
        kept_text: KeptText | None = None,
    ) -> list[Generation]:
        """Decode a batch of tokenised prompts of any lengths; `kept_text` spares a single one its known beginning.
        Batches that do not fit into memory are decoded in halves; each row keeps its number and seed.

        Raises:
            UserError: an empty or too long prompt, an option out of range, or a prompt that memory cannot hold.
        """
        started = perf_counter()
        check(self.target, prompts, options)
        # Drawn once, also if rows are decoded in halves.
        first = random_seed() if options.seed is None else options.seed
        options = replace(options, seed=first)
        texts = [Generation(seed=None if options.greedy else first + row) for row in range(len(prompts))]
        call = _Call(prompts, options, on_tokens, started, texts, check_on, kept_text)
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

    def _decode(self, call: _Call, numbers: Sequence[int]) -> bool:
        """Decode these rows to their ends, after their tokens so far; false, with nothing done, if they do not fit into
        memory together."""
        target, options, texts, on_tokens = self.target, call.options, call.texts, call.on_tokens
        rows = [row for row in numbers if not texts[row].finish_reason]  # those still running
        if not rows:
            return True
        prompts = [[*call.prompts[row], *texts[row].tokens] for row in rows]
        budget, verifier = self._budget(prompts, options), make_verifier(options, call.prompts, target)
        verifier.reorder(rows)
        verifier.go_on_from([texts[row].tokens for row in rows])
        # Sessions of the drafters still in use, by their number.
        sessions = dict[int, Any].fromkeys(range(len(self.drafters)) if budget.will_draft else ())

        def ask(number: int, work: Callable[..., Any], *arguments: Any) -> Any:
            """Call a drafter. One that raises is dropped, and the text goes on without it."""
            try:
                return work(*arguments)
            except CAUGHT as error:
                if len(rows) > 1 and out_of_memory(error):
                    raise
                del sessions[number]
                for row in rows:
                    texts[row].drafter_error = _NO_ROOM if out_of_memory(error) else f"{type(error).__name__}: {error}"

        def tell(method: str, *arguments: Any) -> None:
            for number, session in list(sessions.items()):
                ask(number, getattr(self.drafters[number], method), session, *arguments)

        def joined(number: int, trees: list[Tree], request: Request) -> list[Tree]:
            beside = trees if trees is not roots.trees else ()
            proposed = self.drafters[number].propose(sessions[number], roots, replace(request, beside=beside))
            return [union(tree, other, request) for tree, other in zip(trees, proposed, strict=True)]

        def propose(request: Request) -> list[Tree]:
            trees = roots.trees
            for number in list(sessions):
                trees = ask(number, joined, number, trees, request) or trees
                if any(tree.drawn for tree in trees):  # one drawn child a node, one draft vocabulary a batch
                    request = replace(request, draws=False)
            return trees

        def emit(emitted: Sequence[Sequence[int]]) -> list[int]:
            """Add to the texts of the running rows; return the indices of rows that go on."""
            now_ms = 1e3 * (perf_counter() - call.started)
            for row, tokens in zip(rows, emitted, strict=True):
                text, before = texts[row], len(texts[row].tokens)
                text.extend(tokens, row, options, target)
                added = text.tokens[before:]
                text.token_ms += [now_ms] * len(added)
                if on_tokens is not None and added:
                    on_tokens(row, added, min(len(added), len(tokens) - 1))
            return [index for index, row in enumerate(rows) if not texts[row].finish_reason]

        most_nodes = 1 + sum(self.drafters[number].max_nodes - 1 for number in sessions)
        keep, spare = (
            sum(getattr(self.drafters[number], name, 0) for number in sessions)
            for name in ("bytes_per_token", "spare_bytes")
        )
        whole = [call.prompts[row] for row in rows]
        max_nodes = reserve(target, whole, options.max_new_tokens, most_nodes, keep, spare)
        if not max_nodes:
            return False
        cache = target.new_cache(len(prompts), max(map(len, prompts)) + options.max_new_tokens + max_nodes)
        if call.check is not None:
            cache.watch(call.check)
        if call.kept_text is None:
            out = target.prefill(cache, prompts, self._aux_layers(sessions))
        else:
            (prompt,) = prompts
            out = call.kept_text.prefill(target, cache, prompt, self._aux_layers(range(len(self.drafters))))
        roots = TreeBatch.roots(verifier.first(out.logits_BTV[:, 0]), target.device)
        for number in list(sessions):
            session = ask(number, self.drafters[number].prefill, prompts, out.aux_hidden_states)
            if number in sessions:
                sessions[number] = session
        del out  # the states of a long prompt take much memory
        remaining = emit([[token] for token in roots.root_tokens])
        while remaining:
            if len(remaining) < len(rows):  # rows that ended leave the batch
                rows = [rows[index] for index in remaining]
                roots = TreeBatch.roots([roots.root_tokens[index] for index in remaining], target.device)
                for part in (cache, verifier, budget):
                    part.reorder(remaining)
                tell("reorder", remaining)
            start, captured_before, batch = perf_counter(), captured(), roots
            # The limit is part of the request: pruning afterwards may depend on drawn tokens, which breaks sampling.
            deepest = target.deepest(cache)
            bound = max_nodes if deepest is None else min(max_nodes, deepest + 1)
            drafting_now = budget.drafts and bound > 1 and bool(sessions)
            if drafting_now:
                request = Request(
                    budget.room(bound),
                    budget.threshold,
                    budget.level_threshold,
                    chain=target.chains_only,
                    draws=verifier.draws,
                    warp=partial(warp, options),
                    streams=verifier.draft_streams,
                    temperature=options.temperature,
                    check=call.check,
                )
                trees = budget.prune(propose(request))
                if any(tree.size > 1 for tree in trees):
                    batch = TreeBatch.of(trees, target.device)
            drafted = perf_counter()
            # The next answer may draft again.
            learning = sessions if call.kept_text is None else range(len(self.drafters))
            out = target.forward_tree(cache, batch, self._aux_layers(learning))
            committed, roots = verifier.accept(batch, out)
            verified = perf_counter()
            cache.commit(committed.paths, committed.paths_BP, committed.counts_B)
            if call.kept_text is not None:
                call.kept_text.add(committed)
            tell("commit", committed)
            ended = perf_counter()
            emitted = [[*tokens[1:], root] for tokens, root in zip(committed.tokens, roots.root_tokens, strict=True)]
            remaining = emit(emitted)
            paused = bool(self.drafters) and options.draft == "auto" and not budget.drafts
            usual = captured() == captured_before
            if self.free_cores is not None and self.free_cores.update():
                budget.threads_changed()
                usual = False
            spent_ms = (1e3 * (drafted - start), 1e3 * (ended - drafted)) if usual else None
            budget.note(batch.trees, list(map(len, emitted)), spent_ms, could_draft=drafting_now)
            if not budget.will_draft:
                sessions.clear()  # nothing more will be drafted: plain rounds cost what they do without drafters
            ms = (1e3 * (drafted - start), 1e3 * (verified - drafted), 1e3 * (perf_counter() - verified))
            for row, tree, tokens in zip(rows, batch.trees, emitted, strict=True):
                texts[row].rounds.append(Round(tree.size, len(tokens), *ms, tree.depth, paused, tree.likeliest))
        if call.kept_text is not None:
            call.kept_text.keep(cache)
        return True

    def _aux_layers(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Layers with states that these drafters read, without duplicates."""
        return tuple(dict.fromkeys(layer for number in numbers for layer in self.drafters[number].aux_layers))

    def _budget(self, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> Budget:
        shares: list[float | None] = [getattr(drafter, "draft_share", None) for drafter in self.drafters]
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


# -- greedy verification ---------------------------------------------------------------------------------------------


class Verifier:
    """Greedy verification: a draft is accepted if it is the target's argmax, so the output is that of plain decoding.

    `draws`: whether drafters draw children, see `Request`; `draft_streams`: each row's random generator for it.
    """

    draws = False
    draft_streams: Sequence[torch.Generator] = ()

    def first(self, logits_BV: Tensor) -> list[int]:
        """Each row's first token, from the logits after its prompt."""
        return draft_kernels.argmax(logits_BV).tolist()

    def accept(self, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        """Decide one round for every row: the committed nodes, and the target's own tokens as the next roots."""
        choice_BN = draft_kernels.argmax(out.logits_BTV)
        if choice_BN.device.type == "cpu":
            paths, next_tokens = walk(batch.trees, choice_BN.tolist())
            return decided(batch, paths, next_tokens, out.aux_hidden_states, out.logits_BTV)
        return decided_on_device(batch, out, choice_BN)

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def go_on_from(self, emitted: Sequence[Sequence[int]]) -> None:
        """Begin after the tokens that each row has emitted."""


def walk(trees: Sequence[Tree], choices: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Follow the target's choice after each node down the trees: each row's accepted nodes, root first, and the choice
    after the last one."""
    paths = []
    for tree, choice in zip(trees, choices, strict=True):
        index, path = tree.index, [0]
        while (child := index.get((path[-1], choice[path[-1]]))) is not None:
            path.append(child)
        paths.append(path)
    return paths, [choice[path[-1]] for choice, path in zip(choices, paths, strict=True)]


# -- before the loop ---------------------------------------------------------------------------------------------------


def check_options(options: DecodeOptions, rows: int = 1) -> None:
    """Refuse (UserError) options that no target could decode with; needs no loaded target."""
    check_kinds(options)
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {options.max_new_tokens}.", "Ask for at least 1 token.")
    if options.min_new_tokens < 0:
        raise UserError(f"min_new_tokens is {options.min_new_tokens}.", "Use 0 for none, or a number of tokens.")
    check_sampling(options)
    if options.verifier != "auto" and options.verifier not in DRAWS:
        raise UserError(f"Unknown verifier {options.verifier!r}.", nearest(options.verifier, ["auto", *DRAWS]))
    if options.draft not in ("auto", "on", "off"):
        raise UserError(f"draft is {options.draft!r}.", "Use auto, on or off.")
    if not all(options.stop_strings):
        raise UserError("A stop string is empty.", "Leave it out.")
    for stop in options.stop_strings:
        check_text(stop, "A stop string")
    if options.seed is not None and not -(1 << 63) <= options.seed <= (1 << 63) - max(rows, 1):
        raise UserError(f"seed is {options.seed}.", "Use a number that fits into 64 bits.")


def check(target: Target, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Refuse (UserError) prompts and options that the target cannot decode, before any work."""
    check_options(options, len(prompts))
    check_processors(options, target.vocab_size, target.device)
    if unknown := [token for token in options.stop_token_ids if not 0 <= token < target.vocab_size]:
        raise UserError(
            f"stop_token_ids has {unknown[0]}, and the target's token ids end at {target.vocab_size - 1}.",
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


def make_verifier(
    options: DecodeOptions, prompts: Sequence[Sequence[int]], target: Target
) -> Verifier | SamplingVerifier:
    """The verifier for these options."""
    not_yet = keeping_on(options, prompts, target)
    if options.verifier == "auto" and options.greedy and not options.needs_prefix and not not_yet:
        return Verifier()
    draws = not options.greedy if options.verifier == "auto" else DRAWS[options.verifier]
    assert options.seed is not None, "drawn by now"
    return SamplingVerifier(options, prompts, options.seed, draws, not_yet)


def keeping_on(options: DecodeOptions, prompts: Sequence[Sequence[int]], target: Target) -> list[Processor]:
    """For each prompt a processor that bans end tokens before `min_new_tokens`; an empty list if none is needed."""
    ends = sorted({*target.end_tokens, *options.stop_token_ids})
    if not options.min_new_tokens or not ends:
        return []
    count, device = options.min_new_tokens, target.device
    return [MinNewTokensLengthLogitsProcessor(len(prompt), count, ends, device=device) for prompt in prompts]
