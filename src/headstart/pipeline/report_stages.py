"""Stages after tuning: export the folder of heads, and report on it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headstart.api import load
from headstart.data.conversations.records import each_conversation
from headstart.data.prompts.chat import with_template_kwargs
from headstart.data.prompts.questions import Question, read_questions
from headstart.data.states.store import StateStore
from headstart.decode.options import ServingOptions
from headstart.drafters.memory import CONTEXT
from headstart.errors import UserError
from headstart.eval.environment import machine_facts
from headstart.eval.options import EvalOptions
from headstart.eval.report import nothing_drafted, write_report
from headstart.heads.io import CONFIG
from headstart.hub.card import write_card
from headstart.hub.engines.importing import untuned
from headstart.hub.format import export_heads, refuse_other_files
from headstart.model.teacher import TeacherModel
from headstart.pipeline.actions import add_engines_to_report, keeping_engine_tunings, report
from headstart.pipeline.data_stages import conversation_files, conversations
from headstart.pipeline.generation_servers import target_options
from headstart.pipeline.head_stages import trained_heads
from headstart.pipeline.in_engine import evaluate_in_engine
from headstart.pipeline.run import (
    HEADS,
    QUESTIONS,
    REPORT,
    STATES,
    TARGET,
    TRAIN,
    TUNE,
    Outcome,
    Run,
    Stage,
    before,
    conditions,
    content,
    flat,
    where,
)
from headstart.recipes.sections import DataSection
from headstart.support.artifacts import Artifact, add_reference, artifact, link_into_run, lock_artifact
from headstart.support.files import read_json, refuse_foreign_code, write_atomic, write_json
from headstart.support.lock import locked
from headstart.support.terminal import program, tell
from headstart.train.tracking import link_report

_REPORT_FILES = {"report.html", "report.md", "results.json"}
_EXPORT_VERSION = 1
_UNTUNED = "untuned_heads.json"
"""Names the training that untuned heads come from."""
_EVAL_VERSION = 3
"""Raise it, as _EXPORT_VERSION, when the same settings produce another result."""


def _export_settings(run: Run) -> dict[str, Any]:
    variables = run.recipe.data.chat_template_kwargs
    return {"data.chat_template_kwargs": variables} if variables else {}


def _export(run: Run) -> Outcome:
    made = _exported(run)
    with lock_artifact(made, run.console) as folder:
        add_reference(run.folder, "export", made)
        if not (folder / HEADS).is_dir():
            tuning = read_json(run.folder / TUNE / "tuning.json")
            heads = trained_heads(run, run.target)
            facts = {"training": _training_facts(run)}
            export_heads(folder / HEADS, heads, run.target, tuning, facts, _answers(run))
        _link_heads(folder / HEADS, run.folder / HEADS)
    return Outcome(f"heads, tree and model card in {run.folder / HEADS}", identity=made.name)


def keep_untuned(run: Run) -> bool:
    """Export the heads of a trained, untuned run as a chain; returns False if there is nothing to do.

    Needs only the teacher. A UserError where the tuned heads are of an earlier training.
    """
    trained, note = run.finished_record("train"), run.folder / "stages" / _UNTUNED
    kept = _kept_training(run, note)
    if trained is None or kept in ("unknown", trained.identity):
        return False
    if kept is not None and run.finished_record("export") is not None:
        raise UserError(
            f"The heads in {run.folder / HEADS} are from an earlier training of this run.",
            f"Tune the new ones first: headstart tune {run.folder}. Or move that folder away, to take the new ones as "
            "they are.",
        )
    with locked(run.folder):
        target = run.frozen()
        if isinstance(target, TeacherModel):
            tokenizer = AutoTokenizer.from_pretrained(run.folder / TARGET / "tokenizer")
            target = target.with_tokenizer(with_template_kwargs(tokenizer, run.recipe.data.chat_template_kwargs))
        heads = trained_heads(run, target)
        right = read_json(run.folder / TRAIN / "result.json")["best"].get("chain")
        facts = {"training": _training_facts(run)}
        export_heads(run.folder / HEADS, heads, target, untuned(heads, right), facts, _answers(run))
        write_json(note, {"train": trained.identity})
    return True


def _kept_training(run: Run, note: Path) -> str | None:
    """Return the identity of the training that a run's heads come from: from the export's record, or the note on
    untuned heads, else "unknown"; None without heads."""
    if not (run.folder / HEADS / CONFIG).is_file():
        return None
    if (tuned := run.finished_record("export")) is not None:
        return tuned.before.get("train", "unknown")
    return str(read_json(note)["train"]) if note.is_file() else "unknown"


def _exported(run: Run) -> Artifact:
    identity = {
        "version": _EXPORT_VERSION,
        "heads": before(run, "train"),
        "tuning": before(run, "tune"),
        "target": run.recipe.target.spec,  # written into the heads' config
        **_export_settings(run),
    }
    return artifact(run.folder, "exports", run.recipe.heads.family, identity)


def _link_heads(source: Path, path: Path) -> None:
    refuse_other_files(path)
    with keeping_engine_tunings(path):
        link_into_run(source, path)


def _sources(data: DataSection) -> str:
    if isinstance(data.prompts, str):
        return data.prompts
    total = sum(source.weight for source in data.prompts)
    shares = [(source.source, f"{source.weight / total:.0%}") for source in data.prompts]
    return ", ".join(f"{source} ({'for what is missing' if share == '0%' else share})" for source, share in shares)


def _answers(run: Run) -> Iterator[list[int]]:
    """Yield the target's own training answers, each after the last CONTEXT tokens of its prompt."""
    if run.recipe.data.own_answers:
        for conversation in each_conversation(conversation_files(run)["train"]):
            for start, stop in conversation.supervised_spans:
                yield list(conversation.tokens[max(0, start - CONTEXT) : stop])


def _training_facts(run: Run) -> dict[str, str]:
    result, data, training = read_json(run.folder / TRAIN / "result.json"), run.recipe.data, run.recipe.train
    trained_on = conversations(run, "train") if run.recipe.data.online else StateStore(run.folder / STATES / "train")
    source = "written by the target itself" if data.prompts == "self" else _sources(data)
    answers = "the target's own" if data.own_answers else "as given"
    if data.own_answers and data.in_int8:
        answers += ", with products in 8 bits where a CPU computes faster with them"
    return {
        "recipe": run.recipe.name,
        "prompts": source,
        "answers": answers,
        **({"chat template variables": json.dumps(data.chat_template_kwargs)} if data.chat_template_kwargs else {}),
        "training conversations": str(len(trained_on)),
        "steps": f"{result['steps']} of at most {training.batch_tokens * training.gradient_accumulation_steps} tokens; "
        f"these are the heads of step {result['best']['step']}",
        "loss": training.loss,
        "supervised tokens that the heads can draft": f"{result['coverage']:.1%}",
    }


def _eval_settings(run: Run) -> dict[str, Any]:
    section = run.recipe.eval
    return {**flat("eval", section), **where(run), "the questions' file": content(section.questions)}


def _measure(run: Run, heads: Path, questions: Sequence[Question], out: Path) -> None:
    """Measure exported heads in eval.engine, or in this process, and write the report."""
    section, facts = run.recipe.eval, _training_facts(run)
    name = "held out" if section.questions == "heldout" else Path(section.questions).name
    chosen = section.model_dump(include={"limit", "max_new_tokens", "temperature"})
    options = EvalOptions(**chosen, heads_name=run.recipe.name, questions_name=name)
    if section.engine is None:
        options = replace(options, compare=section.compare)
        report(load(heads, run.target), questions, options, out, run.console, facts)
        return
    run.release()
    (command, arguments), target = run.recipe.measuring_engine, run.recipe.target
    arguments = f"{shlex.join(target_options(target, section.engine))} {arguments}".strip()
    serving = ServingOptions(section.engine, command, engine_arguments=arguments)
    trusted = target.trust_remote_code
    results = evaluate_in_engine(heads, questions, options, serving, None, run.console, trust_remote_code=trusted)
    results["settings"]["heads"] |= facts
    write_report(results, out)


def _eval(run: Run) -> Outcome:
    refuse_foreign_code(run.folder / REPORT, _REPORT_FILES)
    section, source = run.recipe.eval, run.recipe.eval.questions
    file = run.folder / QUESTIONS if source == "heldout" else Path(source).expanduser()
    exported = _exported(run)
    identity = {
        "version": _EVAL_VERSION,
        "heads": exported.name,
        **_eval_settings(run),
        "questions": content(file),
        "conditions": machine_facts() if section.engine else conditions(run),
    }
    made = artifact(run.folder, "reports", run.recipe.heads.family, identity)
    with lock_artifact(made, run.console) as folder, lock_artifact(exported, run.console):
        add_reference(run.folder, "eval", made)
        if not (folder / REPORT / "results.json").is_file():
            # Measure the exported folder: the report covers what users load.
            measure = partial(_measure, run, exported.folder / HEADS, read_questions(file))
            write_atomic(folder / REPORT, measure)
        results = read_json(folder / REPORT / "results.json")
        name = "held-out prompts" if source == "heldout" else Path(source).stem
        facts = {"training": _training_facts(run), "measurements": [{"name": name, "results": results}]}
        write_card(exported.folder / HEADS, facts)
        _link_heads(exported.folder / HEADS, run.folder / HEADS)
        link_into_run(folder / REPORT, run.folder / REPORT)
        add_engines_to_report(run.folder)

    recipe, trained, summary = run.recipe, run.folder / TRAIN, results["summary"]
    link_report(
        recipe.train, trained, recipe.name, run.folder / REPORT, summary, lambda text: tell(run.console, f"    {text}")
    )
    return Outcome(headline(results, run), identity=made.name)


def headline(results: Mapping[str, Any], run: Run) -> str:
    """Describe the result of a report in a phrase, with the next step where nothing was drafted."""
    summary, engine, prompts = results["summary"], run.recipe.eval.engine, f"on {len(results['per_prompt'])} prompts"
    if nothing_drafted(summary, results):
        return (
            f"nothing was drafted {prompts}, because plain decoding was expected to be faster: train longer (minutes, "
            f"train.steps or data.conversations), or look for a fault with {program()} doctor {run.folder}"
        )
    speedup, where = summary["speedup_vs_plain"], f" in {engine}" if engine else ""
    measured = f"{speedup['mean']:.2f}x over plain decoding{where}, measured; " if speedup else ""
    return f"{measured}τ {summary['tokens_per_round']:.2f} {prompts}"


REPORT_STAGES = (
    Stage(
        name="export",
        title="writing the folder to keep and share",
        version=_EXPORT_VERSION,
        outputs=(HEADS,),
        after=("train", "tune"),
        settings=_export_settings,
        work=_export,
    ),
    Stage(
        name="eval",
        title="measuring against the baselines",
        version=_EVAL_VERSION,
        outputs=(REPORT,),
        after=("conversations", "export"),
        settings=_eval_settings,
        work=_eval,
        takes_memory="eval.max_new_tokens",
    ),
)
