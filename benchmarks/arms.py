"""What the benchmark scripts share: heads trained on one data set, every stage kept on disk, one alternating run.

An *arm* is a recipe with a name. All arms of a script learn from the same stored states; what an arm has finished is
kept in its folder and skipped the next time, and a folder that was made from other settings is refused rather than
overwritten.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.api import Decoder
from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.questions import Question
from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.decode.loop import DecodeLoop, Round
from headstart.errors import UserError
from headstart.eval.audit import decode_in_batches
from headstart.eval.figures import Prompt, Unit, acceptance_by_position, mean_round_ms, method_rounds, rate, speedup
from headstart.eval.figures import tokens_per_round as mean_tokens
from headstart.eval.labels import PLAIN
from headstart.eval.methods import Method, Run
from headstart.heads.base import DraftHead, family, make_config
from headstart.heads.io import load_heads
from headstart.hub.format import export_heads
from headstart.model.model import Target
from headstart.pipeline.run import CONVERSATIONS, STATES
from headstart.recipes.recipe import Recipe, load_recipe
from headstart.replay.patch import FINAL
from headstart.support.files import read_json, write_json
from headstart.train.trainer import train
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import Text, measure_drafts
from headstart.tuning.tune import replay, tune

WARM_UP_TOKENS = 32
MAX_RANK = 10
"""Drafts of a depth that are told apart when acceptance is replayed."""


@dataclass(frozen=True)
class Arm:
    """One thing to compare: a recipe and what the tables call it."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class TrainingData:
    """What all arms learn from: states of the training and validation conversations, and the latter themselves."""

    train: StateStore
    validation: StateStore
    texts: list[Conversation]


def options_of(doc: str | None, out: Path, dtype: str = "auto", runs: bool = True) -> argparse.ArgumentParser:
    """A parser with what these benchmarks have in common: whose data (with `runs`), where to, which target."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs:
        parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="whose conversations to use")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for our recipes")
    parser.add_argument("--limit", type=int, help="questions of each file at most")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--chain", type=int, default=5, help="drafts of the chain, as far as the heads reach")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of hidden states at most")
    return parser


def budget(minutes: float | None = None, steps: int | None = None, epochs: int | None = None) -> list[str]:
    """Overrides that replace a recipe's training budget by this one."""
    return [
        f"train.minutes={minutes if minutes is not None else 'null'}",
        f"train.steps={steps if steps is not None else 'null'}",
        f"train.epochs={epochs or 100_000}",
    ]


def arm(name: str, recipe: str, overrides: Iterable[str] = ()) -> Arm:
    """An arm from a recipe's name or path and overrides, the later ones winning."""
    return Arm(name, load_recipe(recipe, overrides))


def aux_layers_of(target: Target, recipe: Recipe) -> set[int]:
    """Hidden states that the recipe's heads and their teacher read."""
    config = make_config(recipe.heads, target)
    with torch.device("meta"):
        return {*family(config.family)(config).aux_layers, FINAL}


def training_data(
    run: Path, out: Path, target: Target, arms: Sequence[Arm], gigabytes: float = 8.0, reuse: bool = True
) -> TrainingData:
    """States of a run's conversations with every layer that an arm reads.

    With `reuse` the run's own stores serve when they have all aux layers; else stores are built in `out` once, from its
    conversations.
    """
    aux_layers = sorted(set().union(*(aux_layers_of(target, compared.recipe) for compared in arms)))
    stores = {}
    for split in ("train", "validation"):
        store = _store_with(run / STATES / split, target, aux_layers) if reuse else None
        if store is None:
            print(f"hidden states of the {split} conversations, layers {aux_layers}", flush=True)
            texts = read_conversations(run / CONVERSATIONS / f"{split}.jsonl")
            store = build_store(out / "states" / split, texts, target, aux_layers, budget_bytes=int(1e9 * gigabytes))
        stores[split] = store
    texts = read_conversations(run / CONVERSATIONS / "validation.jsonl")
    return TrainingData(stores["train"], stores["validation"], texts)


def _store_with(folder: Path, target: Target, aux_layers: Sequence[int]) -> StateStore | None:
    try:
        store = StateStore(folder)
    except UserError:
        return None
    same = store.target_fingerprint == target.identity().fingerprint
    return store if same and set(aux_layers) <= set(store.aux_layers) else None


def once(folder: Path, settings: Mapping[str, Any], work: Callable[[], None]) -> None:
    """Do some work in `folder` unless it was finished there before.

    Raises:
        UserError: when the folder was made from other settings.
    """
    file, wanted = folder / "made_from.json", json.loads(json.dumps(settings))
    if file.is_file():
        kept = read_json(file)
        if kept["settings"] != wanted:
            raise UserError(f"{folder} was made from other settings.", "Delete it, or give another --out.")
        if kept["whole"]:
            return
    write_json(file, {"settings": wanted, "whole": False})
    work()
    write_json(file, {"settings": wanted, "whole": True})


def trained(candidate: Arm, target: Target, data: TrainingData, folder: Path) -> DraftHead:
    """The best heads of an arm, in the target's dtype; trained now unless they were before."""
    settings = {
        "heads": candidate.recipe.heads.to_recipe(),
        "train": candidate.recipe.train.model_dump(mode="json"),
        "data": data.train.fingerprint,
        "target": target.identity().fingerprint,
    }

    def work() -> None:
        print(f"training {candidate.name}", flush=True)
        train(candidate.recipe, target, data.train, data.validation, folder)

    once(folder, settings, work)
    return load_heads(folder / "best", target).to(target.dtype)


def tuned(candidate: Arm, target: Target, data: TrainingData, folder: Path) -> Decoder:
    """An arm's heads with their tree, trained and tuned now unless they were before."""
    heads, section = trained(candidate, target, data, folder / "train"), candidate.recipe.tune

    def work() -> None:
        print(f"tuning {candidate.name}", flush=True)
        tuning = tune(target, heads, data.texts, section)
        export_heads(folder / "heads", heads, target, tuning.to_json(), {})

    once(folder / "tune", section.model_dump(mode="json"), work)
    decoder: Decoder = headstart.load(folder / "heads", target)
    return decoder


def facts(folder: Path) -> dict[str, Any]:
    """What training says of itself: steps, seconds, parameters, and the best validation."""
    result = read_json(folder / "result.json")
    return {
        "parameters": result["trainable_parameters"],
        "steps": result["steps"],
        "epochs": round(result["epochs"], 2),
        "seconds": result["elapsed_seconds"],
        "best_step": result["best"]["step"],
        "validation_tau": result["best"]["tau"],
        "validation_top1": result["best"]["top1"],
    }


# -- without a clock -------------------------------------------------------------------------------------------------


def answered(target: Target, questions: Sequence[Question], file: Path, max_new_tokens: int) -> list[Text]:
    """Questions with the target's plain greedy answers, which are written to `file` once."""
    prompts = [prompt_tokens([{"role": "user", "content": item.turns[0]}], target.tokenizer) for item in questions]
    key = {"target": target.identity().fingerprint, "max_new_tokens": max_new_tokens, "prompts": prompts}
    kept = read_json(file) if file.is_file() else {}
    if {name: kept.get(name) for name in key} != key:
        outputs = decode_in_batches(DecodeLoop(target), prompts, max_new_tokens, 16)
        kept = {**key, "answers": [output.tokens for output in outputs]}
        write_json(file, kept)
    return [Text.of(prompt, answer) for prompt, answer in zip(prompts, kept["answers"], strict=True)]


def chain_tau(target: Target, heads: DraftHead, texts: Sequence[Text | Conversation], length: int) -> dict[str, Any]:
    """What a greedy chain of `length` drafts would do on texts that the target wrote greedily: no clock, no chance.

    Returns:
        tau (tokens a round, the target's own included), accepted (drafts a round), top1 (of each step on its own).
    """
    length = min(length, heads.draft_steps)
    ranks_OK = measure_drafts(target, heads, texts, MAX_RANK).ranks_OK[:, :length]
    tau = replay(ranks_OK, TreeShape.chain(length).paths)
    top1 = [round(float((ranks_OK[:, step] == 0).float().mean()), 4) for step in range(length)]
    return {"drafts": length, "tau": round(tau, 4), "accepted": round(tau - 1, 4), "top1": top1}


# -- against the clock -----------------------------------------------------------------------------------------------


def alternate(
    target: Target,
    methods: Mapping[str, Method],
    questions: Sequence[Question],
    folder: Path,
    settings: Mapping[str, Any],
    max_new_tokens: int,
) -> list[Unit]:
    """Every question through every method, the methods taking turns and another one going first each time.

    Each question's runs are kept in `folder`, so a run that was stopped goes on with the next question.
    """
    names, units, warm = list(methods), [], False
    once(folder, {**settings, "methods": names, "max_new_tokens": max_new_tokens}, lambda: None)
    for number, question in enumerate(questions):
        tokens = prompt_tokens([{"role": "user", "content": question.turns[0]}], target.tokenizer)
        file = folder / "runs" / f"{number:04d}.json"
        kept = read_json(file) if file.is_file() else {}
        if kept.get("prompt") != tokens:
            if not warm:
                for method in methods.values():
                    method.run([tokens], min(WARM_UP_TOKENS, max_new_tokens), number)
                warm = True
            first = number % len(names)
            order = names[first:] + names[:first]
            runs = {name: asdict(methods[name].run([tokens], max_new_tokens, number)) for name in order}
            kept = {"prompt": tokens, "runs": {name: {**runs[name], "token_ms": []} for name in names}}
            write_json(file, kept)
            print(f"{folder.name}: {number + 1} of {len(questions)}", flush=True)
        prompt = Prompt(str(question.question_id), question.category, tokens)
        units.append(Unit(number, [prompt], {name: _run(kept["runs"][name]) for name in names}))
    return units


def _run(values: dict[str, Any]) -> Run:
    return Run(**{**values, "rounds": [[Round(**done) for done in row] for row in values["rounds"]]})


def row_of(units: Sequence[Unit], method: str, over: Mapping[str, str], seed: int = 0) -> dict[str, Any]:
    """One method's figures: tokens a second and a round, acceptance, milliseconds, and its speed-ups.

    `same_as_plain`, the number of outputs equal to the plain loop's, says something of greedy runs only.

    Args:
        units: from `alternate`.
        method: its name there.
        over: {key in the row: name of a baseline}.
        seed: of the bootstrap.
    """
    drafted = method_rounds(units, method)
    row: dict[str, Any] = {
        "tokens_per_second": rate(units, method, seed),
        "tau": mean_tokens(drafted) if drafted else None,
        "accepted_per_round": mean_tokens(drafted) - 1 if drafted else None,
        "acceptance_by_position": acceptance_by_position(drafted),
        "nodes_per_round": sum(done.nodes for done in drafted) / len(drafted) if drafted else None,
        "round_ms": mean_round_ms(units, method),
        "drafter_error": next((e for unit in units if (e := unit.runs[method].drafter_error)), None),
    }
    if PLAIN in units[0].runs:
        row["same_as_plain"] = sum(unit.runs[method].tokens == unit.runs[PLAIN].tokens for unit in units)
    return row | {key: speedup(units, base, seed, method) for key, base in over.items()}
