"""Tuning of the number of drafts in a serving engine, stored with the heads.

Engines draft chains of a length that is fixed at start, or per number of concurrent requests. Two servers, with heads
and without, answer the same prompts alternately, so that changes in machine speed favour neither. If memory holds only
one server, they run one after the other, without heads first. The time of a round is nearly the same for all texts, but
acceptance is not: it comes from the heads' calibration, which covers more texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, cycle, islice
from operator import eq, mul
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from headstart.errors import UserError
from headstart.servers.completions import CompletionRequest
from headstart.servers.process import EngineAnswer, Recorded, RunningEngine, Server
from headstart.support.files import write_json

FILE = "engines.json"
"""In a folder of heads."""
DRAFTS = (1, 2, 3, 5)
Start = Callable[[Sequence[str], str], Server]
"""Starts a server from arguments that add heads (none for plain decoding) and a name for its log."""


@dataclass(frozen=True)
class DraftsRow:
    """Measurement of chains of `drafts` tokens with `requests` concurrent requests.

    Tokens/s are per request and include prefill, milliseconds do not. `accepted` is drafts per round on these prompts,
    `by_position` the same per position. `expected` is the speed-up over plain decoding at the calibration's acceptance.
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
        """Measured speed-up over plain decoding, prefill included."""
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class EngineTuning:
    """Measurements in an engine; `same_texts` is (answers identical with and without heads, all answers)."""

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
        named = " and ".join(str(self.environment[key]) for key in ("gpu", "cpu") if self.environment.get(key))
        cores = f", {self.environment['cores']} cores" if self.environment.get("cores") else ""
        return f"{named}{cores}" if named else "one machine"

    @property
    def best(self) -> dict[int, DraftsRow]:
        """The row with the highest expected speed-up for each number of concurrent requests."""
        return {row.requests: row for row in sorted(self.rows, key=lambda row: (row.requests, row.expected))}

    @property
    def drafts(self) -> dict[int, int]:
        """Best number of drafts, or 0, by the smallest number of concurrent requests it holds for (the first is 1).

        Empty if plain decoding is always faster.
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
class EngineWorkload:
    """Prompts for the engine, numbers of concurrent requests, and the heads' acceptance as in `Tuning`."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    acceptance: Sequence[Sequence[float]]
    requests: Sequence[int] = (1,)


@dataclass(frozen=True)
class Comparison:
    """Measurement of a number of drafts; `answers` are the tokens written with heads, `same` counts those equal to
    plain decoding."""

    row: DraftsRow
    answers: Sequence[tuple[int, ...]]
    same: int


def tune_engine(
    start: Start,
    drafting: Callable[[int], Sequence[str]],
    drafts: Sequence[int],
    workload: EngineWorkload,
    progress: Callable[[str], None],
    at_once: bool = True,
) -> tuple[str, list[Comparison]]:
    """Time plain decoding and chains of each length in a serving engine; returns its version and the measurements.

    `drafting` returns the arguments that add heads for a number of drafts. `at_once`: whether memory holds two servers.
    Raises UserError if there are no prompts, or the engine does not start, answer or draft.
    """
    if not workload.prompts:
        raise UserError("There are no prompts to ask the engine.", "Give conversations with questions.")
    comparisons = []
    progress("starting the engine")
    with ExitStack() as stack:
        server = stack.enter_context(start((), "plain"))
        version, plain = server.version(), server if at_once else Recorded(server)
        if not at_once:
            progress(f"asking {server.engine.name} without drafts")
            for batch in (batch for requests in workload.requests for batch in _batches(workload, requests)):
                plain.answers(batch)
            stack.close()
        for count in sorted(set(drafts)):
            progress(f"starting {server.engine.name} with {count} drafts")
            with start(drafting(count), f"drafts-{count}") as drafted:
                progress(f"asking {server.engine.name} with {count} drafts")
                comparisons += [
                    measure_drafts(plain, drafted, count, workload, requests) for requests in workload.requests
                ]
        return version, comparisons


def _batches(workload: EngineWorkload, requests: int) -> list[list[CompletionRequest]]:
    """Return batches of concurrent requests: a warm-up of short answers, then the measured ones.

    The last batch is filled with the first prompts.
    """
    prompts = list(islice(cycle(workload.prompts), -(-len(workload.prompts) // requests) * requests))
    asked = [CompletionRequest(prompt, workload.max_new_tokens) for prompt in prompts]
    warm_up = [replace(each, max_new_tokens=min(8, each.max_new_tokens)) for each in asked[:requests]]
    return [warm_up, *(asked[first : first + requests] for first in range(0, len(asked), requests))]


def measure_drafts(
    plain: RunningEngine, drafted: Server, drafts: int, workload: EngineWorkload, requests: int = 1
) -> Comparison:
    """Send both servers the same prompts, `requests` at a time, alternating which goes first; a UserError if nothing is
    drafted."""
    servers = (plain, drafted)
    warm_up, *batches = _batches(workload, requests)
    for server in servers:
        server.answers(warm_up)
    counted: Counter[str | int] = Counter()
    answers: tuple[list[EngineAnswer], list[EngineAnswer]] = ([], [])
    for number, batch in enumerate(batches):
        for which in (0, 1) if number % 2 else (1, 0):
            before = servers[which].counters()
            answers[which].extend(servers[which].answers(batch))
            counted += servers[which].counters() - before
    asked = sum(map(len, batches))
    if not counted["drafts"] or not counted["draft_tokens"]:
        raise drafted.drafted_nothing()
    plain_tokens, tokens = (sum(len(answer.tokens) for answer in given) for given in answers)
    plain_seconds, seconds = (sum(answer.seconds for answer in given) for given in answers)
    plain_ms, drafted_ms = (sum(each.decoding_ms for each in given) for given in answers)
    if not plain_ms or not drafted_ms:
        raise UserError("The engine ends its answers after a token.", "Give conversations with longer answers.")
    plain_ms /= max(1, plain_tokens - asked)
    # Each forward after prefill yields one token plus the accepted drafts. Drafts accepted beyond the end of an answer
    # are cut off, and a forward may draft nothing: the larger count is right.
    rounds = max(counted["drafts"], tokens - asked - counted["accepted_tokens"])
    round_ms = drafted_ms / rounds
    row = DraftsRow(
        requests=requests,
        drafts=drafts,
        round_ms=round_ms,
        plain_ms=plain_ms,
        accepted=counted["accepted_tokens"] / counted["drafts"],
        by_position=tuple(counted[place] / counted["drafts"] for place in range(drafts)),
        tokens_per_second=tokens / seconds,
        plain_tokens_per_second=plain_tokens / plain_seconds,
        expected=(1 + sum(accumulate((level[0] for level in workload.acceptance[:drafts]), mul))) * plain_ms / round_ms,
    )
    texts = [[answer.tokens for answer in given] for given in answers]
    return Comparison(row, texts[1], same=sum(map(eq, *texts)))


# -- stored with the heads ---------------------------------------------------------------------------------------------


def write_engine_tuning(folder: Path, tuning: EngineTuning) -> None:
    """Store a tuning with the heads, replacing the engine's earlier one."""
    measured = {**read_engine_tunings(folder), tuning.engine: tuning}
    write_json(folder / FILE, {engine: asdict(known) for engine, known in measured.items()})


def read_engine_tunings(folder: Path) -> dict[str, EngineTuning]:
    """Read a folder's tunings by engine; a UserError for an invalid file."""
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        return _TUNINGS.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{file} cannot be read ({'.'.join(map(str, first['loc']))}: {first['msg']})."
        raise UserError(problem, "Delete it and tune for the engines again.") from None


def engine_rows(measured: Mapping[str, EngineTuning]) -> list[dict[str, str]]:
    """Build the card's table, one row per engine and number of drafts."""
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
            "accepted per round": f"{row.accepted:.2f}",
            "round": f"{row.round_ms:.1f} ms",
            "plain step": f"{row.plain_ms:.1f} ms",
        }
        for name, tuning in measured.items()
        for row in tuning.rows
    ]


def setting_of(measured: Mapping[str, EngineTuning]) -> str:
    """Describe how the figures were measured."""
    return " ".join(
        f"{name}: {tuning.prompts} prompts, greedy, at most {tuning.max_new_tokens} new tokens, on {tuning.machine}; "
        f"{tuning.same_texts[0]} of {tuning.same_texts[1]} answers are the same with heads as without."
        for name, tuning in measured.items()
    )
