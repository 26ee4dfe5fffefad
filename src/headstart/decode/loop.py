"""The decode loop: propose, verify with one tree forward, accept, commit.

Plain decoding is the same loop with a drafter that proposes nothing, so the two differ in nothing but the drafts.

Shape suffix: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from headstart.decode.budget import Controller, Costs
from headstart.decode.drafting import Drafter, NoDrafter
from headstart.decode.learned import Experience, size_of
from headstart.decode.memory import reserve
from headstart.decode.options import DecodeOptions
from headstart.decode.rules import RULES
from headstart.decode.session import Session
from headstart.decode.stopping import Stopper
from headstart.decode.verify import GreedyVerifier, RuleVerifier, Verifier, streams
from headstart.errors import UserError, nearest
from headstart.support.renamed import rule_hint
from headstart.target.model import Target
from headstart.tree.proposal import ProposedTree, Request, Root


@dataclass
class Round:
    """One round of one generation: its wall-clock milliseconds and its outcome.

    Attributes:
        nodes: width of the verified tree, root included.
        emitted: tokens emitted, the target's own included (before any cut at the end of the text).
        draft_ms: proposing, and choosing which of the proposed nodes to verify.
        verify_ms: the tree forward and reading the target's choices.
        host_ms: everything else (accepting, committing, bookkeeping).
    """

    nodes: int
    emitted: int
    draft_ms: float
    verify_ms: float
    host_ms: float


@dataclass
class Generation:
    """One row's output.

    Attributes:
        tokens: emitted token ids, without the prompt.
        finish_reason: why it ended: "end", "length" or "stop".
        first_token_ms: from the call to the first token (prefill included).
        token_ms: for each token, milliseconds since the call at which it was there.
        rounds: one entry a round; the first token comes from the prefill and has none.
        drafter_error: what the drafter raised, when it did; from then on the row was decoded plainly.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    first_token_ms: float = 0.0
    token_ms: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    drafter_error: str | None = None

    @property
    def tokens_per_round(self) -> float:
        """τ: mean tokens emitted a round, the target's own included; 1 for plain decoding."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else 1.0


OnTokens = Callable[[int, list[int]], None]
"""Called with (row, new tokens) as soon as they are decided."""


class Engine:
    """Decodes with a target and a drafter.

    Args:
        target: the frozen model.
        drafter: what drafts; None decodes plainly.
        costs: of drafting and verifying on this machine. With them the number of nodes follows the costs, and drafting
            pauses where it does not pay; without them everything that is proposed is verified. In greedy decoding, what
            rounds really take corrects them, and what is learned serves later calls; sampling keeps to them, so that a
            seeded text does not depend on the clock, nor on what was decoded before.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, costs: Costs | None = None) -> None:
        self.target = target
        self.drafter: Drafter = drafter or NoDrafter()
        self.costs = costs
        self._experience: dict[int, Experience] = {}  # by the size of the batch

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], options: DecodeOptions, on_tokens: OnTokens | None = None
    ) -> list[Generation]:
        """Decode a batch of tokenised prompts of any lengths.

        Raises:
            UserError: an empty or too long prompt, an option out of range, or a batch that memory cannot hold.
        """
        started = perf_counter()
        check(self.target, prompts, options)
        controller = self._controller(prompts, options)
        target, drafter = self.target, self.drafter if controller.will_draft else NoDrafter()
        verifier, draft_streams = make_verifier(options, prompts)
        max_nodes = reserve(target, prompts, options.max_new_tokens, drafter.max_nodes)
        stoppers = [Stopper(target.tokenizer, options, target.end_tokens, row) for row in range(len(prompts))]
        texts = _Texts(stoppers, on_tokens, started)
        cache = target.new_cache(len(prompts), max(map(len, prompts)) + options.max_new_tokens + max_nodes)

        out = target.prefill(cache, prompts, drafter.aux_layers)
        root = Root.of(verifier.first(out.logits_BTV[:, 0]), target.device)
        session = Session(drafter, prompts, out.aux_hidden_states)
        rows = list(range(len(prompts)))  # rows still running, by their number in `prompts`
        going = texts.add(rows, [[token] for token in root.tokens], session.error)

        while any(going):
            if not all(going):  # rows that ended leave the batch
                kept = [index for index, goes in enumerate(going) if goes]
                rows, root = [rows[index] for index in kept], root.reorder(kept)
                draft_streams = [draft_streams[index] for index in kept]
                for part in (cache, verifier, session, controller):
                    part.reorder(kept)
            start = perf_counter()
            # Asked for, not cut off later: how deep a tree grows may depend on what was drawn for it.
            deepest = target.deepest(cache)
            room = max_nodes if deepest is None else min(max_nodes, deepest + 1)
            drafts = controller.drafts and room > 1 and session.drafter.max_nodes > 1
            tree = ProposedTree.roots(root)
            if drafts:
                request = Request(
                    controller.room(room),
                    controller.threshold,
                    controller.level_threshold,
                    verifier.chains_only or target.chains_only,
                    verifier.children,
                    options.sampling.warp,
                    draft_streams,
                    options.temperature,
                )
                proposal = controller.prune(session.propose(root, request))
                if proposal.size > 1:
                    tree = proposal.on(target.device)
            drafted = perf_counter()
            out = target.forward_tree(cache, tree, session.drafter.aux_layers)
            outcome = verifier.accept(tree, out.logits_BTV)
            verified = perf_counter()
            cache.commit([row.path for row in outcome.rows], outcome.paths_BP)
            session.commit(tree, out, outcome)
            committed = perf_counter()
            root = outcome.root
            emitted = [row.tokens for row in outcome.rows]
            going = texts.add(rows, emitted, session.error)
            spent_ms = (1e3 * (drafted - start), 1e3 * (committed - drafted)) if drafts == controller.drafts else None
            controller.note(tree.proposal, [len(tokens) for tokens in emitted], spent_ms)
            if not controller.will_draft:
                session.close()  # nothing more will be drafted: plain rounds cost what they cost without a drafter
            ended = perf_counter()
            ms = (1e3 * (drafted - start), 1e3 * (verified - drafted), 1e3 * (ended - verified))
            texts.note(rows, tree, emitted, ms)
        return texts.outputs

    def _controller(self, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> Controller:
        share = getattr(self.drafter, "draft_share", None)
        draft_ms = None if self.costs is None or share is None else float(share) * self.costs.verify(1)
        experience = None
        if options.sampling.greedy:
            experience = self._experience.setdefault(size_of(len(prompts)), Experience())
        longest = max(map(len, prompts))
        return Controller(
            self.costs,
            options.draft,
            len(prompts),
            limit=options.max_new_tokens,
            draft_ms=draft_ms,
            prompt=longest,
            experience=experience,
        )


def check(target: Target, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Refuse what cannot be decoded, before any work.

    Raises:
        UserError: naming the value and the remedy.
    """
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {options.max_new_tokens}.", "Ask for at least 1 token.")
    options.sampling.check(target.vocab_size, target.device)
    if options.verifier != "auto" and options.verifier not in RULES:
        remedy = rule_hint(options.verifier) or nearest(options.verifier, ["auto", *RULES])
        raise UserError(f"Unknown verifier {options.verifier!r}.", remedy)
    if options.draft not in ("auto", "on", "off"):
        raise UserError(f"draft is {options.draft!r}.", "Use auto, on or off.")
    if not prompts:
        raise UserError("There is no prompt.", "Give at least one prompt.")
    if not -(1 << 63) <= options.seed <= (1 << 63) - len(prompts):
        raise UserError(f"seed is {options.seed}.", "Use a number that fits into 64 bits.")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"Prompt {number} is empty.", "Give each prompt at least one token.")
        if len(prompt) + options.max_new_tokens > target.max_length:
            raise UserError(
                f"Prompt {number} has {len(prompt)} tokens; with {options.max_new_tokens} new ones it passes the "
                f"{target.max_length} tokens that {target.name} can read.",
                "Shorten the prompt, or lower --max-new-tokens.",
            )


def make_verifier(options: DecodeOptions, prompts: Sequence[Sequence[int]]) -> tuple[Verifier, list[torch.Generator]]:
    """The verifier for these options, and each row's random stream for drafting."""
    seeded = [streams(options.seed + row) for row in range(len(prompts))]
    drafting = [draft for _, draft in seeded]
    sampling = options.sampling
    if options.verifier == "auto" and sampling.greedy and not sampling.needs_prefix:
        return GreedyVerifier(), drafting
    rule = RULES[("top_k" if sampling.greedy else "greedy_draft") if options.verifier == "auto" else options.verifier]
    return RuleVerifier(rule, sampling, prompts, [own for own, _ in seeded]), drafting


class _Texts:
    """The texts of a batch while they are written.

    Args:
        stoppers: each row's own.
        on_tokens: is called with what is added.
        started: when the call began, by `perf_counter`.

    Attributes:
        outputs: one for each row.
    """

    def __init__(self, stoppers: Sequence[Stopper], on_tokens: OnTokens | None, started: float) -> None:
        self.outputs = [Generation() for _ in stoppers]
        self._stoppers = stoppers
        self._on_tokens = on_tokens
        self._started = started

    def add(self, rows: Sequence[int], emitted: Sequence[list[int]], drafter_error: str | None) -> list[bool]:
        """Append what was decided for these rows, cut where a text ends; false for those that have ended."""
        return [self._add(row, tokens, drafter_error) for row, tokens in zip(rows, emitted, strict=True)]

    def _add(self, row: int, tokens: list[int], drafter_error: str | None) -> bool:
        output = self.outputs[row]
        taken, finish_reason = self._stoppers[row].take(tokens)
        now_ms = 1e3 * (perf_counter() - self._started)
        if not output.tokens:
            output.first_token_ms = now_ms
        output.tokens.extend(taken)
        output.token_ms.extend([now_ms] * len(taken))
        output.drafter_error = drafter_error
        if self._on_tokens is not None and taken:
            self._on_tokens(row, taken)
        if finish_reason:
            output.finish_reason = finish_reason
        return finish_reason is None

    def note(
        self, rows: Sequence[int], tree: ProposedTree, emitted: Sequence[list[int]], ms: tuple[float, float, float]
    ) -> None:
        """Note a round of these rows: its tree, what it emitted, and milliseconds as of `Round`."""
        for number, (row, tokens) in enumerate(zip(rows, emitted, strict=True)):
            self.outputs[row].rounds.append(Round(len(tree.parents_of(number)), len(tokens), *ms))
