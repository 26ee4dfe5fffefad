"""Our recipe of EAGLE-3 beside the published one, at equal data and steps: mean accepted drafts.

    python benchmarks/published_recipe.py QUESTIONS.jsonl --run runs/quickstart --steps 300

The published recipe (Li et al., arXiv 2503.01840): random weights but for the target's embeddings, cross-entropy with
the target's distribution over the draft vocabulary weighted by 0.8 to the power of the step, training-time test, AdamW
with betas 0.9 and 0.95 and gradients clipped to 0.5, no linear start. Its learning rate, 5e-5, is meant for hundreds of
times more steps, so it is given every rate of --lrs and its best result counts; ours uses its recipe's rate. Accepted
drafts are those of a greedy chain, replayed on the target's plain greedy answers to the questions and on held-out
conversations of the run: no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from arms import answered, arm, budget, chain_tau, facts, options_of, trained, training_data
from record import record
from tables import shares, table

from headstart.data.conversations.records import Conversation
from headstart.data.prompts.questions import read_questions
from headstart.eval.environment import environment
from headstart.model.loading import load_target
from headstart.support.files import write_text
from headstart.tuning.acceptance import Text

PUBLISHED = (
    "heads.family=eagle3",
    "heads.init=random",
    "heads.feedback=pre_norm",
    "heads.aux_norms=false",
    "train.optimizer=adamw",
    "train.start_from=null",
    "train.loss=soft_ce",
    "train.position_weight=exponential",
    "train.step_weight=0.8",
    "train.feature_weight=0",
    "train.betas=[0.9, 0.95]",
    "train.max_grad_norm=0.5",
)
"""What makes the recipe the published one; another family drops the settings of the one before."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/published_recipe"))
    parser.add_argument("questions", type=Path)
    parser.add_argument("--recipe", default="eagle3", help="ours")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-4, 1e-3, 3e-3], help="of the published recipe")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    common = [*options.set, *budget(steps=options.steps)]
    settings = {"ours": list[str]()}
    settings |= {f"published, lr {lr:g}": [*PUBLISHED, f"train.lr={lr}"] for lr in options.lrs}
    arms = {
        name: [
            arm(f"{name} {seed}", options.recipe, [*common, *differing, f"train.seed={seed}"]) for seed in options.seeds
        ]
        for name, differing in settings.items()
    }
    data = training_data(
        options.run, options.out, target, [candidate for ones in arms.values() for candidate in ones], options.gigabytes
    )
    questions = read_questions(options.questions)[: options.limit]
    texts: dict[str, Sequence[Text | Conversation]] = {
        options.questions.stem: answered(target, questions, options.out / "answers.json", options.max_new_tokens),
        "validation": data.texts,
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, ones in arms.items():
        rows[name] = []
        for candidate in ones:
            folder = options.out / candidate.name.replace(", ", "-").replace(" ", "-")
            heads = trained(candidate, target, data, folder)
            judged = {where: chain_tau(target, heads, asked, options.chain) for where, asked in texts.items()}
            rows[name].append({"seed": candidate.recipe.train.seed, **facts(folder), "judged": judged})
            results = {"arms": rows}
            what = f"Our recipe and the published one on the same data, {options.steps} steps each."
            settings_of_all = {"recipe": options.recipe, "seeds": options.seeds, "chain": options.chain}
            file = options.out / "published_recipe.json"
            record(file, what, rows_of(results), environment(target), __file__, arguments, settings_of_all, results)
    write_text(options.out / "published_recipe.md", report(results))
    print(report(results))


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each recipe; accepted drafts and top-1 by step are means over its seeds."""
    return [
        {
            "recipe": name,
            **{key: ones[0][key] for key in ("parameters", "steps")},
            **{
                where: {
                    "accepted_per_round": mean(seed["judged"][where]["accepted"] for seed in ones),
                    "top1": [mean(v) for v in zip(*(seed["judged"][where]["top1"] for seed in ones), strict=True)],
                }
                for where in ones[0]["judged"]
            },
        }
        for name, ones in results["arms"].items()
    ]


def report(results: Mapping[str, Any]) -> str:
    """Means over the seeds, and ours over the best of the published."""
    arms: Mapping[str, list[dict[str, Any]]] = results["arms"]
    parts = []
    for where in arms["ours"][0]["judged"]:
        accepted = {name: mean(row["judged"][where]["accepted"] for row in rows) for name, rows in arms.items()}
        best = max((name for name in accepted if name != "ours"), key=accepted.__getitem__)
        lines = [
            [
                name,
                f"{rows[0]['parameters'] / 1e6:.1f} M",
                rows[0]["steps"],
                f"{accepted[name]:.3f}",
                shares(mean(values) for values in zip(*(row["judged"][where]["top1"] for row in rows), strict=True)),
            ]
            for name, rows in arms.items()
        ]
        parts.append(f"**{where}**: ours accepts {accepted['ours'] / accepted[best] - 1:+.0%} beside {best}.")
        parts.append(table(["", "parameters", "steps", "accepted drafts a round", "top-1 by step"], lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
