"""Compare drafting with plain decoding in every condition, batch size and answer length.

    python benchmarks/never_slower.py runs/quickstart/heads
    python benchmarks/never_slower.py runs/quickstart/heads --quick

Each cell decodes the same prompts plainly, with the heads, with the default drafter and plainly again, in rotating
order, --repeats times with loops that have learned nothing. Speeds are relative to all plain runs of the cell. "plain
again", the second plain runs over the first, shows the noise. "always" is the default drafter with draft="on": compare
it with the default to see the effect of the budget. The conditions:

    as tuned           bfloat16, all threads
    float32            the same heads in float32
    one thread         bfloat16, one thread
    claims: ...        wrong costs that claim to be of this machine; only timed rounds can correct them
    tuned elsewhere    wrong costs of another machine, measured again before the clock starts
    nothing accepted   drafts that are always wrong, at the usual cost
    N tokens           short answers

The bar is 0.97 in every cell. Run it on a quiet machine; --conditions and --batches select a part.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from record import in_turn, record
from tables import figures

import headstart
from headstart.api import Decoder
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.questions import read_questions
from headstart.decode.costs import Conditions
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.catalog import DEFAULT
from headstart.eval.environment import environment
from headstart.heads.base import DraftHead
from headstart.model.loading import load_target
from headstart.model.model import Target

BAR = 0.97
PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a fox.",
    "Explain how a bicycle stays upright.",
    "List five uses of vinegar in a kitchen.",
    "What is the difference between a star and a planet?",
    "Give me a plan for learning to play the guitar.",
    "Translate 'good morning' into four languages.",
    "Write a polite letter that declines an invitation.",
    "How do I boil an egg?",
    "Summarise the story of Romeo and Juliet.",
    "What should I pack for a week in the mountains?",
    "Explain recursion to a child.",
    "Write a poem about rain.",
    "What are the causes of inflation?",
    "Describe the taste of an orange.",
    "How does a refrigerator work?",
)
WHAT = (
    "Tokens/s over all plain runs of the cell: heads and the default; noise is a second plain run over the first. "
    "Greedy, methods in turns, no costs learned before."
)
DRAFTERS = ("heads", DEFAULT)
NOISE = "plain again"
ALWAYS = "always"

Tuning = dict[str, Any]


@dataclass(frozen=True)
class Condition:
    """One row of the table.

    Attributes:
        name: of the row.
        dtype: of the target and the heads; None for the requested dtype.
        threads: of torch; None for all.
        tokens: longest answer; None for the requested length.
        tuning: changes the calibration of the heads.
        wrong: whether drafts are always wrong.
    """

    name: str
    dtype: str | None = None
    threads: int | None = None
    tokens: int | None = None
    tuning: Callable[[Tuning], Tuning] | None = None
    wrong: bool = False


def verify(factor: Callable[[int], float]) -> Callable[[Tuning], Tuning]:
    """Set the cost of a tree to a multiple of the cost of one token."""
    return lambda tuning: {
        **tuning,
        "verify_ms": [tuning["verify_ms"][0] * factor(nodes) for nodes in tuning["node_counts"]],
    }


def drafts(factor: float) -> Callable[[Tuning], Tuning]:
    """Multiply the costs of drafting."""
    keys = ("draft_ms", "level_ms", "read_ms")
    return lambda tuning: {**tuning, **{key: factor * tuning.get(key, 0.0) for key in keys}}


def elsewhere(tuning: Tuning) -> Tuning:
    """Attribute a tuning to another machine."""
    conditions = {**tuning["settings"]["conditions"], "machine": "another machine"}
    return {**tuning, "settings": {**tuning["settings"], "conditions": conditions}}


FREE = verify(lambda width: 1.0)
CONDITIONS = (
    Condition("as tuned"),
    Condition("float32", dtype="float32"),
    Condition("one thread", threads=1),
    Condition("claims: free trees", tuning=FREE),
    Condition("claims: expensive trees", tuning=verify(float)),
    Condition("claims: cheap drafts", tuning=drafts(0.1)),
    Condition("claims: expensive drafts", tuning=drafts(10.0)),
    Condition("tuned elsewhere", tuning=lambda tuning: elsewhere(FREE(tuning))),
    Condition("nothing accepted", wrong=True),
    *(Condition(f"{tokens} tokens", tokens=tokens) for tokens in (8, 20, 40)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="a folder of heads")
    parser.add_argument("--out", type=Path, default=Path("out/never_slower.json"), help="file for the figures")
    parser.add_argument("--questions", type=Path, help="JSONL, as for `headstart eval`; default: 16 built-in prompts")
    parser.add_argument("--limit", type=int, default=len(PROMPTS), help="prompts per cell")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=1, help="fresh starts of each cell; more give less noise")
    parser.add_argument("--conditions", nargs="+", choices=[condition.name for condition in CONDITIONS], metavar="NAME")
    parser.add_argument("--target", help="target; default: as recorded in the heads")
    parser.add_argument("--dtype", default="auto", help="dtype that the heads were tuned in")
    parser.add_argument("--quick", action="store_true", help="smoke test: two prompts, batches of 1 and 2, 8 tokens")
    options = parser.parse_args(arguments)
    if options.quick:
        options.limit, options.batches, options.max_new_tokens = 2, [1, 2], 8

    rows: list[dict[str, Any]] = []
    threads, targets, machine = torch.get_num_threads(), dict[str, Target](), dict[str, Any]()
    settings = {"bar": BAR, "prompts": options.limit, "repeats": options.repeats}
    settings["max_new_tokens"] = options.max_new_tokens
    with tempfile.TemporaryDirectory() as cache:
        for condition in CONDITIONS:
            if options.conditions and condition.name not in options.conditions:
                continue
            torch.set_num_threads(condition.threads or threads)
            dtype = condition.dtype or options.dtype
            if dtype not in targets:
                targets = {dtype: load(options, dtype)}
            decoder = decoder_of(condition, options.heads, targets[dtype], cache)
            machine = machine or environment(decoder.target)
            prompts = prompts_of(decoder.target, options.questions, options.limit)
            tokens = min(condition.tokens or options.max_new_tokens, options.max_new_tokens)
            rows.append({"condition": condition.name, "tokens": tokens})
            for batch in options.batches:
                for key, value in cell(decoder, prompts, batch, tokens, options.repeats).items():
                    rows[-1].setdefault(key, {})[str(batch)] = value
                print(condition.name, batch, rows[-1]["over_plain"][str(batch)], flush=True)
                record(options.out, WHAT, rows, machine, __file__, arguments, settings)
    torch.set_num_threads(threads)
    print(report(rows))


def load(options: argparse.Namespace, dtype: str) -> Target:
    """Load the requested target; by default the target that the heads name."""
    return load_target(options.target, dtype) if options.target else headstart.load(options.heads, dtype=dtype).target


def decoder_of(condition: Condition, heads: str, target: Target, cache: str) -> Decoder:
    """Return the heads under a condition, with all costs measured."""
    decoder = headstart.load(heads, target)
    tuning = decoder.calibration
    if condition.tuning:
        settings = {**tuning["settings"], "conditions": Conditions.of(target).to_json()}
        tuning = condition.tuning({**tuning, "settings": settings})
    drafting = wrong(decoder.heads) if condition.wrong else decoder.heads
    decoder = Decoder(target, drafting, decoder.shape, tuning)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):  # ignores costs that earlier runs cached
        assert decoder.costs is not None, "exported heads have a tuning"
    return decoder


def wrong(heads: DraftHead) -> DraftHead:
    """Return heads that draft the neighbour of each token: equally expensive and never right."""
    other = copy.deepcopy(heads)
    other.draft_to_target_D.copy_(heads.draft_to_target_D.roll(1))
    return other


def prompts_of(target: Target, questions: Path | None, limit: int) -> list[list[int]]:
    """Return prompts as tokens."""
    texts = [item.turns[0] for item in read_questions(questions)] if questions else list(PROMPTS)
    return [prompt_tokens([{"role": "user", "content": text}], target.tokenizer) for text in texts[:limit]]


def cell(decoder: Decoder, prompts: Sequence[list[int]], batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Measure all methods in turns over all prompts, `batch` at once."""
    names, options = ["plain", *DRAFTERS, ALWAYS, NOISE], DecodeOptions(tokens)
    seconds, emitted = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    rounds, drafted, errors = dict.fromkeys(names, 0), dict.fromkeys(names, 0), set[str]()
    # At least two calls, because a loop learns from its first; large batches wrap around the prompts.
    count = max(2, -(-len(prompts) // batch))
    for number in range(count * repeats):
        if number % count == 0:
            plain = DecodeLoop(decoder.target)
            drafting = {name: anew(decoder.loop(name)) for name in DRAFTERS}
            loops = {"plain": plain, **drafting, ALWAYS: anew(decoder.loop(DEFAULT)), NOISE: plain}
            for loop in loops.values():
                loop.generate([prompts[0]] * batch, replace(options, max_new_tokens=2, draft="off"))
        asked = [prompts[(number * batch + row) % len(prompts)] for row in range(batch)]
        for name in in_turn(names, number):
            start = perf_counter()
            outputs = loops[name].generate(asked, replace(options, draft="on") if name == ALWAYS else options)
            seconds[name] += perf_counter() - start
            emitted[name] += sum(len(output.tokens) for output in outputs)
            rounds[name] += sum(len(output.rounds) for output in outputs)
            drafted[name] += sum(round.nodes > 1 for output in outputs for round in output.rounds)
            errors |= {output.drafter_error for output in outputs if output.drafter_error}
    speeds = {name: emitted[name] / seconds[name] for name in names}
    plainly = (emitted["plain"] + emitted[NOISE]) / (seconds["plain"] + seconds[NOISE])
    over_plain = {name: speeds[name] / plainly for name in (*DRAFTERS, ALWAYS)}
    return {
        "calls": count * repeats,
        "tokens_per_second": speeds,
        "over_plain": {**over_plain, NOISE: speeds[NOISE] / speeds["plain"]},
        "rounds_drafted": {name: drafted[name] / max(1, rounds[name]) for name in DRAFTERS},
        "tokens_per_round": {name: emitted[name] / max(1, rounds[name]) for name in DRAFTERS},
        "drafter_errors": sorted(errors),
    }


def anew(loop: DecodeLoop) -> DecodeLoop:
    """Return a loop with the same drafters and costs that has learned nothing."""
    return DecodeLoop(loop.target, *loop.drafters, costs=loop.costs)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, and the cells below the bar."""
    batches = list(rows[0]["over_plain"])
    columns = [f"over_plain.{batch}.{name}" for batch in batches for name in (*DRAFTERS, ALWAYS, NOISE)]
    cells = [
        (f"{row['condition']}, batch {batch}, {name}", row["over_plain"][batch][name])
        for row in rows
        for batch in batches
        for name in DRAFTERS
    ]
    below = [f"Below: {name}: {ratio:.3f}." for name, ratio in cells if ratio < BAR]
    failed = [
        f"Failed: {row['condition']}: {error}"
        for row in rows
        for errors in row["drafter_errors"].values()
        for error in errors
    ]
    reached = f"{len(cells) - len(below)} of {len(cells)} cells are at {BAR} or above."
    return "\n\n".join([figures(rows, ["condition", *columns]), reached, *below, *failed])


if __name__ == "__main__":
    main()
