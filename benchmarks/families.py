"""Compare head families on equal data and equal training time, in one alternating run.

    python benchmarks/families.py QUESTIONS.jsonl [MORE.jsonl ...] --run runs/quickstart --minutes 15 --out out/families

The conversations come from a finished run. Their hidden states are stored once, with the aux layers of all families.
Each family trains for the same minutes with its own recipe and is tuned. Then all families, the plain loop and
transformers answer the questions in turns, greedily and sampled: a chain of fixed length shows the quality of the
drafts, the tuned trees the speed. Finished stages are kept, so an interrupted command resumes; stages made from other
settings are refused. Train and measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from record import in_turn, record
from tables import figures

import headstart
from headstart.api import Decoder
from headstart.data.conversations.records import read_conversations
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.questions import Question, read_questions
from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Round
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.environment import environment
from headstart.eval.figures import Prompt, Unit, method_figures
from headstart.eval.labels import LOOKUP, PLAIN, STOCK
from headstart.eval.methods import Method, Ours, Run, Transformers
from headstart.heads.base import family, make_config
from headstart.heads.io import load_heads
from headstart.hub.format import export_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.pipeline.run import CONVERSATIONS
from headstart.recipes.recipe import Recipe, load_recipe
from headstart.replay.patch import FINAL
from headstart.support.files import read_json, write_json
from headstart.train.trainer import train
from headstart.tree.tree import TreeShape
from headstart.tuning.tune import tune

FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")
"""Packaged recipes, one per family."""
WARM_UP_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="run with the conversations")
    parser.add_argument("--out", type=Path, default=Path("out/families"))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="packaged recipes or YAML files")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for all recipes")
    parser.add_argument("--minutes", type=float, default=15.0, help="training time of each family")
    parser.add_argument("--steps", type=int, help="training steps instead of minutes")
    parser.add_argument("--limit", type=int, help="questions per file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--chain", type=int, default=5, help="drafts of the chain")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="limit of stored hidden states")
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    minutes = "null" if options.steps else options.minutes
    budget = [f"train.minutes={minutes}", f"train.steps={options.steps or 'null'}", "train.epochs=100000"]
    recipes = {Path(name).stem: load_recipe(name, [*budget, *options.set]) for name in options.families}
    stores = {split: states(split, target, recipes.values(), options) for split in ("train", "validation")}
    decoders = {name: tuned(name, recipe, target, stores, options) for name, recipe in recipes.items()}
    rows = [row_of(name, decoder, options.out / name / "train") for name, decoder in decoders.items()]
    spent = f"{options.steps} steps" if options.steps else f"{options.minutes:g} minutes"
    what = f"Each family on the same {stores['train'].tokens} training tokens for {spent}, with its own recipe."
    lengths = {"chain": options.chain, "max_new_tokens": options.max_new_tokens}
    for file in options.questions:
        questions = read_questions(file)[: options.limit]
        for temperature in options.temperatures:
            methods = methods_of(target, decoders, options.chain, temperature)
            folder = options.out / f"{file.stem}-{temperature:g}"
            settings = {**lengths, "methods": list(methods), "steps": [row["steps"] for row in rows]}
            units = alternate(target, methods, questions, folder, settings, options.max_new_tokens)
            key = f"{file.stem}_{f't{temperature:g}' if temperature else 'greedy'}"
            for row in rows:
                row[key] = measured(units, row["family"])
            record(options.out / "families.json", what, rows, environment(target), __file__, arguments, lengths)
    print(figures(rows))


# -- heads -------------------------------------------------------------------------------------------------------------


def once(folder: Path, settings: Mapping[str, Any], work: Callable[[], object]) -> None:
    """Do some work in `folder` unless it was finished there before.

    Raises:
        UserError: the folder was made from other settings.
    """
    file, wanted = folder / "made_from.json", json.loads(json.dumps(settings))
    if file.is_file():
        kept = read_json(file)
        if kept["settings"] != wanted:
            raise UserError(f"{folder} was made from other settings.", "Delete it, or give another --out.")
        if kept["complete"]:
            return
    write_json(file, {"settings": wanted, "complete": False})
    work()
    write_json(file, {"settings": wanted, "complete": True})


def states(split: str, target: Target, recipes: Iterable[Recipe], options: argparse.Namespace) -> StateStore:
    """Store the hidden states of a run's conversations, with every layer that a family reads."""
    layers = {FINAL}
    for recipe in recipes:
        config = make_config(recipe.heads, target)
        with torch.device("meta"):
            layers |= set(family(config.family)(config).aux_layers)
    texts = read_conversations(options.run / CONVERSATIONS / f"{split}.jsonl")
    folder, limit = options.out / "states" / split, int(1e9 * options.gigabytes)
    return build_store(folder, texts, target, sorted(layers), budget_bytes=limit)


def tuned(
    name: str, recipe: Recipe, target: Target, stores: Mapping[str, StateStore], options: argparse.Namespace
) -> Decoder:
    """Train and tune a family, unless that was finished before."""
    folder, section = options.out / name, recipe.tune
    settings = {
        "heads": recipe.heads.to_recipe(),
        "train": recipe.train.model_dump(mode="json"),
        "data": stores["train"].fingerprint,
        "target": target.identity().fingerprint,
    }
    print(f"training and tuning {name}", flush=True)
    data = stores["train"], stores["validation"]
    once(folder / "train", settings, lambda: train(recipe, target, *data, folder / "train"))

    def work() -> None:
        heads = load_heads(folder / "train" / "best", target).to(target.dtype)
        texts = read_conversations(options.run / CONVERSATIONS / "validation.jsonl")
        export_heads(folder / "heads", heads, target, tune(target, heads, texts, section).to_json(), {})

    once(folder / "tune", section.model_dump(mode="json"), work)
    decoder: Decoder = headstart.load(folder / "heads", target)
    return decoder


def row_of(name: str, decoder: Decoder, folder: Path) -> dict[str, Any]:
    """Return the training figures of a family."""
    result = read_json(folder / "result.json")
    return {
        "family": name,
        "parameters": result["trainable_parameters"],
        "steps": result["steps"],
        "seconds": result["elapsed_seconds"],
        "validation_tau": result["best"]["tau"],
        "draft_ms": decoder.calibration["draft_ms"],
        "megaflop_per_draft": decoder.heads.flops_per_draft() / 1e6,
    }


# -- questions ---------------------------------------------------------------------------------------------------------


def methods_of(target: Target, decoders: Mapping[str, Decoder], chain: int, temperature: float) -> dict[str, Method]:
    """Return the baselines, and for each family a chain that always drafts and the tuned trees."""
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


def alternate(
    target: Target,
    methods: Mapping[str, Method],
    questions: Sequence[Question],
    folder: Path,
    settings: Mapping[str, Any],
    max_new_tokens: int,
) -> list[Unit]:
    """Answer every question with every method, in rotating order.

    Each question's runs are kept in `folder`, so an interrupted run resumes at the next question.
    """
    names, units, warm = list(methods), list[Unit](), False
    once(folder, settings, lambda: None)
    for number, question in enumerate(questions):
        tokens = prompt_tokens([{"role": "user", "content": question.turns[0]}], target.tokenizer)
        file = folder / "runs" / f"{number:04d}.json"
        kept = read_json(file) if file.is_file() else {}
        if kept.get("prompt") != tokens:
            for method in () if warm else methods.values():
                method.run([tokens], min(WARM_UP_TOKENS, max_new_tokens), number)
            warm = True
            runs = {name: methods[name].run([tokens], max_new_tokens, number) for name in in_turn(names, number)}
            kept = {"prompt": tokens, "runs": {name: {**asdict(runs[name]), "token_ms": []} for name in names}}
            write_json(file, kept)
            print(f"{folder.name}: {number + 1} of {len(questions)}", flush=True)
        prompt = Prompt(str(question.question_id), question.category, tokens)
        units.append(Unit(number, [prompt], {name: _run(kept["runs"][name]) for name in names}))
    return units


def _run(values: dict[str, Any]) -> Run:
    return Run(**{**values, "rounds": [[Round(**done) for done in row] for row in values["rounds"]]})


def measured(units: Sequence[Unit], name: str) -> dict[str, Any]:
    """Return the figures of a family's chain and tree; equal outputs are expected of greedy runs in float32 only."""
    chain, tree = (method_figures(units, f"{name} {kind}", 0) for kind in ("chain", "tree"))
    return {
        "chain_tau": chain["tokens_per_round"],
        "acceptance_by_position": chain["acceptance_by_position"],
        "tree_tau": tree["tokens_per_round"],
        "tokens_per_second": tree["tokens_per_second"],
        "over_plain": tree["speedup_vs_plain"],
        "over_transformers": tree["speedup_vs_transformers"],
        "same_as_plain": sum(unit.runs[f"{name} chain"].tokens == unit.runs[PLAIN].tokens for unit in units),
        "drafter_error": chain["drafter_error"] or tree["drafter_error"],
    }


if __name__ == "__main__":
    main()
