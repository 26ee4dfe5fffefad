"""Every head family on the same data, in the same wall-clock time, measured in one alternating run.

    python benchmarks/families.py QUESTIONS.jsonl [MORE.jsonl ...] --run runs/quickstart --minutes 15 --out out/families

The conversations are those of a finished run. Their hidden states are computed once, with the aux layers of all
families; each family is trained for the same minutes with its own recipe and tuned; then all of them answer the
questions in turns, greedily and by sampling: a chain of fixed length, which says how good the drafts are, and the trees
that tuning chose, which say how fast decoding is. The plain loop and transformers take part. Stages that are done are
skipped, so the command can be stopped and given again. Train and measure on a quiet machine: the families are trained
one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arms import alternate, arm, budget, facts, options_of, row_of, training_data, tuned
from record import record
from tables import shares, table, times

from headstart.api import Decoder
from headstart.data.prompts.questions import read_questions
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.eval.environment import environment
from headstart.eval.labels import LOOKUP, PLAIN, STOCK
from headstart.eval.methods import Method, Ours, Transformers
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.support.files import write_text
from headstart.tree.tree import TreeShape

FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "mtp", "dflash", "dspark")
"""Packaged recipes, one for each family."""
OVER = {"over_plain": PLAIN, "over_transformers": STOCK, "over_prompt_lookup": LOOKUP}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/families"))
    parser.add_argument("questions", nargs="+", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="recipes: packaged names or YAML files")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, for each family")
    parser.add_argument("--steps", type=int, help="train for so many steps instead")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    spent = budget(steps=options.steps) if options.steps else budget(minutes=options.minutes)
    arms = [arm(Path(name).stem, name, [*spent, *options.set]) for name in options.families]
    data = training_data(options.run, options.out, target, arms, options.gigabytes)
    decoders = {candidate.name: tuned(candidate, target, data, options.out / candidate.name) for candidate in arms}
    results: dict[str, Any] = {
        "training_tokens": data.train.tokens,
        "minutes": None if options.steps else options.minutes,
        "chain": options.chain,
        "max_new_tokens": options.max_new_tokens,
        "families": {
            candidate.name: {
                **facts(options.out / candidate.name / "train"),
                "heads": decoders[candidate.name].heads.config.model_dump(mode="json"),
                "flops_per_draft": decoders[candidate.name].heads.flops_per_draft(),
                "draft_ms": decoders[candidate.name].calibration["draft_ms"],
                "predicted": decoders[candidate.name].calibration["predicted"],
            }
            for candidate in arms
        },
        "questions": {},
    }
    for file in options.questions:
        questions = read_questions(file)[: options.limit]
        of_file = results["questions"][file.stem] = {}
        for temperature in options.temperatures:
            methods = methods_of(target, decoders, options.chain, temperature)
            folder = options.out / f"{file.stem}-{temperature:g}"
            settings = {name: read["steps"] for name, read in results["families"].items()}
            units = alternate(target, methods, questions, folder, settings, options.max_new_tokens)
            of_file[f"{temperature:g}"] = {name: row_of(units, name, OVER) for name in methods}
            spent_on = f"{options.steps} steps" if options.steps else f"{options.minutes:g} minutes"
            what = f"Each family on the same {data.train.tokens} training tokens for {spent_on}, with its own recipe."
            lengths = {key: results[key] for key in ("chain", "max_new_tokens")}
            out, machine = options.out / "families.json", environment(target)
            record(out, what, rows_of(results), machine, __file__, arguments, lengths, results)
            write_text(options.out / "families.md", report(results))
    print(report(results))


def methods_of(target: Target, decoders: Mapping[str, Decoder], chain: int, temperature: float) -> dict[str, Method]:
    """The plain loop, transformers, and of each family a chain that always drafts and the trees that tuning chose."""
    decoding = DecodeOptions(temperature=temperature)
    always = DecodeOptions(temperature=temperature, draft="on")
    methods: dict[str, Method] = {
        PLAIN: Ours(target, (), decoding),
        STOCK: Transformers(target, decoding),
        LOOKUP: Transformers(target, decoding, lookup=True),
    }
    for name, decoder in decoders.items():
        fixed = HeadDrafter(decoder.heads, TreeShape.chain(min(chain, decoder.heads.draft_steps)))
        methods[f"{name} chain"] = Ours(target, [fixed], always)
        methods[f"{name} tree"] = Ours(target, decoder.drafters("heads"), decoding, decoder.costs)
    return methods


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each family: its training, and for each question file and temperature its chain and its tree."""
    return [
        {
            "family": name,
            **{key: of[key] for key in ("parameters", "steps", "seconds", "validation_tau", "draft_ms")},
            "megaflop_per_draft": of["flops_per_draft"] / 1e6,
            **{
                f"{file}_{'greedy' if float(temperature) == 0 else f't{temperature}'}": {
                    "chain_tau": rows[f"{name} chain"]["tau"],
                    "acceptance_by_position": rows[f"{name} chain"]["acceptance_by_position"],
                    "tree_tau": rows[f"{name} tree"]["tau"],
                    "over_plain": rows[f"{name} tree"]["over_plain"],
                }
                for file, by_temperature in results["questions"].items()
                for temperature, rows in by_temperature.items()
            },
        }
        for name, of in results["families"].items()
    ]


def report(results: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    families = results["families"]
    parts = [
        f"{results['training_tokens']} training tokens; chains of {results['chain']} drafts at most; answers of at "
        f"most {results['max_new_tokens']} tokens. τ counts the target's own token.",
        table(
            ["family", "parameters", "MFLOP a draft", "steps", "seconds", "best step", "validation τ", "draft ms"],
            [
                [
                    name,
                    f"{of['parameters'] / 1e6:.1f} M",
                    f"{of['flops_per_draft'] / 1e6:.1f}",
                    of["steps"],
                    f"{of['seconds']:.0f}",
                    of["best_step"],
                    f"{of['validation_tau']:.2f}",
                    f"{of['draft_ms']:.1f}",
                ]
                for name, of in families.items()
            ],
        ),
    ]
    for file, by_temperature in results["questions"].items():
        for temperature, rows in by_temperature.items():
            lines = []
            for name in families:
                chain, tree = rows[f"{name} chain"], rows[f"{name} tree"]
                lines.append(
                    [
                        name,
                        f"{chain['tau']:.2f}",
                        shares(chain["acceptance_by_position"]),
                        f"{tree['tau']:.2f}",
                        f"{tree['nodes_per_round']:.1f}",
                        f"{tree['round_ms']['draft']:.1f}",
                        *_speeds(tree),
                    ]
                )
            for name in (PLAIN, STOCK, LOOKUP):
                lines.append([name, "", "", "", "", "", *_speeds(rows[name])])
            head = ["", "chain τ", "accepted by position", "tree τ", "nodes", "draft ms a round", "tokens/s"]
            head += ["over plain", "over transformers", "over prompt lookup"]
            parts += [f"**{file}, temperature {temperature}**", table(head, lines)]
    return "\n\n".join(parts) + "\n"


def _speeds(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['tokens_per_second']['mean']:.1f}", *(times(row[key]) for key in OVER)]


if __name__ == "__main__":
    main()
