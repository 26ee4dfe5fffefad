"""Timed rounds of a few answers, enough to replay them in real time.

Pages, pictures and the terminal draw each race from a `Race`; results.json stores a report's as `replays`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, islice, takewhile
from typing import Any, NamedTuple, TypedDict

from headstart.decode.texts import Round
from headstart.errors import UserError
from headstart.eval.figures import Unit
from headstart.eval.labels import HEADS, HEADS_NGRAM, OTHER, PLAIN, label_of
from headstart.eval.methods import Run
from headstart.support.detokenizer import IncrementalDetokenizer

SHOWN = 5  # maximum number of prompts with replays: from the highest to the lowest speed-up
LINGER_MS = 150.0  # time that rejected drafts stay visible, unless the next drafts come earlier
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f\\ud800-\\udfff\\ufffe\\uffff]")
_CONTEXT = 8  # preceding tokens for detokenizing drafts


class Step(TypedDict):
    """A round of an answer; the first is the prefill, which drafts nothing. Times are since the call."""

    ms: float  # when the drafts were verified
    tokens: int  # tokens of the answer: `accepted` drafts, then the target's own unless the answer ends
    drafted_ms: float  # when the drafts were ready
    nodes: int  # verified drafts
    kept: int  # accepted drafts at the start of the likeliest path
    accepted: int  # all accepted drafts; exceeds `kept` if the accepted path leaves the likeliest one
    rejected: str  # the rest of the likeliest path, as text


class Replay(TypedDict):
    """An answer: its token ids, the text of each token (joined, the answer), and its rounds."""

    name: str
    tokens: list[int]
    pieces: list[str]
    steps: list[Step]


class Race(TypedDict):
    """The answers of several methods to a prompt, plain decoding first."""

    id: str  # of the prompt, as in `per_prompt`
    question: str  # the last user message
    rank: int  # by speed-up of the default drafter if measured, else of the tested one; 1 is the highest
    ranked: int  # number of ranked prompts
    answers: list[Replay]


class State(NamedTuple):
    """State of an answer at some time. `drafting` is the step with pending drafts."""

    steps: int
    tokens: int
    drafting: Step | None

    def tokens_per_second(self, ms: float) -> float:
        """Return the speed since the call, prefill included; `ms` is the time of this state."""
        return 1e3 * self.tokens / ms if ms else 0.0

    @property
    def tokens_per_round(self) -> float:
        """τ so far, without the prefill's token; 1 before any round."""
        return (self.tokens - 1) / (self.steps - 1) if self.steps > 1 else 1.0


def races(units: Sequence[Unit], tokenizer: Any, drafter: str) -> list[Race]:
    """Select the answers to replay, sorted by speed-up. `drafter` names the tested drafter."""
    names = {PLAIN: PLAIN, HEADS: drafter, OTHER + HEADS_NGRAM: HEADS_NGRAM}
    ranked = []
    for unit in units:
        for row, prompt in enumerate(unit.prompts):
            runs = [(method, unit.runs[method]) for method in names if method in unit.runs]
            if all(run.tokens[row] and _arrivals(run, row) for _, run in runs):
                plain, drafted = unit.runs[PLAIN].token_ms[row], runs[-1][1].token_ms[row]
                speedup = (len(drafted) / drafted[-1]) / (len(plain) / plain[-1])
                ranked.append((speedup, prompt, runs, row))
    ranked.sort(key=lambda entry: -entry[0])
    return [
        {
            "id": prompt.id,
            "question": prompt.question,
            "rank": index + 1,
            "ranked": len(ranked),
            "answers": [replay(names[method], run, row, tokenizer) for method, run in runs],
        }
        for index in spread(len(ranked), SHOWN)
        for _, prompt, runs, row in ranked[index : index + 1]
    ]


def printable(text: str) -> str:
    """Replace control characters other than newlines and tabs: SVG forbids them, and a terminal obeys them.

    >>> printable("a\\x1b[31mb\\n") == "a\\ufffd[31mb\\n"
    True
    """
    return _CONTROLS.sub("\ufffd", text)


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices of a list, evenly spaced from the first to the last.

    >>> spread(12, 5), spread(2, 5), spread(0, 5)
    ([0, 3, 6, 8, 11], [0, 1], [])
    """
    size = min(count, most)
    return [round(number * (count - 1) / max(1, size - 1)) for number in range(size)]


def replay(name: str, run: Run, row: int, tokenizer: Any) -> Replay:
    """Return the replay of a row's answer.

    Raises:
        UserError: decoding restarted for lack of memory, so the rounds do not match the answer.
    """
    arrivals = _arrivals(run, row)
    if not arrivals:
        problem = "Memory ran out during decoding, and the answer had to start again."
        raise UserError(problem, "Lower --max-new-tokens.")
    tokens, before, previous_ms = run.tokens[row], 0, 0.0
    steps: list[Step] = []
    for count, ms, round_ in arrivals:
        drafts = list(round_.likeliest) if round_ else []
        accepted = min(round_.emitted - 1, count) if round_ else 0
        pairs = zip(drafts, tokens[before : before + accepted], strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        drafted_ms = min(ms, previous_ms + round_.draft_ms) if drafts and round_ else ms
        texts = token_texts(tokenizer, tokens[max(0, before - _CONTEXT) : before], drafts)
        steps.append(
            {
                "ms": round(ms, 2),
                "tokens": count,
                "drafted_ms": round(drafted_ms, 2),
                "nodes": round_.nodes - 1 if round_ else 0,
                "kept": kept,
                "accepted": accepted,
                "rejected": "".join(texts[kept:]),
            }
        )
        before, previous_ms = before + count, ms
    return {"name": name, "tokens": tokens, "pieces": token_texts(tokenizer, [], tokens), "steps": steps}


def _arrivals(run: Run, row: int) -> list[tuple[int, float, Round | None]]:
    """Return tokens, time and round of each arrival; empty after a restart for lack of memory, when they mismatch."""
    arrivals = [(len(list(together)), ms) for ms, together in groupby(run.token_ms[row])]
    if not run.rounds or not run.rounds[row]:
        return [(count, ms, None) for count, ms in arrivals]
    rounds: list[Round | None] = [None, *run.rounds[row]]  # the prefill has none
    if len(rounds) != len(arrivals):
        return []
    steps = [(count, ms, round_) for (count, ms), round_ in zip(arrivals, rounds, strict=True)]
    return steps if all(count == (round_.emitted if round_ else 1) for count, _, round_ in steps[:-1]) else []


def token_texts(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds after the tokens `before`; a character made of several tokens belongs to the
    last of them."""
    if tokenizer is None:
        return [f" {token}" for token in tokens]
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.push(before)
    detokenizer.flush()
    texts = [detokenizer.push([token]) for token in tokens]
    if texts:
        texts[-1] += detokenizer.flush()
    return texts


def state_at(answer: Replay, ms: float) -> State:
    """Return the state of an answer `ms` milliseconds after the call."""
    done = [step for step in answer["steps"] if step["ms"] <= ms]
    drafting = next((step for step in answer["steps"][len(done) :][:1] if step["drafted_ms"] <= ms), None)
    return State(len(done), sum(step["tokens"] for step in done), drafting)


def by_step(answer: Replay) -> list[tuple[list[str], Step]]:
    """Return each step with the pieces of text that it added."""
    pieces = iter(answer["pieces"])
    return [(list(islice(pieces, step["tokens"])), step) for step in answer["steps"]]


def status_line(answer: Replay, ms: float) -> str:
    now = state_at(answer, ms)
    speed = f"{now.tokens_per_second(ms):.1f} tokens/s · τ {now.tokens_per_round:.2f}"
    return f"{speed} · {now.tokens} tokens · {ms / 1e3:.2f} s"


def conclusion(plain: Replay, drafted: Replay) -> str:
    speeds = [len(answer["tokens"]) / end_ms(answer) for answer in (drafted, plain)]
    length = min(len(drafted["tokens"]), len(plain["tokens"]))
    same = drafted["tokens"][:length] == plain["tokens"][:length]
    words = "the same text" if same else "the texts differ"
    if not any(step["nodes"] for step in drafted["steps"]):
        words += "; nothing was drafted"
    return f"{label_of(drafted['name'])}: {speeds[0] / speeds[1]:.2f}x the speed of {label_of(plain['name'])}, {words}."


def end_ms(answer: Replay) -> float:
    return answer["steps"][-1]["ms"]


def truncate(answer: Replay, tokens: int) -> Replay:
    """Truncate an answer to whole rounds of at most `tokens` tokens; keep the prefill in any case."""
    counts = list(accumulate(step["tokens"] for step in answer["steps"]))
    steps = answer["steps"][: max(1, bisect_right(counts, tokens))]
    count = counts[len(steps) - 1]
    return {**answer, "tokens": answer["tokens"][:count], "pieces": answer["pieces"][:count], "steps": steps}


def median_race(races: Sequence[Race]) -> Race:
    """Return the race with the median speed-up."""
    return races[len(races) // 2]


def contestants(race: Race) -> list[Replay]:
    """Return plain decoding, and the default drafter if it was measured, else the tested one."""
    return [race["answers"][0], race["answers"][-1]]


def rank_text(race: Race) -> str:
    """Describe the rank of a prompt.

    >>> [rank_text({"rank": rank, "ranked": 12}) for rank in (1, 4, 12)]
    ['highest speed-up of 12', 'speed-up 4 of 12', 'lowest speed-up of 12']
    """
    if race["rank"] in (1, race["ranked"]):
        return f"{'highest' if race['rank'] == 1 else 'lowest'} speed-up of {race['ranked']}"
    return f"speed-up {race['rank']} of {race['ranked']}"
