"""Hidden states stored as they are, as int8 and as fp8: bytes, what is lost, and are heads trained on them as good?

    python benchmarks/stored_states.py quickstart --run runs/quickstart --conversations 300 --steps 100

The states of a run's first conversations are stored in each way (`data.states_dtype`), and the recipe's heads trained
on each with one seed. All are judged by the same validation states, stored as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from arms import TrainingData, arm, aux_layers_of, budget, facts, options_of, trained
from record import record
from states_from_vllm import PLENTY, share
from tables import table

from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.states.shards import Capture, Work, build_store
from headstart.data.states.store import StateStore
from headstart.eval.environment import environment
from headstart.pipeline.run import CONVERSATIONS
from headstart.support.files import format_bytes, write_text
from headstart.target.fitting import FINAL
from headstart.target.loading import load_target
from headstart.target.model import Target

KINDS = ("auto", "int8", "fp8")
_OF_A_SHARD = 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/stored_states"))
    parser.add_argument("recipe")
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--validation", type=int, default=48)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shards", type=Path, help="folder of shards that hold the states already")
    options = parser.parse_args(arguments)

    overrides = [
        *budget(steps=options.steps),
        *(f"train.eval_every={options.steps}", f"train.save_every={options.steps}", *options.set),
    ]
    target = load_target(options.target, options.dtype)
    layers = sorted(aux_layers_of(target, arm("auto", options.recipe, overrides).recipe))
    folder = options.run / CONVERSATIONS
    texts = read_conversations(folder / "train.jsonl")[: options.conversations]
    calibration = read_conversations(folder / "calibration.jsonl")[: options.validation]
    shards = options.shards or options.out / "shards"
    own = build_store(options.out / "auto", texts, target, layers, budget_bytes=PLENTY, shards=shards)
    judged = build_store(options.out / "judged", calibration, target, layers, budget_bytes=PLENTY, shards=shards)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        store = own if kind == "auto" else encoded(own, texts, options.out / kind, target, kind)
        data = TrainingData(store, judged, calibration)
        trained(arm(kind, options.recipe, overrides), target, data, options.out / f"heads-{kind}")
        size = sum(_bytes_of(store, index) for index in range(len(store)))
        row = {"name": kind, "bytes": size, **facts(options.out / f"heads-{kind}"), "lost": lost(store, own)}
        row["of_auto"] = row["validation_tau"] / rows[0]["validation_tau"] if rows else 1.0
        rows.append(row)
    what = "Heads trained on hidden states that are stored in fewer bits, judged by the same validation states."
    settings = {"recipe": options.recipe, "set": overrides, "conversations": len(texts)}
    file = options.out / "stored_states.json"
    record(file, what, rows, environment(target), __file__, arguments, settings, {"rows": rows})
    write_text(file.with_suffix(".md"), report(rows))
    print(report(rows))


def encoded(own: StateStore, texts: Sequence[Conversation], folder: Path, target: Target, kind: str) -> StateStore:
    """The same states, stored otherwise; none are computed."""
    capture = Capture(folder, target, own.aux_layers, kind)
    if not list(folder.glob("shard-*")):
        for first in range(0, len(own), _OF_A_SHARD):
            numbers = range(first, min(first + _OF_A_SHARD, len(own)))
            capture.keep([(texts[number], own.get(number).states) for number in numbers])
    return build_store(folder, texts, target, own.aux_layers, budget_bytes=PLENTY, work=Work(kind))


def lost(store: StateStore, own: StateStore) -> dict[str, float]:
    """By layer, the mean distance of stored states from those stored as they are, as a share of their size."""
    found: dict[str, float] = {}
    for layer in own.aux_layers:
        numbers = range(0, len(own), max(1, len(own) // 32))
        shares = [share(store.get(number).states[layer], own.get(number).states[layer]) for number in numbers]
        found["FINAL" if layer == FINAL else str(layer)] = float(torch.cat(shares).mean())
    return found


def _bytes_of(store: StateStore, number: int) -> int:
    sample = store.get(number)
    width = next(iter(sample.states.values())).shape[-1]
    of_token = width + 4 if store.states_dtype != "auto" else width * next(iter(sample.states.values())).element_size()
    return len(sample.tokens_T) * len(sample.states) * of_token


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each way of storing."""
    layers = list(rows[0]["lost"])
    head = ["stored as", "bytes", "τ", "of auto", "top 1", *(f"lost at {layer}" for layer in layers)]
    lines = [
        [
            row["name"],
            format_bytes(row["bytes"]),
            f"{row['validation_tau']:.4f}",
            f"{100 * row['of_auto']:.2f} %",
            " / ".join(f"{one:.3f}" for one in row["validation_top1"]),
            *(f"{100 * row['lost'][layer]:.2f} %" for layer in layers),
        ]
        for row in rows
    ]
    return f"{table(head, lines)}\n"


if __name__ == "__main__":
    main()
