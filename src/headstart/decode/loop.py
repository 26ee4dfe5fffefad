"""The decode loop: propose, verify with one tree forward, accept, commit.

Plain decoding is the same loop without a drafter, so the two differ in nothing but the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from headstart.decode.budget import Controller, Costs
from headstart.decode.drafting import Drafter, Session
from headstart.decode.learned import Experience, size_of
from headstart.decode.memory import reserve
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import check_sampling, warp
from headstart.decode.stopping import extend
from headstart.decode.verify import RULES, SamplingVerifier, Verifier
from headstart.errors import UserError, nearest
from headstart.target.model import Target
from headstart.tree.tree import Request, TreeBatch


@dataclass
class Round:
    """One round of one generation: its wall-clock milliseconds and its outcome.

    Attributes:
        nodes: width of the verified tree, root included.
        emitted: tokens emitted, the target's own included (before any cut at the end of the text).
        draft_ms: proposing, and choosing which of the proposed nodes to verify.
        verify_ms: the tree forward and reading the target's choices.
        host_ms: everything else (accepting, committing, bookkeeping).
        depth: of the verified tree; 0 without drafts.
    """

    nodes: int
    emitted: int
    draft_ms: float
    verify_ms: float
    host_ms: float
    depth: int = 0


@dataclass
class Generation:
    """One row's output.

    Attributes:
        tokens: emitted token ids, without the prompt.
        finish_reason: why it ended: "end", "length" or "stop"; empty while it goes on.
        token_ms: for each token, milliseconds since the call at which it was there; the prefill is part of the first.
        rounds: one entry a round; the first token comes from the prefill and has none.
        drafter_error: what the drafter raised, when it did; from then on the row was decoded plainly.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    token_ms: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    drafter_error: str | None = None

    @property
    def first_token_ms(self) -> float:
        """Milliseconds from the call to the first token."""
        return self.token_ms[0]

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
        self.drafter = drafter
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
        target, controller = self.target, self._controller(prompts, options)
        session, verifier = Session(self.drafter if controller.will_draft else None), make_verifier(options, prompts)
        max_nodes = reserve(target, prompts, options.max_new_tokens, session.max_nodes)
        cache = target.new_cache(len(prompts), max(map(len, prompts)) + options.max_new_tokens + max_nodes)

        out = target.prefill(cache, prompts, session.aux_layers)
        roots = TreeBatch.roots(verifier.first(out.logits_BTV[:, 0]), target.device)
        session.prefill(prompts, out.aux_hidden_states)
        texts = [Generation() for _ in prompts]
        rows = list(range(len(prompts)))  # rows still running, by their number in `prompts`

        def emit(emitted: Sequence[Sequence[int]]) -> list[int]:
            """Add to the texts of the running rows; indices of those that go on."""
            now_ms = 1e3 * (perf_counter() - started)
            for row, tokens in zip(rows, emitted, strict=True):
                text, before = texts[row], len(texts[row].tokens)
                text.finish_reason = extend(text.tokens, tokens, row, options, target) or ""
                added = text.tokens[before:]
                text.token_ms += [now_ms] * len(added)
                text.drafter_error = session.error
                if on_tokens is not None and added:
                    on_tokens(row, added)
            return [index for index, row in enumerate(rows) if not texts[row].finish_reason]

        remaining = emit([[token] for token in roots.root_tokens])
        while remaining:
            if len(remaining) < len(rows):  # rows that ended leave the batch
                rows = [rows[index] for index in remaining]
                roots = TreeBatch.roots([roots.root_tokens[index] for index in remaining], target.device)
                for part in (cache, verifier, session, controller):
                    part.reorder(remaining)
            start = perf_counter()
            batch = roots
            # Asked for, not cut off later: how deep a tree grows may depend on what was drawn for it.
            deepest = target.deepest(cache)
            room = max_nodes if deepest is None else min(max_nodes, deepest + 1)
            drafts = controller.drafts and room > 1 and session.max_nodes > 1
            if drafts:
                request = Request(
                    controller.room(room),
                    controller.threshold,
                    controller.level_threshold,
                    chain=target.chains_only,
                    draws=verifier.draws,
                    warp=partial(warp, options),
                    streams=verifier.draft_streams,
                    temperature=options.temperature,
                )
                trees = controller.prune(session.propose(roots, request))
                if any(tree.size > 1 for tree in trees):
                    batch = TreeBatch.of(trees, target.device)
            drafted = perf_counter()
            out = target.forward_tree(cache, batch, session.aux_layers)
            committed, roots = verifier.accept(batch, out)
            verified = perf_counter()
            cache.commit(committed.paths, committed.paths_BP)
            session.commit(committed)
            ended = perf_counter()
            emitted = [[*tokens[1:], root] for tokens, root in zip(committed.tokens, roots.root_tokens, strict=True)]
            remaining = emit(emitted)
            spent_ms = (1e3 * (drafted - start), 1e3 * (ended - drafted)) if drafts == controller.drafts else None
            controller.note(batch.trees, list(map(len, emitted)), spent_ms)
            if not controller.will_draft:
                session.close()  # nothing more will be drafted: plain rounds cost what they cost without a drafter
            ms = (1e3 * (drafted - start), 1e3 * (verified - drafted), 1e3 * (perf_counter() - verified))
            for row, tree, tokens in zip(rows, batch.trees, emitted, strict=True):
                texts[row].rounds.append(Round(tree.size, len(tokens), *ms, depth=tree.depth))
        return texts

    def _controller(self, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> Controller:
        share = getattr(self.drafter, "draft_share", None)
        draft_ms = None if self.costs is None or share is None else float(share) * self.costs.verify(1)
        experience = None
        if options.greedy:
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
    check_sampling(options, target.vocab_size, target.device)
    if options.verifier != "auto" and options.verifier not in RULES:
        raise UserError(f"Unknown verifier {options.verifier!r}.", nearest(options.verifier, ["auto", *RULES]))
    if options.draft not in ("auto", "on", "off"):
        raise UserError(f"draft is {options.draft!r}.", "Use auto, on or off.")
    if not all(options.stop_strings):
        raise UserError("A stop string is empty.", "Leave it out.")
    if options.stop_strings and target.tokenizer is None:
        raise UserError("Stop strings need a tokenizer.", "Load the target with its tokenizer.")
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


def make_verifier(options: DecodeOptions, prompts: Sequence[Sequence[int]]) -> Verifier:
    """The verifier for these options."""
    if options.verifier == "auto" and options.greedy and not options.needs_prefix:
        return Verifier()
    draws = not options.greedy if options.verifier == "auto" else RULES[options.verifier]
    return SamplingVerifier(options, prompts, options.seed, draws)
