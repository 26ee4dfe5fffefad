"""A race as an animated SVG: CSS animation and no script, for pages and model cards.

Everything in it is from a replay: each token appears in real time. It stops at the end after a few turns; with reduced
motion only the end is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from textwrap import wrap

from rich.cells import cell_len

from headstart.eval.labels import label_of
from headstart.eval.replay import (
    LINGER_MS,
    Race,
    Replay,
    Step,
    by_step,
    conclusion,
    contestants,
    end_ms,
    printable,
    status_line,
    truncate,
)
from headstart.eval.report import template

MOST_TOKENS = 160  # longer answers are truncated, with a note in the picture
PAUSE_MS = 3000.0  # pause at the end, before it restarts

_COLUMNS = 54
_CELL, _LINE = 8.1, 19  # pixels; a monospaced character is about 0.6 of the font size (13.5 px) wide
_LEFT = 20
_RIGHT = _LEFT + _COLUMNS * _CELL
_COUNTS = 60  # maximum updates of a counter
_SEEN, _HIDDEN = "opacity:1", "opacity:0"
_DRAFTED = f"{_SEEN};fill:var(--draft);text-decoration:none"
_KEPT = f"{_SEEN};fill:var(--kept);text-decoration:underline"
_REJECTED = f"{_SEEN};fill:var(--gone);text-decoration:line-through"

Times = Sequence[tuple[float, str]]  # start time (ms) of each style
Cell = tuple[int, int]  # row and column of a character


def race_svg(race: Race, conditions: str, command: str | None = None) -> str:
    """Draw a race, plain decoding on top, with the measurement's conditions and the command that drew it."""
    answers = [truncate(answer, MOST_TOKENS) for answer in contestants(race)]
    cut = any(len(answer["tokens"]) > MOST_TOKENS for answer in contestants(race))
    end = max(map(end_ms, answers))
    scene = _Scene(end + PAUSE_MS)
    y = 30.0
    question = " ".join(race["question"].split())
    scene.text(question if len(question) <= 52 else question[:51].rstrip() + "…", _LEFT, y, "q")
    for answer in answers:
        y = _lane(scene, answer, y + 32)
    y += 30
    x = float(_LEFT)
    for words, kind in (("drafted", "d"), ("accepted draft", "k"), ("rejected draft", "r")):
        scene.text(words, x, y, f"m {kind}")
        x += _CELL * (len(words) + 2)
    result = conclusion(*answers)
    scene.text(result, _LEFT, y + 26, "n", [(end, _SEEN)])
    note = "Measured, in real time" + (f", at most the first {MOST_TOKENS} tokens" if cut else "")
    y += 46
    for line in wrap(f"{note}: {conditions}", 66):
        scene.text(line, _LEFT, y, "f")
        y += 17
    title = printable(f"{result} {note}: {conditions}")
    command = command and printable(command)
    size = {"height": y + 1, "bar_width": _COLUMNS * _CELL}
    return template("race.svg.j2").render(scene=scene, title=title, command=command, **size) + "\n"


def _lane(scene: _Scene, answer: Replay, y: float) -> float:
    """Draw an answer below a height; return the height of its last line."""
    end = end_ms(answer)
    scene.text(label_of(answer["name"]), _LEFT, y, "n")
    _counters(scene, answer, y)
    counts = accumulate((step["tokens"] for step in answer["steps"]), initial=0)
    times = [0.0, *(step["ms"] for step in answer["steps"])]
    shares = [(ms, count / len(answer["tokens"])) for ms, count in zip(times, counts, strict=True)]
    scene.bars.append((y + 8, scene.animation([(ms, f"transform:scaleX({share:.3g})") for ms, share in shares])))
    cells, last = _cells("".join(answer["pieces"]))
    top, index = y + 34, 0
    until = [*(step["drafted_ms"] for step in answer["steps"][1:]), end + PAUSE_MS]
    for (pieces, step), next_ms in zip(by_step(answer), until, strict=True):
        kept, accepted = step["kept"], step["accepted"]
        verified = [(step["ms"], _SEEN)]
        after_kept = index + len("".join(pieces[:kept]))
        for part, kind, styles in (
            (pieces[:kept], "m k", [(step["drafted_ms"], _DRAFTED), (step["ms"], _KEPT)]),
            (pieces[kept:accepted], "m k", verified),
            (pieces[accepted:], "m", verified),
        ):
            text = "".join(part)
            for (row, column), words in _segments(text, cells[index : index + len(text)]):
                scene.text(words, _LEFT + _CELL * column, top + _LINE * row, kind, styles)
            index += len(text)
        start = next((cell for cell in cells[after_kept:] if cell is not None), last)
        gone_ms = min(step["ms"] + LINGER_MS, next_ms)
        rejected = [(step["drafted_ms"], _DRAFTED), (step["ms"], _REJECTED), (gone_ms, _HIDDEN)]
        for (row, column), words in _tail(step, "".join(pieces[kept:]), start):
            if row <= last[0]:
                scene.text(words, _LEFT + _CELL * column, top + _LINE * row, "m r h", rejected)
    return top + _LINE * last[0]


def _counters(scene: _Scene, answer: Replay, y: float) -> None:
    """Draw the figures of an answer at each update."""
    end = end_ms(answer)
    gap = max(100.0, end / _COUNTS)
    times = [gap * number for number in range(int(end / gap) + 1) if gap * number < end]
    for ms, until in zip(times, [*times[1:], end], strict=True):
        scene.text(status_line(answer, ms), _RIGHT, y, "f e h", [(ms, _SEEN), (until, _HIDDEN)])
    scene.text(status_line(answer, end), _RIGHT, y, "f e", [(end, _SEEN)])


def _cells(text: str, start: Cell = (0, 0)) -> tuple[list[Cell | None], Cell]:
    """Return the cell of each character, and the end of the text. Lines break between words; white space at a break has
    no cell, and empty lines take no room.

    >>> _cells("a b\\n\\nc")
    ([(0, 0), (0, 1), (0, 2), None, None, (1, 0)], (1, 1))
    """
    cells: list[Cell | None] = []
    row, column = start
    for word in re.findall(r"\n|[^\S\n]|\S+", text):
        if word == "\n":
            row, column = (row + 1, 0) if column else (row, 0)
            cells.append(None)
            continue
        if column and column + cell_len(word) > _COLUMNS:
            row, column = row + 1, 0
        for character in word:
            if column + cell_len(character) > _COLUMNS:
                row, column = row + 1, 0
            if not column and character.isspace():
                cells.append(None)
                continue
            cells.append((row, column))
            column += cell_len(character)
    return cells, (row, column)


def _segments(text: str, cells: Sequence[Cell | None]) -> list[tuple[Cell, str]]:
    """Join adjacent characters, with the cell of the first; strip spaces at both ends."""
    lines: dict[int, tuple[Cell, str]] = {}
    for character, cell in zip(text, cells, strict=True):
        if cell is None or (character.isspace() and cell[0] not in lines):
            continue
        start, before = lines.get(cell[0], (cell, ""))
        lines[cell[0]] = start, before + character
    return [(start, words.rstrip()) for start, words in lines.values()]


def _tail(step: Step, following: str, start: Cell) -> list[tuple[Cell, str]]:
    """Place the rejected drafts of a step over the text that replaced them."""
    text = step["rejected"]
    row, column = start
    # Unless both start a new word, or neither does: a draft that starts a new word moves one cell right; one that
    # continues the previous word moves one cell left.
    if following[:1].isspace() != text[:1].isspace() and column:
        column += 1 if text[:1].isspace() else -1
    text = text.lstrip(" ")
    return _segments(text, _cells(text, (row, column))[0])


@dataclass
class _Scene:
    """Texts and bars of the picture with their animations; the picture restarts after `turn_ms`."""

    turn_ms: float
    animations: dict[str, str] = field(default_factory=dict)  # keyframes to name
    texts: list[tuple[str, float, float, str, str]] = field(default_factory=list)  # text, x, y, class, animation
    bars: list[tuple[float, str]] = field(default_factory=list)  # y, animation

    def text(self, shown: str, x: float, y: float, kind: str, times: Times = ()) -> None:
        """Add a text: visible from the start, or styled by `times` and hidden before the first of them."""
        name = self.animation([(0, _HIDDEN), *times]) if times else ""
        self.texts.append((printable(shown), x, y, kind, name))

    def animation(self, times: Times) -> str:
        """Return the name of these keyframes; equal ones share it."""
        frames = "".join(f"{round(100 * ms / self.turn_ms, 3):g}%{{{style}}}" for ms, style in times)
        return self.animations.setdefault(frames, f"a{len(self.animations)}")
