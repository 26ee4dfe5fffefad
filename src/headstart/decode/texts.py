"""Output of decoding: a text with its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstart.decode.options import DecodeOptions
from headstart.model.model import Target
from headstart.support.detokenizer import StopStrings


@dataclass
class Round:
    """Outcome and wall-clock milliseconds of one row's round.

    Nodes include the root, and `depth` is the tree's. Emitted tokens include the target's own, before any cut at the
    end of the text. `draft_ms` is proposing and pruning; `forward_ms` the tree forward and acceptance; `host_ms` the
    rest. `paused`: the budget skipped drafting in this round, because drafts would not pay or to time a plain round; a
    round pruned to the root does not count. `likeliest` is the tree's most likely path.
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
