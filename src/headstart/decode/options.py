"""What a caller may ask of decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headstart.decode.budget import Mode
from headstart.decode.sampling import Processor, Sampling


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode.

    Attributes:
        max_new_tokens: tokens to emit at most, the end-of-turn token included.
        temperature: 0 is greedy; above 0 the target's distribution is sampled, losslessly.
        seed: of row 0; row b uses seed + b. Greedy output, and samples without drafts, do not depend on the batch that
            a row is in. With drafts and measured costs the number of drafts does, and with it which text of the same
            distribution is drawn.
        stop_strings: emission ends with the token that completes one of these; it is kept, as in transformers.
        ignore_end: go on past the end-of-turn token (for measuring).
        top_k: see `Sampling`, like the next four.
        top_p: see there.
        min_p: see there.
        repetition_penalty: see there.
        processors: see there.
        verifier: a rule of `headstart.decode.rules`; "auto" takes the argmax when greedy, else "greedy_draft".
        draft: "on" drafts in every round, "off" never, "auto" as long as it pays.
        stop: called with (row, tokens emitted so far) after each token; true ends the row's text with that token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    ignore_end: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    processors: tuple[Processor, ...] = ()
    verifier: str = "auto"
    draft: Mode = "auto"
    stop: Callable[[int, list[int]], bool] | None = None

    @property
    def sampling(self) -> Sampling:
        """The distribution to draw from."""
        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, tuple(self.processors)
        )
