"""How many drafts pay in a serving engine on this machine: measured in the engine itself, and kept beside the heads.

Engines draft chains of a number of tokens that is fixed when they start, or for each number of requests at a time.
For each number that is tried the engine runs twice, with heads and without, and both answer the same prompts in
turns: machines whose speed changes from minute to minute then favour neither. What a round takes is nearly the same
for all texts; how many drafts are accepted is not, and is taken from the calibration of the heads, which has seen
more texts than can be asked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, cycle, islice
from operator import eq, mul
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from headstart.errors import UserError
from headstart.servers.process import EngineAnswer, Server
from headstart.support.files import write_json

FILE = "engines.json"
"""In a folder of heads."""
DRAFTS = (1, 2, 3, 5)
Start = Callable[[Sequence[str], str], Server]
"""Makes a server from arguments that add heads (none for plain decoding) and a word for its log."""


@dataclass(frozen=True)
class DraftsRow:
    """What chains of a number of `drafts` came to, with so many `requests` at a time.

    Tokens/s are those of a request, with its prompt; milliseconds are without. `accepted` are drafts a round on the
    prompts that were asked, `by_position` those at each place of the chain. `expected` is the speed-up over plain
    decoding when drafts are accepted as in the heads' calibration.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    requests: PositiveInt
    drafts: PositiveInt
    round_ms: float
    plain_ms: float
    accepted: float
    by_position: tuple[float, ...]
    tokens_per_second: float
    plain_tokens_per_second: PositiveFloat
    expected: float

    @property
    def speedup(self) -> float:
        """Measured, over plain decoding, prompts included."""
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class EngineTuning:
    """What was measured in an engine, and the number of drafts that follows.

    `same_texts` are the answers that were the same with heads as without, and all that were asked.
    """

    engine: str
    version: str
    target: str
    prompts: int
    max_new_tokens: int
    same_texts: tuple[int, int]
    rows: tuple[DraftsRow, ...]
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """Where it was measured."""
        named = " and ".join(str(self.environment[key]) for key in ("gpu", "cpu") if self.environment.get(key))
        cores = f", {self.environment['cores']} cores" if self.environment.get("cores") else ""
        return f"{named}{cores}" if named else "one machine"

    @property
    def best(self) -> dict[int, DraftsRow]:
        """For each number of requests at a time, the number of drafts with the highest expected speed-up."""
        rows = sorted(self.rows, key=lambda row: (row.requests, row.expected))
        return {row.requests: row for row in rows}

    @property
    def drafts(self) -> dict[int, int]:
        """From so many requests at a time on (the first is 1), the number of drafts that pays most, or 0.

        Empty when plain decoding is always faster.
        """
        changes: dict[int, int] = {}
        for requests, row in self.best.items():
            drafts = row.drafts if row.expected > 1 else 0
            if drafts != next(reversed(changes.values()), None):
                changes[requests if changes else 1] = drafts
        return changes if any(changes.values()) else {}


_TUNINGS = TypeAdapter(dict[str, EngineTuning])


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What engines are asked, how many requests at a time, and the heads' acceptance as in `Tuning`."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    acceptance: Sequence[Sequence[float]]
    requests: Sequence[int] = (1,)


@dataclass(frozen=True)
class Compared:
    """A number of drafts beside plain decoding: the answers' tokens with heads, and how many are the same without."""

    row: DraftsRow
    drafted: Sequence[tuple[int, ...]]
    same: int


def tune_engine(
    start: Start,
    drafting: Callable[[int], Sequence[str]],
    drafts: Sequence[int],
    asked: Asked,
    progress: Callable[[str], None],
) -> tuple[str, list[Compared]]:
    """Time plain decoding and chains of each length in a serving engine; returns its version and a comparison each.

    `drafting` gives the arguments that add heads which draft so many tokens. A UserError where there are no prompts, or
    the engine does not start, answer or draft.
    """
    if not asked.prompts:
        raise UserError("There are no prompts to ask the engine.", "Give conversations with questions.")
    compared = []
    progress("starting the engine")
    with start((), "plain") as plain:
        for count in sorted(set(drafts)):
            progress(f"starting {plain.engine.name} with {count} drafts")
            with start(drafting(count), f"drafts-{count}") as drafted:
                progress(f"asking {plain.engine.name} with {count} drafts")
                compared += [measure_drafts(plain, drafted, count, asked, requests) for requests in asked.requests]
        return plain.version(), compared


def measure_drafts(plain: Server, drafted: Server, drafts: int, asked: Asked, requests: int = 1) -> Compared:
    """Ask both servers the same prompts in turns, another one first each time; a UserError where nothing is drafted.

    So many `requests` are under way at a time: all prompts are asked, some again where the last of them are fewer.
    """
    servers = (plain, drafted)
    prompts = list(islice(cycle(asked.prompts), -(-len(asked.prompts) // requests) * requests))
    for server in servers:
        server.answers(prompts[:requests], min(8, asked.max_new_tokens))  # buffers are made and caches are warmed
    counted: Counter[str | int] = Counter()
    answers: tuple[list[EngineAnswer], list[EngineAnswer]] = ([], [])
    reading_seconds = [0.0, 0.0]
    for first in range(0, len(prompts), requests):
        together = prompts[first : first + requests]
        for which in (0, 1) if first // requests % 2 else (1, 0):
            reading_seconds[which] += sum(answer.seconds for answer in servers[which].answers(together, 1))
            before = servers[which].counters()
            answers[which].extend(servers[which].answers(together, asked.max_new_tokens))
            counted += servers[which].counters() - before
    if not counted["drafts"] or not counted["draft_tokens"]:
        raise UserError(
            f"{drafted.engine.name} loaded the heads and drafted nothing.", f"Its log, {drafted.log}, may say why."
        )
    plain_tokens, tokens = (sum(len(answer.tokens) for answer in given) for given in answers)
    plain_seconds, seconds = (sum(answer.seconds for answer in given) for given in answers)
    plain_ms = 1e3 * (plain_seconds - reading_seconds[0]) / max(1, plain_tokens - len(prompts))
    # Every pass after the first writes a token of the target's and what was accepted. Drafts may be accepted beyond the
    # end of an answer, which cuts them off, and a pass may draft nothing: the larger count is the right one.
    rounds = max(counted["drafts"], tokens - len(prompts) - counted["accepted_tokens"])
    round_ms = 1e3 * (seconds - reading_seconds[1]) / rounds
    first_ranks = [level[0] for level in asked.acceptance[:drafts]]
    row = DraftsRow(
        requests=requests,
        drafts=drafts,
        round_ms=round_ms,
        plain_ms=plain_ms,
        accepted=counted["accepted_tokens"] / counted["drafts"],
        by_position=tuple(counted[place] / counted["drafts"] for place in range(drafts)),
        tokens_per_second=tokens / seconds,
        plain_tokens_per_second=plain_tokens / plain_seconds,
        expected=(1 + sum(accumulate(first_ranks, mul))) * plain_ms / round_ms,
    )
    texts = [[answer.tokens for answer in given] for given in answers]
    return Compared(row, texts[1], same=sum(map(eq, *texts)))


# -- beside the heads --------------------------------------------------------------------------------------------------


def write_engine_tuning(folder: Path, tuning: EngineTuning) -> None:
    """Keep it with the heads, in place of what was measured in that engine before."""
    measured = {**read_engine_tunings(folder), tuning.engine: tuning}
    write_json(folder / FILE, {engine: asdict(known) for engine, known in measured.items()})


def read_engine_tunings(folder: Path) -> dict[str, EngineTuning]:
    """What was measured with these heads, by engine; a UserError where the file is not one of ours."""
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        return _TUNINGS.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{file} cannot be read ({where}: {first['msg']}).", "Delete it and tune for the engines again."
        ) from None


def tuned_drafts(measured: Mapping[str, EngineTuning]) -> dict[str, dict[int, int]]:
    """Tokens of the chain that pay most, by engine and by requests at a time, where any pay."""
    return {name: tuning.drafts for name, tuning in measured.items() if tuning.drafts}


def engine_rows(measured: Mapping[str, EngineTuning]) -> list[dict[str, str]]:
    """A row of the cards' table for each number of drafts in each engine."""
    return [
        {
            "engine": " ".join((name, tuning.version)).strip(),
            "target": tuning.target,
            "requests": str(row.requests),
            "drafts": str(row.drafts),
            "plain, tokens/s": f"{row.plain_tokens_per_second:.1f}",
            "with heads, tokens/s": f"{row.tokens_per_second:.1f}",
            "speed-up": f"{row.speedup:.2f}x",
            "expected": f"{row.expected:.2f}x",
            "accepted a round": f"{row.accepted:.2f}",
            "round": f"{row.round_ms:.1f} ms",
            "plain step": f"{row.plain_ms:.1f} ms",
        }
        for name, tuning in measured.items()
        for row in tuning.rows
    ]


def setting_of(measured: Mapping[str, EngineTuning]) -> str:
    """What the figures depend on, as a sentence."""
    parts = [
        f"{name}: {tuning.prompts} prompts, greedy, at most {tuning.max_new_tokens} new tokens, on {tuning.machine}; "
        f"{tuning.same_texts[0]} of {tuning.same_texts[1]} answers are the same with heads as without."
        for name, tuning in measured.items()
    ]
    return " ".join(parts)
