"""A race: one prompt decoded plainly and with drafts, one after the other, and both shown side by side on a terminal in
the time that they took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headstart.decode.options import DecodeOptions, random_seed
from headstart.errors import UserError
from headstart.eval.labels import PLAIN, label_of
from headstart.eval.methods import Ours, Source, warm_up
from headstart.eval.replay import (
    Race,
    Replay,
    began_anew,
    by_step,
    closing,
    contestants,
    end_ms,
    featured,
    figures,
    replay,
    standing,
    visible,
)
from headstart.eval.results import read_results
from headstart.support.terminal import ACCEPTED, format_moment, tell

DRAFTED, REJECTED = "dim italic", "strike red"
"""Styles of drafts that are not decided yet, and of those that were rejected."""
_FRAME_SECONDS = 0.05
_NARROW = 76  # columns below which answers stand one above the other
_AROUND = 2  # lines of a panel beside its text


def run_race(source: Source, prompt: Sequence[int], question: str, options: DecodeOptions) -> Race:
    """Decode a prompt both ways, each alone and warmed up. A UserError where nothing would draft."""
    target, drafters = source.target, source.drafters(options.drafter, options.tree)
    if not drafters:
        raise UserError(f"Nothing drafts with --drafter {options.drafter} here.", "Name a drafter, such as ngram.")
    methods = {PLAIN: Ours(target, (), options), options.drafter: Ours(target, drafters, options, source.costs)}
    seed = random_seed() if options.seed is None else options.seed
    for method in methods.values():
        warm_up(method, [prompt], options.max_new_tokens, seed)
    runs = {name: method.run([prompt], options.max_new_tokens, seed) for name, method in methods.items()}
    if error := runs[options.drafter].drafter_error:
        raise UserError(f"The drafter failed ({error}).", "Ask headstart doctor what is wrong with the heads.")
    if any(began_anew(run, 0) for run in runs.values()):
        raise UserError("Memory ran out during decoding, and the answer had to start again.", "Lower --max-new-tokens.")
    answers = [replay(name, run, 0, target.tokenizer) for name, run in runs.items()]
    return {"id": "", "question": question, "rank": 1, "ranked": 1, "answers": answers}


def read_race(path: Path, prompt_id: str | None = None) -> tuple[Race, str]:
    """A race of a report, by the id of its prompt or else the one in the middle, and where and when it was measured.

    Raises:
        UserError: a file without replays, or without this prompt's.
    """
    results, file = read_results(path)
    races: list[Race] = results.get("replays") or []
    if not races:
        raise UserError(f"{file} holds no replays.", "Name the results.json of a report; headstart eval writes them.")
    if prompt_id is None:
        return featured(races), conditions(results["settings"]["target"], results["environment"])
    known = {race["id"]: race for race in races}
    if prompt_id not in known:
        raise UserError(f"{file} holds no replay of prompt {prompt_id}.", f"It holds {', '.join(known)}.")
    return known[prompt_id], conditions(results["settings"]["target"], results["environment"])


def conditions(target: str, environment: Mapping[str, Any]) -> str:
    """Where and when a race was measured, in a line.

    >>> machine = {"gpu": None, "cpu": "AMD EPYC", "threads": 2, "dtype": "float32", "date": "2026-11-04T09:07+00:00"}
    >>> conditions("smollm2-135m", machine)
    'smollm2-135m, float32, AMD EPYC, 2 threads, 4 November 2026, 09:07 UTC'
    """
    threads = environment["threads"]
    device = environment["gpu"] or f"{environment['cpu']}, {threads} thread{'s' if threads != 1 else ''}"
    return f"{target}, {environment['dtype']}, {device}, {format_moment(environment['date'])}"


def show_race(race: Race, console: Console) -> None:
    """Play a race in real time, then say what came of it; where there is no terminal, only that."""
    answers = contestants(race)
    if console.is_terminal:
        tell(console, race["question"], style="bold")
        _play(answers, console)
    else:
        for answer in answers:
            tell(console, f"{label_of(answer['name'])}: {figures(answer, end_ms(answer))}")
    tell(console, closing(*answers))


def _play(answers: Sequence[Replay], console: Console) -> None:
    end, began = max(map(end_ms, answers)), monotonic()
    with Live(console=console, auto_refresh=False) as live:
        ms = 0.0
        while ms < end:
            ms = min(end, 1e3 * (monotonic() - began))
            live.update(frame(answers, ms, console), refresh=True)
            sleep(min(_FRAME_SECONDS, max(0.0, end - ms) / 1e3))


def frame(answers: Sequence[Replay], ms: float, console: Console) -> RenderableType:
    """What a terminal shows after so many milliseconds: each answer's newest lines, and its figures so far."""
    narrow = console.width < _NARROW
    width = (console.width if narrow else console.width // 2) - 4
    lines = max(len(answer_text(answer, end_ms(answer)).wrap(console, width)) for answer in answers)
    room = (console.height - 2) // (len(answers) if narrow else 1) - _AROUND - 1
    height = max(1, min(lines, room))
    panels = [_panel(answer, ms, console, width, height) for answer in answers]
    if narrow:
        return Group(*panels)
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _panel(answer: Replay, ms: float, console: Console, width: int, height: int) -> Panel:
    now = min(ms, end_ms(answer))
    lines = answer_text(answer, now).wrap(console, width)[-height:]
    name, counts = label_of(answer["name"]), figures(answer, now)
    return Panel(
        Text("\n").join(lines),
        title=Text(name),
        subtitle=Text(counts if len(counts) <= width else counts.rpartition(" · ")[0]),
        height=height + _AROUND,
        border_style="cyan" if ms >= end_ms(answer) else "dim",
    )


def answer_text(answer: Replay, ms: float) -> Text:
    """An answer as far as it is there, with the drafts of the moment after it."""
    text, now = Text(), standing(answer, ms)
    for pieces, style in _styled(answer, now.steps):
        text.append(visible(pieces), style)
    if now.drafting is not None:
        step = now.drafting
        kept = "".join(answer["pieces"][now.tokens : now.tokens + step["kept"]])
        text.append(visible(kept + step["rejected"]), DRAFTED)
    elif now.steps and now.steps < len(answer["steps"]):
        newest = answer["steps"][now.steps - 1]
        text.append(visible(newest["rejected"]), REJECTED)
    return text


def _styled(answer: Replay, steps: int) -> Iterator[tuple[str, str]]:
    for pieces, step in by_step(answer)[:steps]:
        yield "".join(pieces[: step["accepted"]]), ACCEPTED
        yield "".join(pieces[step["accepted"] :]), ""
