"""What more data and more passes over it buy: supervised tokens x epochs -> τ of a greedy chain, for one recipe.

    python benchmarks/learning_curve.py eagle3 --run runs/quickstart --questions QUESTIONS.jsonl

For each share of a run's conversations and each number of epochs the recipe is trained anew, with a learning rate that
ends with that budget. τ is read from metrics.jsonl (the run's own validation conversations) and, with --questions,
from the target's plain greedy answers to them, by replaying the rounds of a greedy chain: nothing here depends on the
clock. Cells that are done are skipped, so the command can be stopped and given again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arms import answered, arm, budget, chain_tau, facts, options_of, trained, training_data
from matplotlib.figure import Figure
from record import record
from tables import table
from torch import Tensor

from headstart.data.prompts.questions import read_questions
from headstart.data.states.store import StateStore
from headstart.eval.environment import environment
from headstart.model.loading import load_target
from headstart.support.files import read_jsonl, write_atomic, write_text


class Part(StateStore):
    """The first conversations of a store.

    Args:
        folder: of the whole store.
        kept: how many conversations.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        super().__init__(folder)
        self.lengths = self.lengths[:kept]
        self.fingerprint = f"{self.fingerprint}-{kept}"

    def supervised_counts(self, vocab_size: int) -> Tensor:
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for index in range(len(self)):
            sample = self.get(index)
            counts_V += torch.bincount(sample.tokens_T[sample.supervised_T], minlength=vocab_size)
        return counts_V


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/learning_curve"))
    parser.add_argument("recipe")
    parser.add_argument("--parts", nargs="+", type=float, default=[0.125, 0.25, 0.5, 1.0], help="shares of the data")
    parser.add_argument("--epochs", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--questions", type=Path, help="also judge on the target's own answers to these")
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    data = training_data(options.run, options.out, target, [arm("", options.recipe, options.set)], options.gigabytes)
    texts = []
    if options.questions is not None:
        questions = read_questions(options.questions)[: options.limit]
        texts = answered(target, questions, options.out / "answers.json", options.max_new_tokens)
    cells: list[dict[str, Any]] = []
    results = {"cells": cells}
    settings = {"recipe": options.recipe, "set": options.set, "chain": options.chain}
    for epochs in sorted(options.epochs):  # the cheap cells first
        for part in sorted(options.parts):
            part_of_data = replace(data, train=Part(data.train.folder, max(1, round(part * len(data.train)))))
            candidate = arm(f"{part:g}-{epochs}", options.recipe, [*options.set, *budget(epochs=epochs)])
            folder = options.out / candidate.name
            heads = trained(candidate, target, part_of_data, folder)
            cells.append(
                {
                    "part": part,
                    **facts(folder),
                    "epochs": epochs,
                    "conversations": len(part_of_data.train),
                    "supervised_tokens": int(part_of_data.train.supervised_counts(target.vocab_size).sum()),
                    "curve": [
                        {key: row[key] for key in ("step", "epoch", "tokens", "tau", "elapsed_seconds")}
                        for _, row in read_jsonl(folder / "metrics.jsonl")
                    ],
                    "questions": chain_tau(target, heads, texts, options.chain) if texts else None,
                }
            )
            rows = [{key: value for key, value in cell.items() if key != "curve"} for cell in cells]
            what = "One recipe trained on parts of a run's conversations for so many epochs; τ of a greedy chain."
            file = options.out / "learning_curve.json"
            record(file, what, rows, environment(target), __file__, arguments, settings, results)
            write_text(options.out / "learning_curve.md", report(results))
            write_atomic(options.out / "learning_curve.png", lambda partial: draw(results, partial))
    print(report(results))


def report(results: Mapping[str, Any]) -> str:
    """The ladder as Markdown: a row for each amount of data, a column for each number of epochs."""
    cells = {(cell["part"], cell["epochs"]): cell for cell in results["cells"]}
    parts, epochs = (sorted({key[index] for key in cells}) for index in (0, 1))
    lines = []
    for part in parts:
        of_part = [cells.get((part, number)) for number in epochs]
        seen = next(cell for cell in of_part if cell is not None)
        lines.append([seen["supervised_tokens"], *(_taus(cell) if cell else "" for cell in of_part)])
    asked = any(cell["questions"] for cell in results["cells"])
    note = (
        "τ of a greedy chain on held-out conversations of the run" + (", and on the questions" if asked else "") + "."
    )
    return f"{note}\n\n{table(['supervised tokens', *(f'{number} epochs' for number in epochs)], lines)}\n"


def _taus(cell: Mapping[str, Any]) -> str:
    both = [cell["validation_tau"], *([cell["questions"]["tau"]] if cell["questions"] else [])]
    return " / ".join(f"{tau:.2f}" for tau in both)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """τ over the supervised tokens that training has read, repeated ones counted again: a line for each cell."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    parts = sorted({cell["part"] for cell in results["cells"]})
    for cell in results["cells"]:
        rows = [row for row in cell["curve"] if row["tokens"]]
        colour = f"C{parts.index(cell['part'])}"
        axes.plot([row["tokens"] for row in rows], [row["tau"] for row in rows], color=colour, linewidth=1)
        axes.plot(rows[-1]["tokens"], rows[-1]["tau"], "o", color=colour, markersize=4)
        axes.annotate(f" {cell['epochs']}", (rows[-1]["tokens"], rows[-1]["tau"]), fontsize=8)
    for number, part in enumerate(parts):
        tokens = next(cell["supervised_tokens"] for cell in results["cells"] if cell["part"] == part)
        axes.plot([], [], color=f"C{number}", label=f"{tokens} supervised tokens")
    axes.set_xscale("log")
    axes.set_xlabel("supervised tokens read, repetitions counted (at the dots: epochs)")
    axes.set_ylabel("τ of a greedy chain, tokens per round")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, format="png")


if __name__ == "__main__":
    main()
