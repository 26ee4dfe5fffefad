"""Is drafting ever slower than plain decoding? Every condition, batch size and answer length in one table.

    python benchmarks/never_slower.py runs/quickstart/heads
    python benchmarks/never_slower.py runs/quickstart/heads --quick

Each cell decodes the same prompts plainly, with the heads, with the default drafter and plainly once more, in turns,
another one going first each time, and all of it --repeats times with loops that have learned nothing yet. What it
says is tokens a second over those of all plain runs; the second plain runs over the first say how far the hour's noise
reaches. Where no round drafted, the same was computed as plainly, and what differs from 1 is noise. The default drafter
runs once more with draft="on", which verifies every round: where drafts pay, what deciding keeps is "default" over
"always". The conditions:

    as tuned           bfloat16, all threads
    float32            the same heads in float32
    one thread         bfloat16 with one thread
    claims: ...        costs that are wrong and claim to be of this machine: only what rounds take can tell
    tuned elsewhere    costs of another machine that say so: measured again before the clock starts
    nothing accepted   drafts that are always wrong, at the price of right ones
    N tokens           answers cut so short

The bar is 0.97 in every cell. Run it on a quiet machine; --conditions and --batches choose a part.
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

import torch
from record import record
from tables import table

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
    "Heads in every condition, the methods in turns. Machine, dtype and threads are those of the first condition; "
    '"plain again" is the second plain runs over the first: the noise of the hour. "always" is the default, drafting '
    "every round."
)
DRAFTERS = ("heads", DEFAULT)
NOISE = "plain again"
ALWAYS = "always"
"""The default drafter, which drafts every round whatever that costs."""


@dataclass(frozen=True)
class Condition:
    """One row of the table.

    Attributes:
        name: of the row.
        dtype: of the target and the heads; None for the one that was asked for.
        threads: that torch computes with; None for all.
        tokens: of an answer at most; None for what was asked for.
        tuning: changes what the heads say was measured.
        wrong: whether drafts are always wrong.
    """

    name: str
    dtype: str | None = None
    threads: int | None = None
    tokens: int | None = None
    tuning: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    wrong: bool = False


def flat(tuning: dict[str, Any]) -> dict[str, Any]:
    """A GPU's: trees cost no more than a token."""
    return {**tuning, "verify_ms": [tuning["verify_ms"][0]] * len(tuning["widths"])}


def steep(tuning: dict[str, Any]) -> dict[str, Any]:
    """Each token of a tree costs as much as a token alone."""
    return {**tuning, "verify_ms": [tuning["verify_ms"][0] * width for width in tuning["widths"]]}


def drafts(factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Drafts that cost so many times what was measured."""
    return lambda tuning: {
        **tuning,
        **{key: factor * tuning.get(key, 0.0) for key in ("draft_ms", "level_ms", "read_ms")},
    }


CONDITIONS = (
    Condition("as tuned"),
    Condition("float32", dtype="float32"),
    Condition("one thread", threads=1),
    Condition("claims: a GPU's trees", tuning=flat),
    Condition("claims: dear trees", tuning=steep),
    Condition("claims: cheap drafts", tuning=drafts(0.1)),
    Condition("claims: dear drafts", tuning=drafts(10.0)),
    Condition("tuned elsewhere", tuning=lambda tuning: elsewhere(flat(tuning))),
    Condition("nothing accepted", wrong=True),
    *(Condition(f"{tokens} tokens", tokens=tokens) for tokens in (8, 20, 40)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="a folder of heads")
    parser.add_argument("--out", type=Path, default=Path("out/never_slower.json"), help="for all figures")
    parser.add_argument("--questions", type=Path, help="JSONL, as of `headstart eval`; by default a few of our own")
    parser.add_argument(
        "--limit", type=int, default=len(PROMPTS), help="prompts of each cell; more than a batch's rows"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=1, help="times that each cell starts anew; more give less noise")
    parser.add_argument("--conditions", nargs="+", choices=[condition.name for condition in CONDITIONS], metavar="NAME")
    parser.add_argument("--target", help="where it is, when it is not where the heads say")
    parser.add_argument("--dtype", default="auto", help="that the heads were tuned in")
    parser.add_argument("--quick", action="store_true", help="two prompts, batches of 1 and 2, 8 tokens: does it run?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.limit, options.batches, options.max_new_tokens = 2, [1, 2], 8

    chosen = [
        condition for condition in CONDITIONS if options.conditions is None or condition.name in options.conditions
    ]
    rows: list[dict[str, Any]] = []
    threads, targets = torch.get_num_threads(), dict[str, Target]()
    machine: dict[str, Any] = {}
    settings = {
        "bar": BAR,
        "max_new_tokens": options.max_new_tokens,
        "prompts": options.limit,
        "repeats": options.repeats,
    }
    with tempfile.TemporaryDirectory() as cache:
        for condition in chosen:
            torch.set_num_threads(condition.threads or threads)
            dtype = condition.dtype or options.dtype
            if dtype not in targets:
                targets = {dtype: options_target(options, dtype)}
            decoder = decoder_of(condition, options.heads, targets[dtype], Path(cache))
            machine = machine or environment(decoder.target)
            prompts = prompts_of(decoder.target, options.questions, options.limit)
            tokens = min(condition.tokens or options.max_new_tokens, options.max_new_tokens)
            for batch in options.batches:
                rows.append(
                    {
                        "condition": condition.name,
                        "batch": batch,
                        **cell(decoder, prompts, batch, tokens, options.repeats),
                    }
                )
                print(line(rows[-1]), flush=True)
                record(options.out, WHAT, rows, machine, __file__, arguments, settings)
    torch.set_num_threads(threads)
    print(report(rows))


def options_target(options: argparse.Namespace, dtype: str) -> Target:
    """The target that the heads name, or the one asked for."""
    return load_target(options.target, dtype) if options.target else headstart.load(options.heads, dtype=dtype).target


def decoder_of(condition: Condition, heads: str, target: Target, cache: Path) -> Decoder:
    """The heads under a condition, with everything measured that has to be."""
    decoder = headstart.load(heads, target)
    tuning = here(decoder.calibration, target) if condition.tuning else decoder.calibration
    if condition.tuning:
        tuning = condition.tuning(tuning)
    drafting = wrong(decoder.heads) if condition.wrong else decoder.heads
    decoder = Decoder(target, drafting, decoder.shape, tuning)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)  # measured now, once, and never taken from an earlier hour
    try:
        assert decoder.costs is not None, "exported heads have a tuning"
    finally:
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)
    return decoder


def here(tuning: dict[str, Any], target: Target) -> dict[str, Any]:
    """A tuning that claims to be of this machine."""
    return {**tuning, "settings": {**tuning["settings"], "conditions": Conditions.of(target).to_json()}}


def elsewhere(tuning: dict[str, Any]) -> dict[str, Any]:
    """A tuning that says that it is of another machine."""
    conditions = {**tuning["settings"]["conditions"], "machine": "another machine"}
    return {**tuning, "settings": {**tuning["settings"], "conditions": conditions}}


def wrong(heads: DraftHead) -> DraftHead:
    """Heads that mean the neighbour of each token that they draft: as dear as before, and never right."""
    other = copy.deepcopy(heads)
    other.draft_to_target_D.copy_(heads.draft_to_target_D.roll(1))
    return other


def prompts_of(target: Target, questions: Path | None, limit: int) -> list[list[int]]:
    """Prompts as the target reads them."""
    texts = [item.turns[0] for item in read_questions(questions)] if questions else list(PROMPTS)
    return [prompt_tokens([{"role": "user", "content": text}], target.tokenizer) for text in texts[:limit]]


def cell(decoder: Decoder, prompts: Sequence[list[int]], batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """One cell: all methods in turns over all prompts, so many at a time."""
    names, options = ["plain", *DRAFTERS, ALWAYS, NOISE], DecodeOptions(tokens)
    seconds, emitted = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    rounds, drafted, errors = dict.fromkeys(names, 0), dict.fromkeys(names, 0), set[str]()
    # Small batches come twice, so that what the first call learns is not all there is; large ones are filled up.
    count = max(2, -(-len(prompts) // batch))
    for number in range(count * repeats):
        if number % count == 0:
            plain = DecodeLoop(decoder.target)
            drafting = {name: anew(decoder.loop(name)) for name in DRAFTERS}
            loops = {"plain": plain, **drafting, ALWAYS: anew(decoder.loop(DEFAULT)), NOISE: plain}
            for loop in loops.values():
                loop.generate([prompts[0]] * batch, replace(options, max_new_tokens=2, draft="off"))
        asked = [prompts[(number * batch + row) % len(prompts)] for row in range(batch)]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = perf_counter()
            outputs = loops[name].generate(asked, replace(options, draft="on") if name == ALWAYS else options)
            seconds[name] += perf_counter() - start
            emitted[name] += sum(len(output.tokens) for output in outputs)
            rounds[name] += sum(len(output.rounds) for output in outputs)
            drafted[name] += sum(round.nodes > 1 for output in outputs for round in output.rounds)
            errors |= {output.drafter_error for output in outputs if output.drafter_error}
    speeds = {name: emitted[name] / seconds[name] for name in names}
    plainly = (emitted["plain"] + emitted[NOISE]) / (seconds["plain"] + seconds[NOISE])
    return {
        "tokens": tokens,
        "calls": count * repeats,
        "tokens_per_second": speeds,
        "over_plain": {
            **{name: speeds[name] / plainly for name in (*DRAFTERS, ALWAYS)},
            NOISE: speeds[NOISE] / speeds["plain"],
        },
        "rounds_drafted": {name: drafted[name] / max(1, rounds[name]) for name in DRAFTERS},
        "tokens_per_round": {name: emitted[name] / max(1, rounds[name]) for name in DRAFTERS},
        "drafter_errors": sorted(errors),
    }


def anew(loop: DecodeLoop) -> DecodeLoop:
    """The same drafters and costs, and nothing learned."""
    return DecodeLoop(loop.target, *loop.drafters, costs=loop.costs)


def line(row: Mapping[str, Any]) -> str:
    """A cell as it comes."""
    over = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row["over_plain"].items())
    drafted = " and ".join(f"{share:.0%}" for share in row["rounds_drafted"].values())
    return f"{row['condition']}, batch {row['batch']}: {over}; {drafted} of rounds drafted"


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, and what fell below the bar."""
    head = ["condition", "tokens", "batch", "plain tokens/s", *DRAFTERS, ALWAYS, NOISE, "rounds drafted"]
    lines = [
        [
            row["condition"],
            row["tokens"],
            row["batch"],
            f"{row['tokens_per_second']['plain']:.1f}",
            *(f"{row['over_plain'][name]:.2f}x" for name in (*DRAFTERS, ALWAYS, NOISE)),
            " / ".join(f"{row['rounds_drafted'][name]:.0%}" for name in DRAFTERS),
        ]
        for row in rows
    ]
    below = [(row, name) for row in rows for name in DRAFTERS if row["over_plain"][name] < BAR]
    noise = [row["over_plain"][NOISE] for row in rows]
    parts = [
        table(head, lines),
        f"Plain over plain, which is the noise of this hour: {min(noise):.2f} to {max(noise):.2f}.",
        f"{2 * len(rows) - len(below)} of {2 * len(rows)} cells are at {BAR} or above.",
        *(
            f"Below: {row['condition']}, batch {row['batch']}, {name}: {row['over_plain'][name]:.3f}."
            for row, name in below
        ),
        *(f"Failed: {row['condition']}: {error}" for row in rows for error in row["drafter_errors"]),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
