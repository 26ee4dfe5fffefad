"""Races on the page, in the picture and in the terminal show the replay's tokens and times."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from headstart.errors import UserError
from headstart.eval.race import answer_text, conditions, frame, read_race, show_race
from headstart.eval.race_svg import MOST_TOKENS, PAUSE_MS, race_svg
from headstart.eval.replay import Race, contestants, end_ms, status_line
from headstart.eval.report import template
from headstart.support.files import write_json
from tests.eval.test_replay import planted

SVG = "{http://www.w3.org/2000/svg}"


def spelled(pieces: list[str], times: int = 1) -> Race:
    """The planted race with these token texts, its rounds repeated `times` times."""
    (race,) = planted()
    for answer in race["answers"]:
        answer["pieces"] = pieces * times
        answer["tokens"] = answer["tokens"] * times
        end = end_ms(answer)
        answer["steps"] = [
            {**step, "ms": step["ms"] + turn * end, "drafted_ms": step["drafted_ms"] + turn * end}
            for turn in range(times)
            for step in answer["steps"]
        ]
    return race


@pytest.fixture
def race() -> Race:
    return spelled(["It", " is", " a", " <b>", "\n\n", "wood", "en", " é"])


# -- the page --------------------------------------------------------------------------------------------------------


def lanes(page: str) -> list[tuple[str, list[list[float]], list[str]]]:
    """Return the text of each lane without rejected drafts, the times of its steps, and the rejected drafts."""
    found = []
    for lane in re.findall('<p class="race-text"[^>]*>(.*?)</p>', page, re.DOTALL):
        text = unescape(re.sub("<[^>]*>", "", re.sub("<s>.*?</s>", "", lane, flags=re.DOTALL)))
        times = [[float(number) for number in step.split()] for step in re.findall('data-t="([^"]*)"', lane)]
        found.append((text, times, re.findall("<s>(.*?)</s>", lane, re.DOTALL)))
    return found


def test_page_holds_the_measurements(race: Race) -> None:
    shown = lanes(template("race.html.j2").render(races=[race], shown=race))
    for (text, times, _), answer in zip(shown, race["answers"], strict=True):
        assert text == "".join(answer["pieces"])
        assert [step[1] for step in times] == [step["ms"] for step in answer["steps"]]
        assert [step[0] for step in times] == [step["drafted_ms"] for step in answer["steps"]]
        assert sum(step[2] for step in times) == len(answer["tokens"])
    assert [rejected for _, _, rejected in shown] == [[], [" 9 9"]]


def test_page_notes_different_texts(race: Race) -> None:
    note = "The texts differ: compare tokens/s"
    assert note not in template("race.html.j2").render(races=[race], shown=race)
    race["answers"][-1]["tokens"] = race["answers"][0]["tokens"][::-1]
    assert note in template("race.html.j2").render(races=[race], shown=race)


def test_page_is_complete_without_its_script(race: Race) -> None:
    page = template("race.html.j2").render(races=[race], shown=race)
    still = page[: page.index("<script>")]
    assert "<details open>" in still and still.count(" hidden>") == 2
    for answer in race["answers"]:
        assert f'<b data-figure="seconds">{end_ms(answer) / 1e3:.2f}</b>' in still
    assert "prefers-reduced-motion" in page[page.index("<script>") :]
    assert "prefers-color-scheme: dark" in still


# -- the picture -----------------------------------------------------------------------------------------------------


def drawn(race: Race) -> tuple[ElementTree.Element, dict[str, list[tuple[float, str]]], str]:
    """Return the picture, each animation as (milliseconds, style), and the style sheet."""
    root = ElementTree.fromstring(race_svg(race, "somewhere"))
    style = root.findtext(f"{SVG}style") or ""
    turn_ms = 1e3 * float(re.findall(r"animation:([\d.]+)s", style)[0])
    frames = {
        name: [(float(at) * turn_ms / 100, rule) for at, rule in re.findall(r"([\d.]+)%\{([^}]*)\}", body)]
        for name, body in re.findall(r"@keyframes (\w+)\{((?:[^{}]*\{[^}]*\})*)\}", style)
    }
    return root, frames, style


def seen_at(root: ElementTree.Element, frames: dict[str, list[tuple[float, str]]], ms: float) -> list[str]:
    """List the fixed-width words visible at this time, without the legend."""
    shown = []
    for element in root.iter(f"{SVG}text"):
        name = re.search(r"animation-name:(\w+)", element.get("style") or "")
        if name and "m" in (element.get("class") or "").split():
            holds = [rule for at, rule in frames[name[1]] if at <= ms + 0.01]
            if "opacity:1" in holds[-1]:
                shown.append(element.text or "")
    return shown


def test_picture_shows_each_token_at_its_time(race: Race) -> None:
    root, frames, _ = drawn(race)
    slowest = max(end_ms(answer) for answer in race["answers"])
    for ms in (5, 25, 45, 75, 95, slowest):
        shown = "".join(seen_at(root, frames, ms))
        for answer in contestants(race):
            done = [step for step in answer["steps"] if step["ms"] <= ms]
            text = "".join(answer["pieces"][: sum(step["tokens"] for step in done)])
            assert all(word in shown for word in text.split()), ms
    final = "".join(seen_at(root, frames, slowest + PAUSE_MS / 2))
    whole = "".join("".join(answer["pieces"]) for answer in contestants(race))
    assert sorted("".join(final.split())) == sorted("".join(whole.split())), "no rejected drafts"
    assert "9 9" in seen_at(root, frames, 55) and "9 9" in seen_at(root, frames, 75)
    assert "9 9" not in seen_at(root, frames, 81), "replaced by the next drafts"


def test_picture_greys_drafts_until_they_are_decided(race: Race) -> None:
    root, frames, _ = drawn(race)
    styles = {}
    for element in root.iter(f"{SVG}text"):
        if name := re.search(r"animation-name:(\w+)", element.get("style") or ""):
            styles[element.text] = frames[name[1]]
    for words, colours in (("is a", ["draft", "kept"]), ("9 9", ["draft", "gone"])):
        assert re.findall(r"fill:var\(--(\w+)\)", " ".join(rule for _, rule in styles[words])) == colours


def test_picture_clock_matches_the_measurement(race: Race) -> None:
    root, frames, style = drawn(race)
    for answer in contestants(race):
        (last,) = (
            element for element in root.iter(f"{SVG}text") if element.text == status_line(answer, end_ms(answer))
        )
        name = re.search(r"animation-name:(\w+)", last.get("style") or "")
        assert name
        (appears,) = (at for at, rule in frames[name[1]] if rule == "opacity:1")
        assert appears == pytest.approx(end_ms(answer), rel=0.02)
    assert "prefers-color-scheme:dark" in style and "prefers-reduced-motion:reduce" in style


def test_reduced_motion_shows_the_end(race: Race) -> None:
    root, _, style = drawn(race)
    assert ".h{opacity:0}" in style
    still = [element for element in root.iter(f"{SVG}text") if "h" not in (element.get("class") or "").split()]
    words = "".join(element.text or "" for element in still if "m" in (element.get("class") or "").split())
    assert "wooden" in words.replace(" ", "") and "9 9" not in words


def test_long_answer_is_cut_with_a_note() -> None:
    long = spelled([" some", " words", " to", " read", " in", " a", " long", " answer"], 60)
    picture = race_svg(long, "somewhere")
    assert len(picture.encode()) < 150_000
    assert f"the first {MOST_TOKENS} tokens" in picture
    assert "<script" not in picture and "href" not in picture


@pytest.mark.parametrize("pieces", [["漢字", "と", "仮名"], ["x" * 200, "", " "]])
def test_wide_and_endless_words_stay_inside(pieces: list[str]) -> None:
    root, _, _ = drawn(spelled((pieces * 3)[:8]))
    for element in root.iter(f"{SVG}text"):
        if "m" in (element.get("class") or "").split():
            assert float(element.get("x") or 0) + 8.1 * len(element.text or "") <= 478


def test_control_characters_are_not_drawn() -> None:
    drawn(spelled(["\x1b[31m", "\x00", "\x0c", "a"] * 2))  # they are invalid in XML


# -- the terminal ----------------------------------------------------------------------------------------------------


def test_terminal_shows_the_current_drafts(race: Race) -> None:
    answer = race["answers"][1]
    assert answer_text(answer, 25).plain == "It is a", "drafted, not decided"
    assert answer_text(answer, 45).plain == "It is a <b>"
    assert answer_text(answer, 75).plain == "It is a <b>\n\nwood 9 9", "rejected drafts stay until the next"
    assert answer_text(answer, end_ms(answer)).plain == "".join(answer["pieces"])
    accepted = [span for span in answer_text(answer, 45).spans if "cyan" in str(span.style)]
    assert [(span.start, span.end) for span in accepted] == [(2, 7)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_frame_fits_the_terminal(race: Race, width: int) -> None:
    console = Console(width=width, height=12, file=io.StringIO(), force_terminal=True)
    lines = console.render_lines(frame(contestants(race), 75, console))
    assert len(lines) < 12
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def test_without_a_terminal_only_figures_are_printed(race: Race) -> None:
    console = Console(file=io.StringIO(), width=80)
    show_race(race, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("plain: 50.0 tokens/s") and lines[0].endswith("8 tokens · 0.16 s")
    assert lines[1].startswith("heads: 80.8 tokens/s · τ 2.33")
    assert lines[2] == "heads: 1.62x the speed of plain, the same text."
    assert len(lines) == 3


def test_terminal_replays_in_the_measured_time(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    shown: list[float] = []

    def counted(answers: Any, ms: float, console: Console) -> Any:
        shown.append(ms)
        return frame(answers, ms, console)

    monkeypatch.setattr("headstart.eval.race.monotonic", lambda: clock[0])
    monkeypatch.setattr("headstart.eval.race.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds + 0.001))
    monkeypatch.setattr("headstart.eval.race.frame", counted)
    show_race(race, Console(file=io.StringIO(), force_terminal=True, width=80, height=24))
    assert shown == sorted(shown) and shown[-1] == max(end_ms(answer) for answer in race["answers"])
    assert clock[0] == pytest.approx(shown[-1] / 1e3, rel=0.02)


# -- from a report ---------------------------------------------------------------------------------------------------


def test_races_are_read_from_a_report(tmp_path: Path) -> None:
    environment = {"gpu": None, "cpu": "a processor", "threads": 2, "dtype": "float32", "date": "2026-11-04"}
    results = {"settings": {"target": "tiny"}, "environment": environment, "replays": planted(12)}
    write_json(tmp_path / "results.json", results)
    race, where = read_race(tmp_path)
    assert (race["rank"], where) == (planted(12)[2]["rank"], conditions("tiny", environment))
    assert read_race(tmp_path / "results.json", "0")[0]["rank"] == 12
    with pytest.raises(UserError, match="no replay of prompt 77"):
        read_race(tmp_path, "77")
    write_json(tmp_path / "results.json", {"settings": {}})
    with pytest.raises(UserError, match="holds no replays"):
        read_race(tmp_path)
