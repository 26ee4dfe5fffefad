"""A race: one prompt decoded plainly and with drafts, one after the other, and replayed side by side in real time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from headstart.decode.options import DecodeOptions, random_seed
from headstart.errors import UserError
from headstart.eval.labels import PLAIN, label_of
from headstart.eval.methods import Ours, Source, warm_up
from headstart.eval.replay import (
    Race,
    Replay,
    by_step,
    conclusion,
    contestants,
    end_ms,
    median_race,
    printable,
    replay,
    state_at,
    status_line,
)
from headstart.eval.report import read_results
from headstart.support.terminal import ACCEPTED, format_moment, tell

DRAFTED, REJECTED = "dim italic", "strike red"  # styles of pending and of rejected drafts
_FRAME_SECONDS = 0.05
_SIDE_BY_SIDE = 76  # minimum columns; narrower terminals stack the answers
_BORDER = 2  # lines of a panel's border


def run_race(source: Source, prompt: Sequence[int], question: str, options: DecodeOptions) -> Race:
    """Decode a prompt both ways, one after the other, warmed up. Raises UserError if nothing would draft."""
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
    answers = [replay(name, run, 0, target.tokenizer) for name, run in runs.items()]
    return {"id": "", "question": question, "rank": 1, "ranked": 1, "answers": answers}


def read_race(path: Path, prompt_id: str | None = None) -> tuple[Race, str]:
    """Read a race of a report by its prompt's id, by default the median one, and the measurement's conditions.

    Raises:
        UserError: the file has no replays, or none of this prompt.
    """
    results, file = read_results(path)
    races: list[Race] = results.get("replays") or []
    if not races:
        raise UserError(f"{file} holds no replays.", "Name the results.json of a report; headstart eval writes them.")
    known = {race["id"]: race for race in races}
    if prompt_id is not None and prompt_id not in known:
        raise UserError(f"{file} holds no replay of prompt {prompt_id}.", f"It holds {', '.join(known)}.")
    race = median_race(races) if prompt_id is None else known[prompt_id]
    return race, conditions(results["settings"]["target"], results["environment"])


def conditions(target: str, environment: Mapping[str, Any]) -> str:
    """Describe the place and time of a measurement in a line.

    >>> machine = {"gpu": None, "cpu": "AMD EPYC", "threads": 2, "dtype": "float32", "date": "2026-11-04T09:07+00:00"}
    >>> conditions("smollm2-135m", machine)
    'smollm2-135m, float32, AMD EPYC, 2 threads, 4 November 2026, 09:07 UTC'
    """
    threads = environment["threads"]
    device = environment["gpu"] or f"{environment['cpu']}, {threads} thread{'s' if threads != 1 else ''}"
    return f"{target}, {environment['dtype']}, {device}, {format_moment(environment['date'])}"


def show_race(race: Race, console: Console) -> None:
    """Play a race in real time, then print the result; without a terminal, only print the result."""
    answers = contestants(race)
    if console.is_terminal:
        tell(console, race["question"], style="bold")
        _play(answers, console)
    else:
        for answer in answers:
            tell(console, f"{label_of(answer['name'])}: {status_line(answer, end_ms(answer))}")
    tell(console, conclusion(*answers))


def _play(answers: Sequence[Replay], console: Console) -> None:
    end, began = max(map(end_ms, answers)), monotonic()
    with Live(console=console, auto_refresh=False) as live:
        ms = 0.0
        while ms < end:
            ms = min(end, 1e3 * (monotonic() - began))
            live.update(frame(answers, ms, console), refresh=True)
            sleep(min(_FRAME_SECONDS, max(0.0, end - ms) / 1e3))


def frame(answers: Sequence[Replay], ms: float, console: Console) -> RenderableType:
    """Render each answer's newest lines and figures at time `ms`."""
    stacked = console.width < _SIDE_BY_SIDE
    width = (console.width if stacked else console.width // 2) - 4
    lines = max(len(answer_text(answer, end_ms(answer)).wrap(console, width)) for answer in answers)
    maximum = (console.height - 2) // (len(answers) if stacked else 1) - _BORDER - 1
    height = max(1, min(lines, maximum))
    panels = [_panel(answer, ms, console, width, height) for answer in answers]
    if stacked:
        return Group(*panels)
    grid = Table.grid(*(Column(ratio=1) for _ in panels), expand=True)
    grid.add_row(*panels)
    return grid


def _panel(answer: Replay, ms: float, console: Console, width: int, height: int) -> Panel:
    now = min(ms, end_ms(answer))
    lines = answer_text(answer, now).wrap(console, width)[-height:]
    name, counts = label_of(answer["name"]), status_line(answer, now)
    return Panel(
        Text("\n").join(lines),
        title=Text(name),
        subtitle=Text(counts if len(counts) <= width else counts.rpartition(" · ")[0]),
        height=height + _BORDER,
        border_style="cyan" if ms >= end_ms(answer) else "dim",
    )


def answer_text(answer: Replay, ms: float) -> Text:
    """Render an answer at time `ms`, followed by its pending or rejected drafts."""
    text, now = Text(), state_at(answer, ms)
    for pieces, step in by_step(answer)[: now.steps]:
        text.append(printable("".join(pieces[: step["accepted"]])), ACCEPTED)
        text.append(printable("".join(pieces[step["accepted"] :])))
    if now.drafting is not None:
        kept = "".join(answer["pieces"][now.tokens : now.tokens + now.drafting["kept"]])
        text.append(printable(kept + now.drafting["rejected"]), DRAFTED)
    elif now.steps and now.steps < len(answer["steps"]):
        text.append(printable(answer["steps"][now.steps - 1]["rejected"]), REJECTED)
    return text
