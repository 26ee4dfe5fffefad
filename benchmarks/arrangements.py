"""Starts and arrangements of EAGLE-3 as engines load it, at equal data and steps: τ of a chain.

    python benchmarks/arrangements.py QUESTIONS.jsonl --run runs/quickstart --steps 150

The arms: EAGLE-3 as published, from the target's last layer; and with heads.init=transition, reading the last layer
before the final norm (which vLLM can give), reading the layer before it (which all engines can), and the latter without
a norm before the residual (as SGLang has it). τ is that of a greedy chain, replayed on the plain greedy answers
to the questions and on held-out conversations of the run: no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arms import answered, arm, budget, chain_tau, facts, options_of, trained, training_data
from record import record
from tables import shares, table

from headstart.data.conversations.records import Conversation
from headstart.data.prompts.questions import read_questions
from headstart.eval.environment import environment
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.support.files import read_jsonl, write_text
from headstart.tuning.acceptance import Text


def arms_of(target: Target) -> dict[str, list[str]]:
    """Overrides of each arm; another family drops the settings of the one before."""
    layers = target.num_layers
    early = [2, layers // 2] if layers > 6 else []

    def aux_layers(deepest: int) -> str:
        return f"heads.aux_layers={[*early, deepest]}"

    plain, normed = "heads.norm_before_residual=false", "heads.norm_before_residual=true"
    start = ["heads.family=eagle3", "heads.init=transition"]
    return {
        "EAGLE-3 as published": ["heads.family=eagle3", "heads.init=target", plain, aux_layers(max(1, layers - 3))],
        f"layer {layers}, normed residual": [*start, normed, aux_layers(layers)],
        f"layer {layers - 1}, normed residual": [*start, normed, aux_layers(layers - 1)],
        f"layer {layers - 1}, plain residual": [*start, plain, aux_layers(layers - 1)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/arrangements"))
    parser.add_argument("questions", type=Path)
    parser.add_argument("--recipe", default="eagle3", help="whose training all arms share")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--arms", nargs="+", type=int, help="these alone, by their place in the list above, from 0")
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    common = [*options.set, *budget(steps=options.steps)]
    arms = [arm(name, options.recipe, [*differing, *common]) for name, differing in arms_of(target).items()]
    chosen = range(len(arms)) if options.arms is None else options.arms
    data = training_data(options.run, options.out, target, arms, options.gigabytes)
    questions = read_questions(options.questions)[: options.limit]
    texts: dict[str, Sequence[Text | Conversation]] = {
        options.questions.stem: answered(target, questions, options.out / "answers.json", options.max_new_tokens),
        "validation": data.texts,
    }
    rows: list[dict[str, Any]] = []
    for number in chosen:
        candidate = arms[number]
        folder = options.out / f"arm-{number}"
        heads = trained(candidate, target, data, folder)
        first = next(row for _, row in read_jsonl(folder / "metrics.jsonl"))
        judged = {where: chain_tau(target, heads, asked, options.chain) for where, asked in texts.items()}
        start = {"tau": first["tau"], "top1": first["top1"]}
        rows.append({"name": candidate.name, **facts(folder), "untrained": start, **judged})
        what = f"Arrangements of heads on the same data, {options.steps} steps each; τ of a greedy chain."
        settings = {"recipe": options.recipe, "chain": options.chain, "aux_layers": list(data.train.aux_layers)}
        file = options.out / "arrangements.json"
        record(file, what, rows, environment(target), __file__, arguments, settings, {"rows": rows})
        write_text(options.out / "arrangements.md", report(rows, list(texts)))
    print(report(rows, list(texts)))


def report(rows: Sequence[Mapping[str, Any]], indices: Sequence[str]) -> str:
    """A row for each arm: before training, and after it on each kind of text."""
    head = ["", "parameters", "steps", "untrained τ", "top-1"]
    head += [name for where in indices for name in (f"τ, {where}", f"top-1, {where}")]
    lines = []
    for row in rows:
        line = [row["name"], f"{row['parameters'] / 1e6:.1f} M", row["steps"]]
        line += [f"{row['untrained']['tau']:.2f}", shares(row["untrained"]["top1"])]
        lines.append(line + [v for where in indices for v in (f"{row[where]['tau']:.2f}", shares(row[where]["top1"]))])
    return table(head, lines) + "\n"


if __name__ == "__main__":
    main()
