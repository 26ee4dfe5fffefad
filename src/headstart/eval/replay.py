"""What was measured of a few answers, round by round: enough to watch them again in the time that they took.

Every race (page, picture, terminal) is drawn from a report's replays alone; results.json holds each as a `Race`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple, TypedDict

from headstart.decode.loop import Round
from headstart.eval.figures import Unit
from headstart.eval.labels import HEADS, HEADS_NGRAM, OTHER, PLAIN, label_of
from headstart.eval.methods import Run
from headstart.support.detokenizer import IncrementalDetokenizer

SHOWN = 5
"""Prompts whose answers are kept at most: from the one with the highest speed-up to that with the lowest."""
LINGER_MS = 150.0
"""How long rejected drafts stay where one watches, struck out, unless the next are drafted before."""
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f\\ud800-\\udfff\\ufffe\\uffff]")
_CONTEXT = 8  # tokens before a draft that decide how it is spelled


class Step(TypedDict):
    """A round of an answer; the first is the prefill, which drafts nothing.

    Attributes:
        drafted_ms, ms: since the call, when the drafts were there and when they were decided.
        tokens: how many tokens the answer has from this round. Where it is more than `accepted`, the last is the
            target's own; the end of the answer may cut it off.
        nodes: drafts that were verified.
        kept: how many of their likeliest path, from its beginning, were accepted.
        accepted: how many drafts were accepted; more than `kept` where another path was.
        rejected: the rest of the likeliest path, as text.
    """

    ms: float
    tokens: int
    drafted_ms: float
    nodes: int
    kept: int
    accepted: int
    rejected: str


class Replay(TypedDict):
    """An answer: its token ids, the text of each (joined, they are the answer), and the rounds that they came in."""

    name: str
    tokens: list[int]
    pieces: list[str]
    steps: list[Step]


class Race(TypedDict):
    """The answers of several methods to a prompt, plain decoding first.

    Attributes:
        id: the prompt's, as in `per_prompt`.
        question: the newest words of the user.
        rank, ranked: its place among so many prompts by the speed-up of what is run by default, or of the drafter under
            test where that was not measured; 1 is the highest.
    """

    id: str
    question: str
    rank: int
    ranked: int
    answers: list[Replay]


class Standing(NamedTuple):
    """Where an answer stands at some time. `drafting` is the step whose drafts are there and not decided yet."""

    steps: int
    tokens: int
    drafting: Step | None

    def tokens_per_second(self, ms: float) -> float:
        """From the call on, the prefill included; `ms` is the time of this standing."""
        return 1e3 * self.tokens / ms if ms else 0.0

    @property
    def tokens_per_round(self) -> float:
        """τ so far: the first token is the prefill's and counts in no round; before any round it is 1."""
        return (self.tokens - 1) / (self.steps - 1) if self.steps > 1 else 1.0


def races(units: Sequence[Unit], tokenizer: Any, drafter: str) -> list[Race]:
    """The answers to keep, prompts in the order of their speed-up. `drafter` is what `HEADS` stands for."""
    names = {PLAIN: PLAIN, HEADS: drafter, OTHER + HEADS_NGRAM: HEADS_NGRAM}
    ranked = []
    for unit in units:
        for row, prompt in enumerate(unit.prompts):
            runs = [(method, unit.runs[method]) for method in names if method in unit.runs]
            if all(run.tokens[row] and not began_anew(run, row) for _, run in runs):
                plain, drafted = unit.runs[PLAIN].token_ms[row], runs[-1][1].token_ms[row]
                speedup = (len(drafted) / drafted[-1]) / (len(plain) / plain[-1])
                ranked.append((speedup, prompt, runs, row))
    ranked.sort(key=lambda entry: -entry[0])
    return [
        {
            "id": prompt.id,
            "question": prompt.question,
            "rank": place + 1,
            "ranked": len(ranked),
            "answers": [replay(names[method], run, row, tokenizer) for method, run in runs],
        }
        for place in spread(len(ranked), SHOWN)
        for _, prompt, runs, row in ranked[place : place + 1]
    ]


def visible(text: str) -> str:
    """Text without the control characters that no picture may hold and that a terminal obeys; lines and tabs stay.

    >>> visible("a\\x1b[31mb\\n") == "a\\ufffd[31mb\\n"
    True
    """
    return _CONTROLS.sub("\ufffd", text)


def spread(count: int, most: int) -> list[int]:
    """So many places of a list, evenly from the first to the last.

    >>> spread(12, 5), spread(2, 5), spread(0, 5)
    ([0, 3, 6, 8, 11], [0, 1], [])
    """
    kept = min(count, most)
    return [round(place * (count - 1) / max(1, kept - 1)) for place in range(kept)]


def began_anew(run: Run, row: int) -> bool:
    """Whether a row has more rounds than its answer shows, since memory ran out on the way."""
    return _steps(run, row) is None


def replay(name: str, run: Run, row: int, tokenizer: Any) -> Replay:
    """One row of a run."""
    steps = _steps(run, row)
    assert steps is not None, "rounds and times fit together"
    tokens, before = run.tokens[row], 0
    replayed: Replay = {"name": name, "tokens": tokens, "pieces": pieces_of(tokenizer, [], tokens), "steps": []}
    past = 0.0
    for count, ms, decided in steps:
        drafts = list(decided.likeliest) if decided else []
        accepted = min(decided.emitted - 1, count) if decided else 0
        emitted = tokens[before : before + accepted]
        kept = next((k for k, pair in enumerate(zip(drafts, emitted, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(drafts), accepted) if kept is None else kept
        drafted_ms = min(ms, past + decided.draft_ms) if drafts and decided else ms
        spelled = pieces_of(tokenizer, tokens[max(0, before - _CONTEXT) : before], drafts)
        replayed["steps"].append(
            {
                "ms": round(ms, 2),
                "tokens": count,
                "drafted_ms": round(drafted_ms, 2),
                "nodes": decided.nodes - 1 if decided else 0,
                "kept": kept,
                "accepted": accepted,
                "rejected": "".join(spelled[kept:]),
            }
        )
        before, past = before + count, ms
    return replayed


def _steps(run: Run, row: int) -> list[tuple[int, float, Round | None]] | None:
    """Tokens, time and round of each arrival. None where they do not fit together: the row began anew when memory ran
    out, or nothing drafted in it."""
    arrivals = [(len(list(together)), ms) for ms, together in groupby(run.token_ms[row])]
    rounds = run.rounds[row] if run.rounds else []
    if not rounds:
        return [(count, ms, None) for count, ms in arrivals]
    decided: list[Round | None] = [None, *rounds]
    if len(decided) != len(arrivals):
        return None
    steps = [(count, ms, step) for (count, ms), step in zip(arrivals, decided, strict=True)]
    exact = all(count == (step.emitted if step else 1) for count, _, step in steps[:-1])
    return steps if exact else None


def pieces_of(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text of each token after others; of a character that takes several tokens, the last has it."""
    if tokenizer is None:
        return [f" {token}" for token in tokens]
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.push(before)
    detokenizer.rest()
    pieces = [detokenizer.push([token]) for token in tokens]
    if pieces:
        pieces[-1] += detokenizer.rest()
    return pieces


def standing(answer: Replay, ms: float) -> Standing:
    """Where an answer stands so many milliseconds after the call."""
    done = [step for step in answer["steps"] if step["ms"] <= ms]
    coming = answer["steps"][len(done) : len(done) + 1]
    drafting = next((step for step in coming if step["drafted_ms"] <= ms), None)
    return Standing(len(done), sum(step["tokens"] for step in done), drafting)


def by_step(answer: Replay) -> list[tuple[list[str], Step]]:
    """The pieces of text that each step added, with it."""
    pieces = iter(answer["pieces"])
    return [(list(islice(pieces, step["tokens"])), step) for step in answer["steps"]]


def figures(answer: Replay, ms: float) -> str:
    """How fast an answer is so far, in a line."""
    now = standing(answer, ms)
    speed = f"{now.tokens_per_second(ms):.1f} tokens/s · τ {now.tokens_per_round:.2f}"
    return f"{speed} · {now.tokens} tokens · {ms / 1e3:.2f} s"


def closing(plain: Replay, drafted: Replay) -> str:
    """What came of a race, in a sentence."""
    speeds = [len(answer["tokens"]) / end_ms(answer) for answer in (drafted, plain)]
    length = min(len(drafted["tokens"]), len(plain["tokens"]))
    same = drafted["tokens"][:length] == plain["tokens"][:length]
    words = "the same text" if same else "the texts differ"
    if not any(step["nodes"] for step in drafted["steps"]):
        words += "; nothing was drafted, because plain decoding was faster"
    return f"{label_of(drafted['name'])}: {speeds[0] / speeds[1]:.2f}x the speed of {label_of(plain['name'])}, {words}."


def end_ms(answer: Replay) -> float:
    """When the last token was there."""
    return answer["steps"][-1]["ms"]


def beginning(answer: Replay, tokens: int) -> Replay:
    """The first rounds of an answer, of so many tokens at most; the prefill in any case."""
    steps, count = answer["steps"][:1], answer["steps"][0]["tokens"]
    for step in answer["steps"][1:]:
        if count + step["tokens"] > tokens:
            break
        steps, count = [*steps, step], count + step["tokens"]
    return {**answer, "tokens": answer["tokens"][:count], "pieces": answer["pieces"][:count], "steps": steps}


def featured(races: Sequence[Race]) -> Race:
    """The race in the middle, which flatters nobody."""
    return races[len(races) // 2]


def contestants(race: Race) -> list[Replay]:
    """Plain decoding, and what is run by default where it was measured, else the drafter under test."""
    return [race["answers"][0], race["answers"][-1]]


def place(race: Race) -> str:
    """Where a prompt stands among those that were measured.

    >>> [place({"rank": rank, "ranked": 12}) for rank in (1, 4, 12)]
    ['highest speed-up of 12', 'speed-up 4 of 12', 'lowest speed-up of 12']
    """
    if race["rank"] in (1, race["ranked"]):
        return f"{'highest' if race['rank'] == 1 else 'lowest'} speed-up of {race['ranked']}"
    return f"speed-up {race['rank']} of {race['ranked']}"
