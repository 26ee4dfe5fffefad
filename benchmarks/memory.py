"""What the target's earlier answers add to heads and n-grams: expected speed by stored costs, without a clock.

    python benchmarks/memory.py runs/quickstart/heads --questions mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

The target answers once, greedily and plainly; then the decode loop goes over these answers, with all that it decides by
the costs that the heads were tuned with, and a target that knows what comes. A round costs what its nodes and the
levels of its draft cost by the same table, and `LOOK_UP_MS` for the memory. So methods are compared at equal cost:
tokens over milliseconds, over those of plain decoding. Intervals are of a paired bootstrap over the questions.

The last workload is one that repeats itself: 200 requests made of 20 templates in a random order, each answer
remembered before the next request. At the end the memory alone is measured: its size and its searches.

What is done is kept in --out, so that the command can be stopped and given again; another memory or other heads need
another folder.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from arms import answered
from record import record
from tables import table, times

import headstart
from headstart.api import Decoder
from headstart.data.prompts.questions import Question, read_questions
from headstart.decode.costs import Costs
from headstart.decode.loop import DecodeLoop, Drafter
from headstart.decode.options import DecodeOptions
from headstart.drafters.memory import LONGEST, MOST_TOKENS, Index, MemoryDrafter, find
from headstart.eval.environment import environment
from headstart.eval.figures import Interval
from headstart.model.model import Target, TargetOutput
from headstart.support.answer_file import AnswerFile, read_answers
from headstart.support.files import read_json, write_json
from headstart.tree.tree import Request, Tree, TreeBatch
from headstart.tuning.acceptance import Text

WITHOUT, WITH = "heads+ngram", "heads+ngram+memory"
LOOK_UP_MS = 0.1
"""Charged to each drafted round with the memory."""
RESAMPLES = 10_000

TEMPLATES = (
    "Write a short email to {name} to say that the meeting about {topic} has moved to {day}.",
    "Dear support, my order of a {thing} has not arrived. My name is {name}. Please write the reply to the customer.",
    "Write a product description for a {thing} in three sentences.",
    "Write a Python function that counts how often each {thing} occurs in a list, with a docstring.",
    "Extract name, day and topic as JSON: {name} will speak about {topic} on {day}.",
    "Classify the sentiment of this review as positive or negative and explain why: 'The {thing} broke after a day.'",
    "Write a polite refusal to {name}, who asked for a discount on a {thing}.",
    "Make a checklist for a workshop on {topic} that takes place on {day}.",
    "Translate into French: {name} bought a {thing} on {day}.",
    "Write a SQL query that selects all orders of a {thing} by the customer {name}.",
    "Summarise in one sentence: On {day} {name} gave a talk about {topic}, and afterwards everybody asked questions.",
    "Write an agenda for a one hour meeting about {topic} with {name}.",
    "List five interview questions about {topic}.",
    "Write a reminder for {name} to bring a {thing} on {day}.",
    "Explain {topic} to a child of ten years.",
    "Write an HTML form with the fields name, day and {thing}, and a submit button.",
    "Write a thank you note from {name} for a {thing}.",
    "Give the pros and cons of learning about {topic}.",
    "You are a booking assistant. {name} wants to book a table for {day}. Confirm the booking and ask for the time.",
    "Write a bug report: the button with the {thing} on it does nothing when {name} clicks it.",
)
NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Frank", "Grace", "Hassan", "Ines", "Jack")
TOPICS = (
    *("solar energy", "data privacy", "public transport", "healthy food", "machine learning"),
    *("time management", "climate change", "home security", "team work", "online marketing"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "May 3", "June 12", "July 20")
THINGS = ("lamp", "laptop", "backpack", "coffee machine", "bicycle", "watch", "camera", "printer", "chair", "phone")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, help="a folder of heads with answers of their training")
    parser.add_argument("--questions", type=Path, nargs="*", default=[], help="JSONL, as of `headstart eval`")
    parser.add_argument("--limit", type=int, help="questions of each file at most")
    parser.add_argument("--requests", type=int, help="of the templates, at most")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("out/memory"))
    options = parser.parse_args(arguments)

    decoder = headstart.load(options.heads)
    rows = []
    for file in options.questions:
        methods = {name: _drafters(decoder, name) for name in (WITHOUT, WITH)}
        questions = read_questions(file)[: options.limit]
        rows.append(row_of(file.stem, _runs(decoder, methods, questions, options, file.stem), decoder))
        print(report(rows[-1:]), flush=True)
    default = _drafters(decoder, WITHOUT)
    with tempfile.TemporaryDirectory() as folder:
        served = AnswerFile(Path(folder) / "served", decoder.target.identity().fingerprint)
        memory = MemoryDrafter(decoder.target.vocab_size, decoder.answers, served)
        methods = {WITHOUT: default, WITH: (*default, memory)}
        runs = _runs(decoder, methods, requests()[: options.requests], options, "templates", memory)
    rows.append(row_of("requests of 20 templates", runs, decoder))
    print(report(rows[-1:]), flush=True)
    size = measured_index(decoder, MOST_TOKENS if options.requests is None else 20_000)
    record(
        options.out / "memory.json",
        "Expected speed over plain decoding by stored costs, greedy, batch 1, answers replayed without a clock: heads "
        f"with n-grams, and with the memory in the same tree ({LOOK_UP_MS} ms a round charged for it). The memory "
        "holds answers of the training; in the last row also the answers to all earlier requests.",
        rows,
        environment(decoder.target),
        __file__,
        arguments,
        {"max_new_tokens": options.max_new_tokens},
        {"memory": size},
    )
    print(size)


def requests() -> list[Question]:
    """200 requests in a random order, always the same."""
    made = []
    for number, template in enumerate(TEMPLATES):
        for place in range(len(NAMES)):
            words = {
                key: values[(place * step + number) % len(values)]
                for key, values, step in (
                    ("name", NAMES, 1),
                    ("topic", TOPICS, 3),
                    ("day", DAYS, 7),
                    ("thing", THINGS, 9),
                )
            }
            made.append(template.format(**words))
    random.Random(0).shuffle(made)
    return [Question(str(number), "templates", [text]) for number, text in enumerate(made)]


def _runs(
    decoder: Decoder,
    methods: Mapping[str, Sequence[Drafter]],
    questions: Sequence[Question],
    options: argparse.Namespace,
    name: str,
    memory: MemoryDrafter | None = None,
) -> dict[str, list[Cost]]:
    """What each method makes of each answer, one after the other; `memory` remembers them."""
    file = options.out / f"{name}_answers.json"
    texts = answered(decoder.target, questions, file, options.max_new_tokens)
    kept_in = options.out / f"{name}_costs.json"
    kept = read_json(kept_in) if kept_in.is_file() else {}
    runs: dict[str, list[Cost]] = {method: [] for method in methods}
    for number, text in enumerate(texts):
        key = " ".join(map(str, (number, *text.tokens)))
        if key not in kept:
            known = _Known.reading(decoder.target, text, methods.values())
            kept[key] = {method: asdict(replayed(decoder, drafters, known)) for method, drafters in methods.items()}
            write_json(kept_in, kept, indent=None)
        if memory is not None:
            memory.remember(*_parts(text))
        for method, costs in kept[key].items():
            runs[method].append(Cost(**costs))
    return runs


def _drafters(decoder: Decoder, name: str) -> tuple[Drafter, ...]:
    """By the stored costs: nothing is measured."""
    return decoder.loop(name, deterministic=True).drafters


# -- replaying --------------------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """What an answer came to: tokens after the first, rounds, and milliseconds by the stored costs."""

    tokens: int
    rounds: int
    ms: float


class _Noting:
    """A drafter, and how many levels each of its drafts had."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.levels = drafter, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        trees = self.drafter.propose(session, roots, request)
        self.levels.append(trees[0].levels or 0)
        return trees


@dataclass
class _Place:
    """What stands in for a cache: how far the text has come."""

    at: int = 0
    length: int = 0

    def commit(self, paths: Sequence[Sequence[int]], *_: Any) -> None:
        self.at += len(paths[0])


class _Known(Target):
    """A view of a target that reads one text, whose tokens and states are known."""

    def __init__(self, target: Target, text: Text, states: Mapping[int, torch.Tensor]) -> None:
        self.__dict__.update(original=target, end_tokens=frozenset(), text=text, tokens=text.tokens, states=states)

    @classmethod
    def reading(cls, target: Target, text: Text, methods: Iterable[Sequence[Drafter]]) -> _Known:
        """With the states that all of these drafters read."""
        layers = {layer for drafters in methods for drafter in drafters for layer in drafter.aux_layers}
        with torch.inference_mode():
            return cls(target, text, target.hidden_states([text.tokens], sorted(layers))[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def new_cache(self, rows: int, capacity: int) -> Any:
        return _Place()

    def deepest(self, cache: Any) -> int | None:
        return None

    def prefill(self, cache: Any, rows: Sequence[Sequence[int]], aux_layers: Sequence[int] = ()) -> TargetOutput:
        cache.at = len(rows[0])
        read = range(len(rows[0]))
        return self._out([list(read)], aux_layers, only_last=True)

    def forward_tree(self, cache: Any, batch: TreeBatch, aux_layers: Sequence[int] = ()) -> TargetOutput:
        tree, places = batch.trees[0], [cache.at]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            place = places[parent] + 1 if places[parent] >= 0 else -1
            places.append(place if 0 < place < len(self.tokens) and self.tokens[place] == token else -1)
        return self._out([places], aux_layers)

    def _out(self, places: list[list[int]], aux_layers: Sequence[int], only_last: bool = False) -> TargetOutput:
        """Logits and states after the tokens at these places; those of a node that is not on the text mean nothing."""
        chosen = [(node, place) for node, place in enumerate(places[0]) if place >= 0]
        logits_1NV = torch.zeros(1, 1 if only_last else len(places[0]), self.vocab_size)
        for node, place in chosen[-1:] if only_last else chosen:
            following = self.tokens[place + 1] if place + 1 < len(self.tokens) else 0
            logits_1NV[0, 0 if only_last else node, following] = 1.0
        states = {layer: self.states[layer][[max(0, place) for place in places[0]]][None] for layer in aux_layers}
        return TargetOutput(logits_1NV, states)


def replayed(decoder: Decoder, drafters: Sequence[Drafter], known: _Known) -> Cost:
    """Decode an answer that is known, by the stored costs."""
    prompt, answer = _parts(known.text)
    costs = _stored(decoder)
    noting = [_Noting(drafter) for drafter in drafters]
    loop = DecodeLoop(known, *noting, costs=costs)
    options = DecodeOptions(len(answer), deterministic=True, ignore_end=True)
    (done,) = loop.generate([prompt], options)
    assert done.drafter_error is None and done.tokens == answer, "the text is the target's own"
    levels = [iter(each.levels) for each in noting]
    ms = 0.0
    for round_ in done.rounds:
        ms += costs.verify(round_.nodes)
        if not round_.paused:
            ms += costs.draft(max(next(each, 0) for each in levels)) + (LOOK_UP_MS if len(noting) > 2 else 0.0)
    return Cost(len(answer) - 1, len(done.rounds), ms)


def _stored(decoder: Decoder) -> Costs:
    assert decoder.tuning is not None, "heads that were tuned"
    return decoder.tuning.costs


def _parts(text: Text) -> tuple[list[int], list[int]]:
    begin = text.supervised.index(True)
    return text.tokens[:begin], text.tokens[begin:]


# -- figures ----------------------------------------------------------------------------------------------------------


def row_of(name: str, runs: Mapping[str, Sequence[Cost]], decoder: Decoder) -> dict[str, Any]:
    """The figures of a workload."""
    plain_ms = _stored(decoder).verify(1)
    row: dict[str, Any] = {"name": name, "questions": len(runs[WITH])}
    for method, key in ((WITHOUT, "without"), (WITH, "with")):
        tokens, rounds, ms = (sum(getattr(cost, part) for cost in runs[method]) for part in ("tokens", "rounds", "ms"))
        row |= {f"tokens_per_round_{key}": tokens / rounds, f"speedup_{key}": tokens * plain_ms / ms}
    return row | {"over_without": over([cost.ms for cost in runs[WITHOUT]], [cost.ms for cost in runs[WITH]])}


def over(without_ms: Sequence[float], with_ms: Sequence[float], seed: int = 0) -> Interval:
    """How many times as fast the same answers are, with the 95 % interval of a paired bootstrap."""
    pairs = np.array([without_ms, with_ms])
    drawn = np.random.default_rng(seed).integers(0, pairs.shape[1], (RESAMPLES, pairs.shape[1]))
    sums = pairs[:, drawn].sum(-1)
    low, high = np.percentile(sums[0] / sums[1], [2.5, 97.5])
    return {"mean": float(pairs[0].sum() / pairs[1].sum()), "low": float(low), "high": float(high)}


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    head = ["", "questions", "τ without", "τ with", "over plain without", "with", "with over without"]
    keys = ("tokens_per_round_without", "tokens_per_round_with", "speedup_without", "speedup_with")
    return table(
        head,
        [
            [row["name"], row["questions"], *(f"{row[key]:.2f}" for key in keys), times(row["over_without"])]
            for row in rows
        ],
    )


@dataclass
class _Filling:
    """Answers of a kind that there are too few of, with some of their tokens changed at random."""

    answers: list[list[int]]
    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def more(self) -> list[int]:
        answer = list(self.rng.choice(self.answers))
        for _ in range(len(answer) // 12):
            answer[self.rng.randrange(len(answer))] = self.rng.randrange(self.vocab_size)
        return answer


def measured_index(decoder: Decoder, tokens: int) -> dict[str, Any]:
    """An index of so many tokens, filled answer by answer as when serving: bytes, and milliseconds of a search."""
    shipped = read_answers(decoder.answers) if decoder.answers is not None else []
    filling = _Filling(shipped or [[token % 7 for token in range(100)]], decoder.target.vocab_size)
    texts = [filling.more() for _ in range(64)]
    tracemalloc.start()
    index = Index(decoder.target.vocab_size, tokens + 1000)
    started, added = perf_counter(), 0
    while index.size < tokens:
        index.add([filling.more()])
        added += 1
    add_ms = 1e3 * (perf_counter() - started) / added
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    seconds = []
    for text in texts:
        for place in range(LONGEST, len(text)):
            tail = text[place - LONGEST : place]
            started = perf_counter()
            find(index.parts, tail)
            seconds.append(perf_counter() - started)
    median, most = np.percentile(1e3 * np.array(seconds), [50, 95])
    return {
        "tokens": index.size,
        "parts": len(index.parts),
        "megabytes": used / 1e6,
        "look_up_ms": float(median),
        "look_up_ms_95": float(most),
        "add_ms": add_ms,
        "searches": len(seconds),
    }


if __name__ == "__main__":
    main()
