"""Make a leaderboard entry: tokens per round of heads that were trained from scratch in an hour on two cores.

    python benchmarks/leaderboard.py quickstart minutes=60 --name my-heads --by "My name"

The command trains a recipe within the budget on two cores and measures the heads on 40 fixed questions. The entry,
out/leaderboard/NAME.json, holds everything needed to repeat it. docs/leaderboard.md has the rules.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from record import record
from rich.console import Console

from headstart.api import load
from headstart.data.prompts.questions import read_questions
from headstart.data.prompts.sources import READY_MADE
from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.eval.evaluate import evaluate
from headstart.eval.options import EvalOptions
from headstart.pipeline.run import HEADS, Run, content, execute
from headstart.pipeline.stages import check_inputs, stages_until
from headstart.recipes.recipe import Recipe, load_recipe, parse_recipe
from headstart.support.files import read_json
from headstart.support.provenance import FILE as PROVENANCE
from headstart.support.terminal import format_seconds
from headstart.tree.tree import TreeShape

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ROOT / "benchmarks" / "leaderboard_questions.jsonl"
ENTRIES = ROOT / "benchmarks" / "results" / "leaderboard"


@dataclass(frozen=True)
class Rules:
    """Conditions of an entry.

    Attributes:
        target: unmodified target.
        prompts: permitted sources of conversations.
        seconds: limit from the start of the command to loadable heads.
        cores: for all work.
        questions: number of questions, from the start of the file.
        max_new_tokens: longest answer.
    """

    target: str = "smollm2-135m"
    prompts: tuple[str, ...] = ("self", READY_MADE)
    seconds: float = 3600.0
    cores: int = 2
    questions: int = 40
    max_new_tokens: int = 128


RULES = Rules()


def main(arguments: Sequence[str] | None = None, rules: Rules = RULES) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="packaged recipe or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--name", required=True, help="name of the entry and its file")
    parser.add_argument("--by", required=True, help="author")
    parser.add_argument("--out", type=Path, default=Path("out/leaderboard"))
    options = parser.parse_intermixed_args(arguments)

    recipe = entered(load_recipe(options.recipe, options.overrides), options.name)
    if broken := broken_by(recipe, rules):
        raise UserError(f"The recipe breaks a rule: {broken[0]}.", "See docs/leaderboard.md.")
    folder = options.out / options.name / "run"
    if folder.parent.exists():
        raise UserError(f"{folder.parent} exists already.", "An entry starts from scratch: choose another --name.")
    pin(rules.cores)
    run, began = Run(recipe, folder, Console()), perf_counter()
    stages = stages_until("export")
    check_inputs(recipe, stages)
    execute(run, stages)
    seconds = perf_counter() - began
    if seconds > rules.seconds:
        taken, allowed = format_seconds(seconds), format_seconds(rules.seconds)
        raise UserError(f"Training took {taken}; the limit is {allowed}.", "Lower minutes.")

    print(f"Measuring {rules.questions} answers in float32. This takes minutes and does not count.")
    loaded = load(folder / HEADS, target=rules.target, dtype="float32", device="cpu")
    # Without a tuning, so that timing has no influence.
    decoder = Decoder(loaded.target, loaded.heads, TreeShape.chain(loaded.heads.draft_steps))
    results = evaluate(decoder, read_questions(QUESTIONS)[: rules.questions], measuring(rules, options.name), Console())
    summary = results["summary"]
    row = {
        "name": options.name,
        "by": options.by,
        "family": recipe.heads.family,
        "parameters": sum(weight.numel() for weight in decoder.heads.parameters()),
        "tokens_per_round": summary["tokens_per_round"],
        "acceptance_by_position": summary["acceptance_by_position"],
        "seconds": seconds,
        "outputs_different": summary["divergences"]["count"],
    }
    noted = recipe.model_copy(update={"data": recipe.data.model_copy(update={"exclude": (_relative(QUESTIONS),)})})
    details = {
        "recipe": noted.model_dump(mode="json"),
        "stages": {stage.name: known.seconds for stage in stages if (known := run.record(stage.name))},
        "provenance": {key: value for key, value in _provenance(folder).items() if key != "argv"},
        "target_fingerprint": decoder.target.identity().fingerprint,
        "files": {_relative(QUESTIONS): content(QUESTIONS)},
        "per_prompt": [[prompt["id"], prompt["tokens_per_round"]] for prompt in results["per_prompt"]],
    }
    file = options.out / f"{options.name}.json"
    what = (
        f"{options.name}, by {options.by}: heads from scratch on {rules.cores} cores, then a greedy chain in float32."
    )
    record(file, what, [row], results["environment"], __file__, arguments, asdict(rules), details)
    for problem in problems(read_json(file), rules):
        print(f"Not valid: {problem}.")
    print(f"{file}: {row['tokens_per_round']:.3f} tokens per round, trained in {format_seconds(seconds)}")


def entered(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with the entry's name, on CPUs, excluding the questions from its data."""
    exclude = (*recipe.data.exclude, str(QUESTIONS))
    update = {
        "name": name,
        "target": recipe.target.model_copy(update={"device": "cpu"}),
        "data": recipe.data.model_copy(update={"exclude": exclude}),
    }
    return recipe.model_copy(update=update)


def measuring(rules: Rules, name: str) -> EvalOptions:
    """Return the options of every entry: a greedy chain of full depth in every round, independent of timing."""
    return EvalOptions(
        max_new_tokens=rules.max_new_tokens, drafter="heads", draft="on", baselines=False, heads_name=name
    )


def broken_by(recipe: Recipe, rules: Rules = RULES) -> list[str]:
    """Return the rules that a recipe breaks, as phrases."""
    target, data, train = recipe.target, recipe.data, recipe.train
    prompts = data.prompts
    sources = {prompts} if isinstance(prompts, str) else {source.source for source in prompts}
    rules_kept = {
        f"the target is {rules.target} as it is (no adapter, no quantization)": target.spec == rules.target
        and target.adapter is None
        and target.quantization == "none",
        f"the target writes the answers, and prompts are {' or '.join(rules.prompts)} (data.prompts)": data.regenerate
        and sources <= set(rules.prompts),
        "nothing is computed elsewhere (data.server=null)": data.server is None,
        "heads start from the target alone (train.start_from=null)": train.start_from is None,
        "the questions are in data.exclude": any(Path(file).name == QUESTIONS.name for file in data.exclude),
    }
    return [rule for rule, kept in rules_kept.items() if not kept]


def problems(entry: Mapping[str, Any], rules: Rules = RULES) -> list[str]:
    """Return the reasons against an entry, as phrases."""
    details, (row,) = entry["details"], entry["rows"]
    recipe = parse_recipe(details["recipe"])
    checks = {
        "its rules have changed": entry["settings"] == json.loads(json.dumps(asdict(rules))),
        "its questions have changed": details["files"] == {_relative(QUESTIONS): content(QUESTIONS)},
        "it took too long": row["seconds"] <= rules.seconds,
        "it used more cores": entry["machine"]["threads"] <= rules.cores,
        "its answers differ from plain decoding": row["outputs_different"] == 0,
        "some questions are unanswered": len(details["per_prompt"]) == rules.questions,
        "its code is not committed": bool(entry["commit"]) and not entry["commit"].endswith("+"),
    }
    return [*broken_by(recipe, rules), *(problem for problem, kept in checks.items() if not kept)]


def pin(cores: int) -> None:
    """Restrict this process and its children to some cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("This system cannot restrict a process to some cores.", "Make the entry on Linux.")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(cores)


def _relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _provenance(folder: Path) -> dict[str, Any]:
    """Return the provenance of the command that made the heads."""
    return dict(read_json(folder / PROVENANCE)["commands"][-1])


if __name__ == "__main__":
    main()
