"""How often a decode round makes the host wait for the device, sends it something and launches an operation.

    python benchmarks/device_waits.py [--families medusa eagle3] [--rows 1 16] [--out FILE.json] [--where]

Counted under the stand-in device of the tests, on a tiny random Llama: the counts are those of the code, not of a
machine. Heads are untrained, so that what is accepted are mostly n-grams. A round goes from the forward that verifies
its drafts to just before the next one; a CUDA graph is one launch. Graphs have been captured before.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from record import record

from headstart.decode.loop import DecodeLoop, Drafter
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.heads.base import family, make_config
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.standin import CUDA, Round, StandIn, rounds_of
from tests.tiny import tiny_model

VOCAB = 61
COLUMNS = ("waits", "uploads", "slow_uploads", "launches", "graphs")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=["medusa", "eagle3"], help="of heads, in their defaults")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16], help="prompts of a batch")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--out", type=Path, help="where the counts go, as JSON")
    parser.add_argument("--where", action="store_true", help="print the lines that wait and upload, too")
    options = parser.parse_args(arguments)

    results = []
    with StandIn() as device:
        target = Target(tiny_model("llama", vocab_size=VOCAB, layers=8).to(CUDA))
        for name, drafter in drafters(target, options.families).items():
            for temperature in (0.0, 1.0):
                for rows in options.rows:
                    counts = counted(device, target, drafter, rows, temperature, options.tokens)
                    results.append({"drafter": name, "temperature": temperature, "rows": rows, **summary(counts)})
                    if options.where:
                        print(f"{name}, temperature {temperature:g}, {rows} rows:", *where(counts), sep="\n  ")
    print(table(results))
    if options.out:
        what = (
            "Waits for the device, uploads and launched operations of a round, counted on a stand-in device: mean (max)"
        )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"device": "a stand-in, computed on the CPU", "torch": torch.__version__, "date": now}
        settings = {"new_tokens": options.tokens, "target": "a random Llama of 8 layers"}
        record(options.out, what, results, machine, __file__, arguments, settings)


def drafters(target: Target, families: Sequence[str]) -> dict[str, tuple[Drafter, ...]]:
    """What drafts in each row of the table, by name."""
    drafters: dict[str, tuple[Drafter, ...]] = {"none": (), "ngram": (NgramDrafter(),)}
    for name in families:
        heads = family(name)(make_config({"family": name}, target))
        torch.manual_seed(0)
        heads.warm_start(target)
        drafter = HeadDrafter(heads.to(CUDA), TreeShape.chain(heads.draft_steps), "dynamic", max_nodes=16)
        drafters[name] = (drafter,)
        drafters[f"{name}+ngram"] = (drafter, NgramDrafter())
    return drafters


def counted(
    device: StandIn, target: Target, drafters: Sequence[Drafter], rows: int, temperature: float, tokens: int
) -> list[Round]:
    """The rounds of one batch that was decoded before, when its graphs were captured. Rows have prompts of different
    lengths, which repeat themselves."""
    rng = random.Random(0)
    prompts = []
    for row in range(rows):
        phrase = [rng.randrange(1, VOCAB) for _ in range(5)]
        prompts.append([*phrase, *phrase, *phrase][: 11 + row % 5])
    options = DecodeOptions(max_new_tokens=tokens, temperature=temperature, seed=0, ignore_end=True)

    def decode() -> None:
        DecodeLoop(target, *drafters).generate(prompts, options)

    decode()
    return rounds_of(device, target, decode)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Mean and largest counts of a round."""
    means: dict[str, Any] = {"rounds": len(rounds)}
    for column in COLUMNS:
        counts = [getattr(done.counts, column) for done in rounds]
        means[column] = {"mean": round(sum(counts) / len(counts), 1), "max": max(counts)}
    return means


def where(rounds: Sequence[Round]) -> list[str]:
    """The lines that wait or upload, with how often a round comes by them on average."""
    seen = Counter((event.kind, event.where, event.operation) for done in rounds for event in done.events)
    return [
        f"{count / len(rounds):6.2f} {kind} {index} ({operation})"
        for (kind, index, operation), count in sorted(seen.items(), key=lambda item: (-item[1], item[0]))
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    """The counts as a table: mean of a round, largest of a round in brackets."""
    lines = ["| drafter | temperature | rows | " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---|" * len(COLUMNS)]
    for row in results:
        cells = [f"{row[column]['mean']:g} ({row[column]['max']})" for column in COLUMNS]
        lines.append(f"| {row['drafter']} | {row['temperature']:g} | {row['rows']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
