"""A planted shift of the traffic: what heads that adapt are worth beside frozen ones and ones trained offline.

    python benchmarks/adapting.py --run runs/quickstart

Requests as the run knows them come first, then those of a kind that it never saw (programs in Python), then the
former again. Time is simulated: requests arrive at a constant rate, an update begins whenever enough are new, and its
heads serve once the processor seconds that it took (states, training, tuning and gate) have passed. The frozen heads
are those of the run; the offline ones learnt, from these, all that the updates learnt, in as many steps, and with
hindsight. Every version is judged on the target's own greedy answers to prompts that no version learnt, of both kinds:
tokens a round of one static tree, so that nothing depends on the clock but when new heads serve. Answers and updates
that are done are kept, so the command can be stopped and given again.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

from record import record
from rich.console import Console

import headstart
from headstart.adapt.gate import rounds_of, tokens_per_round
from headstart.adapt.options import AdaptOptions
from headstart.adapt.update import Update
from headstart.data.conversations.records import Conversation, read_conversations, write_conversations
from headstart.data.prompts.questions import read_questions
from headstart.data.prompts.sources import drawn
from headstart.data.served.log import RequestLog, Served
from headstart.data.served.reading import as_conversation
from headstart.errors import UserError
from headstart.eval.environment import environment
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe
from headstart.support.files import read_json, remove, write_json
from headstart.tree.tree import TreeShape

_VERBS = ["counts", "finds", "removes", "sorts", "prints", "sums", "checks", "joins"]
_THINGS = (
    *("the words of a text", "the even numbers of a list", "the keys of a dictionary", "the lines of a file"),
    *("the dates of a calendar", "the prices of a shop", "the names of some users", "the cells of a table"),
)
_WISHES = (
    *("", " Use a loop.", " Add a docstring.", " Show how it is called.", " Give it type hints.", " Write a class."),
    *(" Handle empty input.",),
)
SHIFTED = drawn(
    [f"Write a Python function that {verb} {thing}.{wish}" for wish, verb, thing in product(_WISHES, _VERBS, _THINGS)],
    seed=0,
)
"""Requests of a kind that the run never saw."""
KINDS = ("own", "shifted")


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
        plan = {"number": 1, "base": 0, "requests": sum(map(len, self.texts)), "own_conversations": 0}
        write_json(self.folder / "plan.json", plan)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("out/adapting"))
    parser.add_argument("--phases", type=int, nargs=3, default=[24, 336, 24], help="requests: own, shifted, own again")
    parser.add_argument("--judged", type=int, default=16, help="prompts of each kind that judge")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--rate", type=float, default=320.0, help="requests an hour")
    parser.add_argument("--requests", type=int, default=64, help="new ones that begin an update")
    parser.add_argument("--recent", type=int, default=192, help="that an update is made of")
    parser.add_argument("--settings", nargs="*", default=["train.epochs=2"], help="of the training")
    options = parser.parse_args(arguments)
    out: Path = options.out
    work = _run_beside(options.run, out / "online")
    target = work.decoded
    traffic = _traffic(work, options, out)
    settings = AdaptOptions(requests=options.requests, recent=options.recent)
    service = Update(work, out / "log", settings, options.settings).service
    paths = headstart.load(service.heads(0), target=target).shape.paths or TreeShape.chain(2).paths

    def judge(folder: Path) -> dict[str, float]:
        heads = headstart.load(folder, target=target).heads
        return {kind: tokens_per_round(rounds_of(target, heads, traffic.judged[kind], paths)) for kind in KINDS}

    worth = {0: judge(service.heads(0))}
    learnt: list[Conversation] = []
    own: dict[str, Conversation] = {}
    serving, done, updates = [(0.0, 0)], 0, []
    log = RequestLog(out / "log", gigabytes=10.0, days=1e5)
    for number in range(options.requests, len(traffic.requests) + 1, options.requests):
        hour = number / options.rate
        if not (out / f"update{number}.json").is_file():
            for place, (_, text) in enumerate(traffic.requests[done:number], done):
                log.add(_served(text, place, options.rate))
            update = Update(work, out / "log", settings, options.settings)
            began = process_time()
            update.train()
            parts = [read_conversations(update.folder / f"{split}.jsonl") for split in ("train", "validation")]
            texts = [[text.to_json() for text in part] for part in parts]
            judged = update.gate()
            took = process_time() - began
            figures = {"hours": hour, "seconds": took, "judged": judged, "learnt": texts}
            write_json(out / f"update{number}.json", figures, indent=None)
        done = number
        known = read_json(out / f"update{number}.json")
        judged = known["judged"]
        if judged["accepted"]:
            serving.append((hour + known["seconds"] / 3600, judged["number"]))
            worth[judged["number"]] = judge(service.heads(judged["number"]))
        for part in known["learnt"]:
            for text in map(Conversation.from_json, part):
                own[text.id] = text
        figures = {name: judged[name] for name in ("number", "accepted", "why", "training")}
        updates.append({"hours": hour, "cpu_seconds": known["seconds"], **figures})
    learnt = list(own.values())
    offline = Offline(
        _run_beside(options.run, out / "offline"),
        out / "offline_log",
        settings,
        [*options.settings, "train.epochs=1000", f"train.steps={sum(each['training']['steps'] for each in updates)}"],
    )
    offline.texts = learnt[len(learnt) // 8 :], learnt[: len(learnt) // 8]
    offline.log.mkdir(parents=True, exist_ok=True)
    with_hindsight = judge(offline.train())
    rows = []
    for number in range(0, len(traffic.requests) + 1, max(1, options.requests // 4)):
        hour = number / options.rate
        kind = traffic.requests[min(number, len(traffic.requests) - 1)][0]
        version = max((pair for pair in serving if pair[0] <= hour), key=lambda pair: pair[0])[1]
        figures = {"served": worth[version][kind], "frozen": worth[0][kind], "offline": with_hindsight[kind]}
        rows.append({"hours": round(hour, 3), "kind": kind, "update": version, **figures})
    record(
        out / "adapting.json",
        what=__doc__.splitlines()[0],
        rows=rows,
        machine=environment(target),
        script=__file__,
        arguments=arguments,
        settings={
            name: getattr(options, name) for name in ("phases", "judged", "tokens", "rate", "requests", "recent")
        },
        details={"updates": updates, "worth": worth, "offline": with_hindsight, "learnt": len(learnt)},
    )
    for row in rows:
        print(row)
    for each in updates:
        print(each)


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


def _served(text: Conversation, place: int, rate: float) -> Served:
    start = text.supervised.index(True)
    moment = 3600 * (place + 1) / rate
    return Served(text.tokens[:start], text.tokens[start:], "end", moment, source=f"user {place % 24}")


if __name__ == "__main__":
    main()
