"""Summary of adapting: updates with their figures, and acceptance in service of each version of the heads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.adapt.gate import describe
from headstart.adapt.service import Service
from headstart.data.served.log import segments
from headstart.heads.io import version_of
from headstart.support.terminal import format_seconds, tell


def summary(service: Service, log: Path | None) -> dict[str, Any]:
    """Return updates, the version in service, and served acceptance by day and version, as JSON values."""
    updates = service.updates()
    cost = sum(update["training"]["seconds"] for update in updates)
    served = list(_served(log)) if log is not None else []
    serves = {"serving": service.serving, "version": version_of(service.link), "link": str(service.link)}
    return {**serves, "updates": updates, "training_seconds": cost, "served": served}


def _served(log: Path) -> Iterator[dict[str, Any]]:
    """Yield tokens per round of our decoder's own answers, by day and version, in chronological order."""
    sums: dict[tuple[str, str], list[int]] = {}
    for file in segments(log):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError, OverflowError):  # such lines are counted where they are read
                row = json.loads(line)
                if row["rounds"]:
                    day = datetime.fromtimestamp(row["time"], UTC).date().isoformat()
                    counts = sums.setdefault((day, str(row["heads"])), [0, 0, 0])
                    for place, count in enumerate((1, len(row["answer"]) - 1, row["rounds"])):  # the first is prefill's
                        counts[place] += count
    for (day, version), (requests, tokens, rounds) in sums.items():
        yield {"day": day, "heads": version, "requests": requests, "tokens_per_round": tokens / rounds}


def show_update(update: Mapping[str, Any], console: Console) -> None:
    """Print the figures of an update, and the reasons if it was refused."""
    spent, plan = format_seconds(update["training"]["seconds"]), update["plan"]
    tell(
        console,
        f"Update {update['number']} ({update['version']}): {'accepted' if update['accepted'] else 'refused'}; "
        f"{plan['requests']} requests and {plan['own_conversations']} conversations of the run, "
        f"{update['training']['steps']} steps in {spent}.",
    )
    tell(console, f"    later requests: {describe(update['later'])}")
    for name, figures in update["own"].items():
        tell(console, f"    the run's own texts, compared with {name}: {describe(figures)}")
    for reason in update["why"]:
        tell(console, f"    {reason}", style="yellow")


def show(found: Mapping[str, Any], console: Console) -> None:
    for update in found["updates"]:
        show_update(update, console)
    if found["served"]:
        table = Table("day", "heads", "requests", "tokens per round", box=None)
        for row in found["served"]:
            table.add_row(row["day"], row["heads"] or "none", str(row["requests"]), f"{row['tokens_per_round']:.3f}")
        console.print(table)
    tell(
        console,
        f"In service: update {found['serving']} ({found['version']}), {found['link']}; training took "
        f"{format_seconds(found['training_seconds'])} in total.",
    )
