"""What was measured of heads in serving engines, kept in a file beside them: for commands and cards.

Nothing here starts an engine; see `headstart.servers`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.support.files import read_json, write_json

FILE = "engines.json"
"""In a folder of heads."""


@dataclass(frozen=True)
class DraftsRow:
    """What a number of drafts came to.

    Attributes:
        drafts: tokens of the chain.
        round_ms: of drafting and verifying them.
        plain_ms: of a token without heads, measured in turns with it.
        accepted: drafts a round, on the prompts that were asked.
        by_position: of these at each place of the chain.
        tokens_per_second: with heads, prompts included.
        plain_tokens_per_second: without.
        expected: speed-up over plain decoding when drafts are accepted as in the heads' calibration.
    """

    drafts: int
    round_ms: float
    plain_ms: float
    accepted: float
    by_position: tuple[float, ...]
    tokens_per_second: float
    plain_tokens_per_second: float
    expected: float

    @property
    def speedup(self) -> float:
        """Measured, over plain decoding, prompts included."""
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class EngineTuning:
    """What was measured in an engine, and the number of drafts that follows.

    Attributes:
        version: as the engine says itself.
        target: that it served.
        same_texts: answers that were the same with heads as without, of all that were asked.
        rows: one for each number of drafts.
        environment: the machine.
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
    def best(self) -> DraftsRow:
        """The number of drafts with the highest expected speed-up."""
        return max(self.rows, key=lambda row: row.expected)

    @property
    def drafts(self) -> int:
        """That pay most; 0 when plain decoding is faster than any."""
        return self.best.drafts if self.best.expected > 1 else 0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EngineTuning:
        """From what `write_engine_tuning` wrote."""
        rows = tuple(DraftsRow(**{**row, "by_position": tuple(row["by_position"])}) for row in values["rows"])
        return cls(**{**values, "rows": rows, "same_texts": tuple(values["same_texts"])})


def write_engine_tuning(folder: Path, tuning: EngineTuning) -> None:
    """Keep it with the heads, in place of what was measured in that engine before."""
    write_json(folder / FILE, {**_kept(folder), tuning.engine: asdict(tuning)})


def tuned_drafts(measured: dict[str, EngineTuning]) -> dict[str, int]:
    """Tokens of the chain that pay most, by engine, where any pay."""
    return {name: tuning.drafts for name, tuning in measured.items() if tuning.drafts}


def engine_rows(measured: dict[str, EngineTuning]) -> list[dict[str, str]]:
    """A row of the cards' table for each number of drafts in each engine."""
    return [
        {
            "engine": " ".join((name, tuning.version)).strip(),
            "target": tuning.target,
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


def setting_of(measured: dict[str, EngineTuning]) -> str:
    """What the figures depend on, as a sentence."""
    parts = [
        f"{name}: {tuning.prompts} prompts, greedy, at most {tuning.max_new_tokens} new tokens, on {tuning.machine}; "
        f"{tuning.same_texts[0]} of {tuning.same_texts[1]} answers are the same with heads as without."
        for name, tuning in measured.items()
    ]
    return " ".join(parts)


def read_engine_tunings(folder: Path) -> dict[str, EngineTuning]:
    """What was measured with these heads, by engine; nothing where nothing was.

    Raises:
        UserError: the file is not one of ours.
    """
    try:
        return {name: EngineTuning.from_json(values) for name, values in _kept(folder).items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{folder / FILE} cannot be read ({error!r}).", "Delete it and tune for the engines again."
        ) from None


def _kept(folder: Path) -> dict[str, Any]:
    return dict(read_json(folder / FILE)) if (folder / FILE).is_file() else {}
