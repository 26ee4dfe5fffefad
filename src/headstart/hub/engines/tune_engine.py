"""How many drafts pay in a serving engine on this machine: rounds are timed in the engine itself.

Engines draft chains of a number of tokens that is fixed when they start. For each number that is tried the engine runs
twice, with heads and without, and both answer the same prompts in turns: machines whose speed changes from minute to
minute then favour neither. What a round takes is nearly the same for all texts; how many drafts are accepted is not,
and is taken from the calibration of the heads, which has seen more texts than can be asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from headstart.errors import UserError
from headstart.hub.measured import DraftsRow, EngineTuning
from headstart.servers.process import Counters, Engine, EngineAnswer, Server

DRAFTS = (1, 2, 3, 5)


Started = Callable[[Sequence[str], str], Server]
"""Makes a server from arguments that add heads (none for plain decoding) and a word for its log."""


def tune_engine(
    engine: Engine,
    start: Started,
    drafting: Callable[[int], Sequence[str]],
    prompts: Sequence[Sequence[int]],
    acceptance: Sequence[Sequence[float]],
    *,
    target: str,
    drafts: Sequence[int] = DRAFTS,
    max_new_tokens: int = 64,
    environment: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> EngineTuning:
    """Time plain decoding and chains of each length in a serving engine.

    Args:
        engine: which.
        start: makes its servers.
        drafting: arguments that add heads which draft so many tokens.
        prompts: token ids.
        acceptance: of the heads by depth and rank, as in `Tuning`.
        target: as the report names it.
        drafts: numbers to try.
        max_new_tokens: of each answer.
        environment: of the report.
        progress: told what is being done.

    Raises:
        UserError: nothing to ask, or an engine that does not start, answer or draft.
    """
    if not prompts or not drafts:
        raise UserError("There is nothing to ask the engine.", "Give prompts, and numbers of drafts from 1 on.")
    rows, same, asked = [], 0, 0
    with ExitStack() as stack:
        progress(f"starting {engine.name}")
        plain = stack.enter_context(start((), "plain"))
        version = plain.version()
        for count in sorted(set(drafts)):
            progress(f"starting {engine.name} with {count} drafts")
            with start(drafting(count), f"drafts-{count}") as drafted:
                progress(f"asking {engine.name} with {count} drafts")
                found = measure_drafts(plain, drafted, count, prompts, acceptance, max_new_tokens)
            rows.append(found.row)
            same, asked = same + found.same, asked + len(prompts)
    return EngineTuning(
        engine.name, version, target, len(prompts), max_new_tokens, (same, asked), tuple(rows), environment or {}
    )


@dataclass(frozen=True)
class Compared:
    """A number of drafts beside plain decoding.

    Attributes:
        row: its figures.
        plain: the answers' tokens without heads.
        drafted: with them.
    """

    row: DraftsRow
    plain: Sequence[tuple[int, ...]]
    drafted: Sequence[tuple[int, ...]]

    @property
    def same(self) -> int:
        """Answers that are the same."""
        return sum(one == other for one, other in zip(self.plain, self.drafted, strict=True))


def measure_drafts(
    plain: Server,
    drafted: Server,
    drafts: int,
    prompts: Sequence[Sequence[int]],
    acceptance: Sequence[Sequence[float]],
    max_new_tokens: int,
) -> Compared:
    """Ask both servers the same prompts in turns, another one first each time.

    Raises:
        UserError: the one with heads drafted nothing.
    """
    servers = (plain, drafted)
    for server in servers:
        server.answer(prompts[0], min(8, max_new_tokens))  # buffers are made and caches are warmed
    counted = Counters()
    answers: tuple[list[EngineAnswer], list[EngineAnswer]] = ([], [])
    reading = [0.0, 0.0]
    for number, prompt in enumerate(prompts):
        for which in (0, 1) if number % 2 else (1, 0):
            reading[which] += servers[which].answer(prompt, 1).seconds
            before = servers[which].counters()
            answers[which].append(servers[which].answer(prompt, max_new_tokens))
            counted += servers[which].counters().since(before)
    if not counted.rounds or not counted.drafted:
        raise UserError(
            f"{drafted.engine.name} loaded the heads and drafted nothing.", f"Its log, {drafted.log}, may say why."
        )
    plain_tokens, own_tokens = (sum(len(one.tokens) for one in given) for given in answers)
    plain_seconds, own_seconds = (sum(one.seconds for one in given) for given in answers)
    plain_ms = 1e3 * (plain_seconds - reading[0]) / max(1, plain_tokens - len(prompts))
    # Every pass after the first writes a token of the target's and what was accepted. Drafts may be accepted beyond the
    # end of an answer, which cuts them off, and a pass may draft nothing: the larger count is the right one.
    rounds = max(counted.rounds, own_tokens - len(prompts) - counted.accepted)
    round_ms = 1e3 * (own_seconds - reading[1]) / rounds
    alone = [level[0] for level in acceptance[:drafts]]
    row = DraftsRow(
        drafts=drafts,
        round_ms=round_ms,
        plain_ms=plain_ms,
        accepted=counted.accepted / counted.rounds,
        by_position=positions(counted),
        tokens_per_second=own_tokens / own_seconds,
        plain_tokens_per_second=plain_tokens / plain_seconds,
        expected=(1 + sum(accumulate(alone, mul))) * plain_ms / round_ms,
    )
    return Compared(row, [one.tokens for one in answers[0]], [one.tokens for one in answers[1]])


def positions(counted: Counters) -> tuple[float, ...]:
    """Drafts accepted at each place of the chain, a round."""
    return tuple(count / max(1, counted.rounds) for count in counted.by_position)
