"""How many drafts pay in a serving engine on this machine: rounds are timed in the engine itself.

Engines draft chains of a number of tokens that is fixed when they start. For each number that is tried the engine runs
twice, with heads and without, and both answer the same prompts in turns: machines whose speed changes from minute to
minute then favour neither. What a round takes is nearly the same for all texts; how many drafts are accepted is not,
and is taken from the calibration of the heads, which has seen more texts than can be asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from headstart.errors import UserError
from headstart.hub.measured import DraftsRow
from headstart.servers.process import Counters, EngineAnswer, Server

DRAFTS = (1, 2, 3, 5)
Start = Callable[[Sequence[str], str], Server]
"""Makes a server from arguments that add heads (none for plain decoding) and a word for its log."""


@dataclass(frozen=True)
class Asked:
    """What engines are asked, and what is known of the heads.

    Attributes:
        prompts: token ids.
        max_new_tokens: of each answer.
        acceptance: of the heads by depth and rank, as in `Tuning`.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    acceptance: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Compared:
    """A number of drafts beside plain decoding: its figures, and the answers' tokens without heads and with them."""

    row: DraftsRow
    plain: Sequence[tuple[int, ...]]
    drafted: Sequence[tuple[int, ...]]

    @property
    def same(self) -> int:
        """Answers that are the same."""
        return sum(plain == drafted for plain, drafted in zip(self.plain, self.drafted, strict=True))


def tune_engine(
    start: Start,
    drafting: Callable[[int], Sequence[str]],
    drafts: Sequence[int],
    asked: Asked,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[str, list[Compared]]:
    """Time plain decoding and chains of each length in a serving engine.

    Args:
        start: makes its servers.
        drafting: arguments that add heads which draft so many tokens.
        drafts: numbers to try.
        asked: of all of them.
        progress: told what is being done.

    Returns:
        The engine's version, and a comparison for each number of drafts.

    Raises:
        UserError: nothing to ask, or an engine that does not start, answer or draft.
    """
    if not asked.prompts or not drafts:
        raise UserError("There is nothing to ask the engine.", "Give prompts, and numbers of drafts from 1 on.")
    compared = []
    progress("starting the engine")
    with start((), "plain") as plain:
        for count in sorted(set(drafts)):
            progress(f"starting {plain.engine.name} with {count} drafts")
            with start(drafting(count), f"drafts-{count}") as drafted:
                progress(f"asking {plain.engine.name} with {count} drafts")
                compared.append(measure_drafts(plain, drafted, count, asked))
        return plain.version(), compared


def measure_drafts(plain: Server, drafted: Server, drafts: int, asked: Asked) -> Compared:
    """Ask both servers the same prompts in turns, another one first each time.

    Raises:
        UserError: the one with heads drafted nothing.
    """
    servers, prompts = (plain, drafted), asked.prompts
    for server in servers:
        server.answer(prompts[0], min(8, asked.max_new_tokens))  # buffers are made and caches are warmed
    counted = Counters()
    answers: tuple[list[EngineAnswer], list[EngineAnswer]] = ([], [])
    reading_seconds = [0.0, 0.0]
    for number, prompt in enumerate(prompts):
        for which in (0, 1) if number % 2 else (1, 0):
            reading_seconds[which] += servers[which].answer(prompt, 1).seconds
            before = servers[which].counters()
            answers[which].append(servers[which].answer(prompt, asked.max_new_tokens))
            counted += servers[which].counters().since(before)
    if not counted.rounds or not counted.drafted:
        raise UserError(
            f"{drafted.engine.name} loaded the heads and drafted nothing.", f"Its log, {drafted.log}, may say why."
        )
    plain_tokens, tokens = (sum(len(answer.tokens) for answer in given) for given in answers)
    plain_seconds, seconds = (sum(answer.seconds for answer in given) for given in answers)
    plain_ms = 1e3 * (plain_seconds - reading_seconds[0]) / max(1, plain_tokens - len(prompts))
    # Every pass after the first writes a token of the target's and what was accepted. Drafts may be accepted beyond the
    # end of an answer, which cuts them off, and a pass may draft nothing: the larger count is the right one.
    rounds = max(counted.rounds, tokens - len(prompts) - counted.accepted)
    round_ms = 1e3 * (seconds - reading_seconds[1]) / rounds
    first_ranks = [level[0] for level in asked.acceptance[:drafts]]
    row = DraftsRow(
        drafts=drafts,
        round_ms=round_ms,
        plain_ms=plain_ms,
        accepted=counted.accepted / counted.rounds,
        by_position=tuple(count / counted.rounds for count in counted.by_position),
        tokens_per_second=tokens / seconds,
        plain_tokens_per_second=plain_tokens / plain_seconds,
        expected=(1 + sum(accumulate(first_ranks, mul))) * plain_ms / round_ms,
    )
    return Compared(row, [answer.tokens for answer in answers[0]], [answer.tokens for answer in answers[1]])
