"""The decode loop: propose, verify with one tree forward, accept, commit.

Plain decoding is the same loop with a drafter that proposes nothing, so the two differ in nothing but the drafts.

Shape suffixes: B rows, N tree nodes, P longest accepted path, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headstart.decode.drafters import Drafter, NoDrafter
from headstart.decode.stopping import Stopper
from headstart.decode.verify import Accepted, GreedyVerifier, SampleVerifier
from headstart.errors import UserError
from headstart.target import DraftTree, Target


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode.

    Attributes:
        max_new_tokens: tokens to emit at most, the end-of-turn token included.
        temperature: 0 is greedy; above 0 the target's distribution is sampled, losslessly.
        seed: of row 0; row b uses seed + b, so that a row's output does not depend on its batch.
        stop_strings: emission ends with the token that completes one of these; it is kept, as in transformers.
        ignore_end: go on past the end-of-turn token (for measuring).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    ignore_end: bool = False


@dataclass
class Round:
    """One round of one generation: wall-clock milliseconds, and what came of it.

    Attributes:
        nodes: width of the verified tree, root included.
        emitted: tokens emitted, the target's own included (before any cut at the end of the text).
        draft_ms: proposing.
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
        finish: why it ended: "end", "length" or "stop".
        first_token_ms: from the call to the first token (prefill included).
        token_ms: for each token, milliseconds since the call at which it was there.
        rounds: one entry a round; the first token comes from the prefill and has none.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = "length"
    first_token_ms: float = 0.0
    token_ms: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

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
    """

    def __init__(self, target: Target, drafter: Drafter | None = None) -> None:
        self.target = target
        self.drafter: Drafter = drafter or NoDrafter()

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], options: DecodeOptions, on_tokens: OnTokens | None = None
    ) -> list[Generation]:
        """Decode a batch of tokenised prompts of any lengths.

        Raises:
            UserError: an empty or too long prompt, or an option out of range.
        """
        started = perf_counter()
        check(self.target, prompts, options)
        target, drafter = self.target, self.drafter
        verifier = _verifier(options, len(prompts), target.device)
        stoppers = [Stopper(target.tokenizer, options, target.end_tokens) for _ in prompts]
        outputs = [Generation() for _ in prompts]
        capacity = max(map(len, prompts)) + options.max_new_tokens + drafter.max_nodes
        cache = target.new_cache(len(prompts), capacity)

        out = target.prefill(cache, prompts, drafter.taps)
        roots = verifier.pick(out.logits_BTV)[:, 0].tolist()
        session = drafter.open(prompts, out.taps)
        rows = list(range(len(prompts)))  # rows still running, by their number in `prompts`
        going = [_emit(row, [root], outputs, stoppers, started, on_tokens) for row, root in enumerate(roots)]
        for output in outputs:
            output.first_token_ms = output.token_ms[0]

        while any(going):
            if not all(going):  # rows that ended leave the batch
                kept = [place for place, goes in enumerate(going) if goes]
                rows, roots = [rows[place] for place in kept], [roots[place] for place in kept]
                for part in (cache, verifier):
                    part.select(kept)
                drafter.select(session, kept)
            start = perf_counter()
            tree = drafter.propose(session, torch.tensor(roots, device=target.device))
            drafted = perf_counter()
            out = target.forward_tree(cache, tree, drafter.taps)
            accepted = verifier.accept(tree, out.logits_BTV)
            verified = perf_counter()
            cache.commit([row.path for row in accepted])
            if drafter.taps or drafter.max_nodes > 1:
                drafter.observe(session, *_committed(tree, out.taps, accepted))
            roots = [row.tokens[-1] for row in accepted]
            going = [
                _emit(row, step.tokens, outputs, stoppers, started, on_tokens)
                for row, step in zip(rows, accepted, strict=True)
            ]
            ended = perf_counter()
            ms = [1e3 * (drafted - start), 1e3 * (verified - drafted), 1e3 * (ended - verified)]
            for row, step in zip(rows, accepted, strict=True):
                outputs[row].rounds.append(Round(tree.size, len(step.tokens), *ms))
        return outputs


def check(target: Target, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Refuse what cannot be decoded, before any work.

    Raises:
        UserError: naming the value and the remedy.
    """
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {options.max_new_tokens}.", "Ask for at least 1 token.")
    if not options.temperature >= 0:
        raise UserError(f"The temperature is {options.temperature}.", "Use 0 for greedy decoding, or a value above 0.")
    if not prompts:
        raise UserError("There is no prompt.", "Give at least one prompt.")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"Prompt {number} is empty.", "Give each prompt at least one token.")
        if len(prompt) + options.max_new_tokens > target.max_length:
            raise UserError(
                f"Prompt {number} has {len(prompt)} tokens; with {options.max_new_tokens} new ones it passes the "
                f"{target.max_length} tokens that {target.name} can read.",
                "Shorten the prompt, or lower --max-new-tokens.",
            )


class _Greedy(GreedyVerifier):
    def select(self, rows: Sequence[int]) -> None:
        """Greedy decoding keeps nothing per row."""


def _verifier(options: DecodeOptions, rows: int, device: torch.device) -> Any:
    if options.temperature == 0:
        return _Greedy()
    return SampleVerifier(options.temperature, [options.seed + row for row in range(rows)], device)


def _emit(
    row: int,
    tokens: list[int],
    outputs: list[Generation],
    stoppers: list[Stopper],
    started: float,
    on_tokens: OnTokens | None,
) -> bool:
    """Append what was decided to a row's output, cut where the text ends; false when it has ended."""
    output = outputs[row]
    taken, finish = stoppers[row].take(tokens)
    output.tokens.extend(taken)
    output.token_ms.extend([1e3 * (perf_counter() - started)] * len(taken))
    if on_tokens is not None and taken:
        on_tokens(row, taken)
    if finish:
        output.finish = finish
    return finish is None


def _committed(
    tree: DraftTree, taps: dict[int, Tensor], accepted: list[Accepted]
) -> tuple[Tensor, dict[int, Tensor], list[int]]:
    """Tokens [B, P] and states [B, P, E] along each row's accepted path, padded by repeating its last node."""
    counts = [len(row.path) for row in accepted]
    longest = max(counts)
    paths_BP = torch.tensor(
        [row.path + [row.path[-1]] * (longest - len(row.path)) for row in accepted], device=tree.tokens_BN.device
    )
    rows_B1 = torch.arange(len(accepted), device=paths_BP.device)[:, None]
    return tree.tokens_BN[rows_B1, paths_BP], {tap: state[rows_B1, paths_BP] for tap, state in taps.items()}, counts
