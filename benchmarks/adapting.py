"""A planted shift of the traffic: what heads that adapt are worth beside frozen ones and ones trained offline.

    python benchmarks/adapting.py --run runs/quickstart

Requests as the run knows them come first, then those of a kind that it never saw (`SHIFTED`), then the former again.
Time is simulated: requests arrive at a constant rate, an update begins whenever enough are new, and its heads serve
once the processor seconds that it took (states, training, tuning and gate) have passed. The frozen heads are those of
the run; the offline ones learnt, from these, all that the updates learnt, in as many steps, and with hindsight. Every
version is judged on the target's own greedy answers to prompts that no version learnt, of both kinds: tokens a round of
one static tree, so that nothing depends on the clock but when new heads serve. Intervals are of a paired bootstrap over
these prompts.

Answers, judgements and updates that are done are kept, so the command can be stopped and given again; an update that
was under way begins anew.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

from record import record
from rich.console import Console
from tables import figures as figures_of

import headstart
from headstart.adapt.gate import Rounds, compared, in_words, rounds_of, tokens_per_round
from headstart.adapt.options import AdaptOptions
from headstart.adapt.update import Update
from headstart.data.conversations.records import Conversation, read_conversations, write_conversations
from headstart.data.prompts.questions import read_questions
from headstart.data.prompts.sources import shuffled
from headstart.data.served.log import PLAN, RequestLog, Served, segments
from headstart.data.served.reading import as_conversation
from headstart.errors import UserError
from headstart.eval.environment import environment
from headstart.heads.io import version_of
from headstart.pipeline.data_stages import conversations
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe
from headstart.support.files import read_json, remove, write_json
from headstart.tree.tree import TreeShape

_VERBS = ["counts", "finds", "removes", "sorts", "prints", "sums", "checks", "joins"]
_THINGS = (
    *("the words of a text", "the even numbers of a list", "the keys of a map", "the lines of a file"),
    *("the dates of a calendar", "the prices of a shop", "the names of some users", "the cells of a table"),
)
_WISHES = (
    *("", " Use a loop.", " Add a comment.", " Show how it is called.", " Use a stream.", " Write a whole class."),
    *(" Handle empty input.",),
)
SHIFTED = shuffled(
    [f"Write a Java method that {verb} {thing}.{wish}" for wish, verb, thing in product(_WISHES, _VERBS, _THINGS)],
    seed=0,
)
"""Requests of a kind that the run never saw."""
MARK = re.compile(r"\bjava\b", re.IGNORECASE)
"""In such a request: how many conversations of the training have it is written beside the results."""
KINDS = ("own", "shifted")
PHASES = ("before", "shifted", "after")


@dataclass(frozen=True)
class Traffic:
    """Answered requests in the order of their arrival, each with its kind, and texts of both kinds to judge by."""

    requests: list[tuple[str, Conversation]]
    judged: dict[str, list[Conversation]]


class Offline(Update):
    """An update that learns given texts with hindsight."""

    texts: tuple[list[Conversation], list[Conversation]]

    def _plan(self) -> None:
        for split, part in zip(("train", "validation"), self.texts, strict=True):
            write_conversations(self._made() / f"{split}.jsonl", part)
        requests, of = sum(map(len, self.texts)), version_of(self.service.heads(0))
        plan = {"of": of, "base": 0, "requests": requests, "own_conversations": 0}
        write_json(self.folder / PLAN, plan)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("out/adapting"))
    parser.add_argument("--phases", type=int, nargs=3, default=[20, 190, 20], help="requests: own, shifted, own again")
    parser.add_argument("--judged", type=int, default=24, help="prompts of each kind that judge")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--rate", type=float, default=320.0, help="requests an hour")
    parser.add_argument("--requests", type=int, default=80, help="new ones that begin an update")
    parser.add_argument("--recent", type=int, default=240, help="that an update is made of")
    parser.add_argument("--settings", nargs="*", default=[], help="of the training")
    options = parser.parse_args(arguments)
    out: Path = options.out
    work = _run_beside(options.run, out / "online")
    target = work.decoded
    traffic = _traffic(work, options, out)
    settings = AdaptOptions(requests=options.requests, recent=options.recent)
    service = Update(work, out / "log", settings, options.settings).service
    paths = headstart.load(service.heads(0), target=target).shape.paths or TreeShape.chain(2).paths

    def judge(name: str, folder: Path) -> dict[str, Rounds]:
        """What a version comes to on the texts of each kind."""
        file = out / f"judged_{name}.json"
        if not file.is_file():
            heads = headstart.load(folder, target=target).heads
            write_json(file, {kind: rounds_of(target, heads, traffic.judged[kind], paths) for kind in KINDS})
        return dict(read_json(file))

    worth = {0: judge("0", service.heads(0))}
    learnt: dict[str, Conversation] = {}
    serving, updates = [(0.0, 0)], []
    for number in range(options.requests, len(traffic.requests) + 1, options.requests):
        hour, file = number / options.rate, out / f"update{number}.json"
        if not file.is_file():
            _write_log(out / "log", traffic, number, options.rate)
            update = Update(work, out / "log", settings, options.settings)
            remove(update.folder)
            began = process_time()
            update.train()
            parts = [read_conversations(update.folder / f"{split}.jsonl") for split in ("train", "validation")]
            judged = update.gate()
            figures = {"seconds": process_time() - began, "judged": judged}
            write_json(file, {**figures, "learnt": [text.to_json() for part in parts for text in part]}, indent=None)
            print(in_words(judged["later"]), *map(in_words, judged["own"].values()), judged["why"], flush=True)
        known = read_json(file)
        judged, seconds = known["judged"], known["seconds"]
        if judged["accepted"]:
            serving.append((hour + seconds / 3600, judged["number"]))
            worth[judged["number"]] = judge(str(judged["number"]), service.heads(judged["number"]))
        learnt |= {text.id: text for text in map(Conversation.from_json, known["learnt"])}
        updates.append(_row_of_update(judged, hour, seconds))
    texts = list(learnt.values())
    offline = Offline(
        _run_beside(options.run, out / "offline"),
        out / "offline_log",
        settings,
        [*options.settings, "train.epochs=1000", f"train.steps={sum(each['steps'] for each in updates)}"],
    )
    offline.texts = texts[len(texts) // 8 :], texts[: len(texts) // 8]
    offline.log.mkdir(parents=True, exist_ok=True)
    versions = {"frozen": worth[0], "offline": judge("offline", offline.train())}
    rows = []
    for hour, phase, version in _changes(options.phases, options.rate, serving):
        kind = KINDS[phase == 1]
        row = {"name": f"{PHASES[phase]}, update {version}", "hours": hour, "update": version}
        row |= {name: tokens_per_round(of[kind]) for name, of in {"served": worth[version], **versions}.items()}
        change = compared(worth[version][kind], worth[0][kind], traffic.judged[kind])["change"]
        rows.append({**row, "over_frozen": _times(change)})
    used = ("phases", "judged", "tokens", "rate", "requests", "recent", "settings")
    common: dict[str, Any] = {
        "machine": environment(target),
        "script": __file__,
        "arguments": arguments,
        "settings": {name: getattr(options, name) for name in used},
    }
    before, shifted, after = options.phases
    what = (
        f"A planted shift: {before} requests as the training knew them, {shifted} for Java methods, {after} as before, "
        f"{options.rate:g} an hour in simulated time. Tokens a round of one static tree; {options.judged} prompts of "
        f"each kind judge, answers of at most {options.tokens} tokens."
    )
    record(out / "adapting.json", what, rows, **common, details={"learnt": len(texts), "seen": _seen(work)})
    what = (
        f"The updates of this shift, each after {options.requests} new requests and made of the newest "
        f"{options.recent}, judged at the default limits: tokens a round over those of the heads in service before."
    )
    record(out / "adapting_updates.json", what, updates, **common)
    print(figures_of(rows), figures_of(updates), sep="\n\n")


def _row_of_update(judged: Mapping[str, Any], hour: float, seconds: float) -> dict[str, Any]:
    own = [figures["change"] for figures in judged["own"].values()]
    return {
        "number": judged["number"],
        "hours": hour,
        "accepted": judged["accepted"],
        "steps": judged["training"]["steps"],
        "cpu_seconds": seconds,
        "over_before_on_later": _times(judged["later"]["change"]),
        "over_before_on_own": _times(own[0]),
        "over_the_run_on_own": _times(own[-1]),
        "why": " ".join(judged["why"]),
    }


def _times(change: Mapping[str, float | None]) -> dict[str, float | None]:
    """A relative change with its interval, as a ratio."""
    return {end: None if value is None else 1 + value for end, value in change.items()}


def _changes(phases: Sequence[int], rate: float, serving: Sequence[tuple[float, int]]) -> list[tuple[float, int, int]]:
    """When requests or heads change: hours, phase and version.

    >>> _changes([10, 20, 10], 10.0, [(0.0, 0), (1.5, 1)])
    [(0.0, 0, 0), (1.0, 1, 0), (1.5, 1, 1), (3.0, 2, 1)]
    """
    begins = [sum(phases[:phase]) / rate for phase in range(len(phases))]
    moments = {*begins, *(hour for hour, _ in serving if hour < sum(phases) / rate)}
    return [
        (hour, sum(begin <= hour for begin in begins) - 1, max(number for at, number in serving if at <= hour))
        for hour in sorted(moments)
    ]


def _run_beside(run: Path, folder: Path) -> Run:
    """A copy of a run whose heads may change; what runs share is not copied."""
    copied = folder / "run"
    if not copied.is_dir():
        skipped = shutil.ignore_patterns("adapt", "lock", "report")
        shutil.copytree(run, copied, symlinks=True, ignore=skipped)
        remove(folder / "artifacts")
        (folder / "artifacts").symlink_to((run.resolve().parent / "artifacts"), target_is_directory=True)
    return Run(load_recipe(str(copied / "recipe.yaml")), copied, Console(quiet=True))


def _traffic(run: Run, options: Any, out: Path) -> Traffic:
    """The target's greedy answers, kept in files."""
    asked = {
        "own": [question.turns[0] for question in read_questions(run.folder / "data" / "heldout.jsonl")],
        "shifted": SHIFTED,
    }
    judged = {kind: prompts[: options.judged] for kind, prompts in asked.items()}
    before, shifted, after = options.phases
    own, programs = (asked[kind][options.judged :] for kind in KINDS)
    if before + after > len(own) or shifted > len(programs):
        raise UserError(f"There are {len(own)} and {len(programs)} prompts left.", "Lower --phases or --judged.")
    in_order = [("own", text) for text in own[:before]]
    in_order += [("shifted", text) for text in programs[:shifted]]
    in_order += [("own", text) for text in own[before : before + after]]
    answered = _answered(run, [text for _, text in in_order], options.tokens, out / "requests.jsonl")
    kinds = [kind for kind, _ in in_order]
    return Traffic(
        list(zip(kinds, answered, strict=True)),
        {kind: _answered(run, texts, options.tokens, out / f"{kind}.jsonl") for kind, texts in judged.items()},
    )


def _answered(run: Run, prompts: Sequence[str], tokens: int, file: Path) -> list[Conversation]:
    if not file.is_file():
        decoder, texts = headstart.load(run.folder / "heads", target=run.decoded), []
        for start in range(0, len(prompts), 32):
            rows = [decoder.tokens(text) for text in prompts[start : start + 32]]
            answers = decoder.generate_batch(rows, max_new_tokens=tokens, draft="off")
            for place, (row, answer) in enumerate(zip(rows, answers, strict=True), start):
                text = as_conversation(Served(row, answer.tokens, answer.finish_reason, float(place)))
                texts.append(text)
            print(f"{file.name}: {len(texts)} of {len(prompts)}", flush=True)
        write_conversations(file, texts)
    return read_conversations(file)


def _write_log(folder: Path, traffic: Traffic, count: int, rate: float) -> None:
    """The first requests, each but once."""
    log = RequestLog(folder, gigabytes=10.0, days=1e5)
    there = sum(len(file.read_bytes().splitlines()) for file in segments(folder))
    for place, (_, text) in enumerate(traffic.requests[there:count], there):
        log.add(_served(text, place, rate))


def _seen(run: Run) -> dict[str, int]:
    """Conversations of the training, and those with a request of the shifted kind."""
    texts = conversations(run, "train")
    of_kind = [text for text in texts if any(MARK.search(str(message["content"])) for message in text.messages[:1])]
    return {"conversations": len(texts), "of_the_shifted_kind": len(of_kind)}


def _served(text: Conversation, place: int, rate: float) -> Served:
    start = text.supervised.index(True)
    moment = 3600 * (place + 1) / rate
    return Served(list(text.tokens[:start]), list(text.tokens[start:]), "end", moment, source=f"user {place % 24}")


if __name__ == "__main__":
    main()
