"""Commands on existing heads: measure, tune, copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from shutil import copytree
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from headstart.api import Decoder
from headstart.data.conversations.records import read_conversations
from headstart.data.prompts.questions import Question
from headstart.errors import UserError
from headstart.eval.evaluate import evaluate
from headstart.eval.options import EvalOptions
from headstart.eval.report import RESULTS, write_report
from headstart.heads.io import WEIGHTS
from headstart.hub.card import add_engine_figures
from headstart.hub.engine_tuning import FILE, EngineTuning, read_engine_tunings, setting_of
from headstart.hub.format import check_folder, export_heads, read_config, refuse_other_files
from headstart.model.loading import load_target
from headstart.pipeline.run import CONVERSATIONS, HEADS, REPORT, TARGET, content
from headstart.support.answer_file import read_answers
from headstart.support.files import read_json, write_atomic
from headstart.support.provenance import typed
from headstart.tuning.tune import Tuning, tune


def report(
    decoder: Decoder,
    questions: Sequence[Question],
    options: EvalOptions,
    out: Path,
    console: Console,
    training: Mapping[str, str] | None = None,
    engines: Mapping[str, EngineTuning] | None = None,
) -> dict[str, Any]:
    """Measure loaded heads on questions, write results.json, report.md and report.html, and return the results.
    `training` and `engines` add rows about the heads' training and their measurements in serving engines."""
    results = evaluate(decoder, questions, options, console)
    results["settings"]["command"] = typed()
    with suppress(UserError):  # a target alone
        heads = decoder.heads
        results["settings"]["heads"] = {
            "family": heads.config.family,
            **({"version": heads.version} if heads.version else {}),
            "size": f"{sum(weight.numel() for weight in heads.parameters()) / 1e6:.1f} M parameters",
            "drafts in a row": str(heads.draft_steps),
            "draft vocabulary": f"{heads.config.draft_width} of {heads.config.vocab_size} tokens",
            **(training or {}),
        }
    write_report(with_engines(results, engines or {}), out)
    return results


def with_engines(results: dict[str, Any], measured: Mapping[str, EngineTuning]) -> dict[str, Any]:
    """Add the measurements in serving engines to results, if there are any."""
    engines = [{**asdict(tuning), "setting": setting_of({name: tuning})} for name, tuning in measured.items()]
    return {**results, "engines": engines} if engines else results


def add_engines_to_report(run: Path) -> None:
    """Add the measurements in serving engines to a run's report, if it has one."""
    file, measured = run / REPORT / RESULTS, read_engine_tunings(run / HEADS)
    if measured and file.is_file():
        write_report(with_engines(read_json(file), measured), run / REPORT)


def retune(decoder: Decoder, folder: Path, validation: Path | None, console: Console) -> str:
    """Tune the heads of a folder in place and return a summary. `validation`: see `validation_file`."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder here.", "Tuning writes into the folder: give a copy of the heads.")
    refuse_other_files(folder)
    texts = read_conversations(validation_file(folder, validation))
    tuning = tune(decoder.target, decoder.heads, texts, console=console)
    # Earlier measurements belong to the earlier tree; facts about training stay true.
    facts = {"training": read_config(folder).get("training", {})}
    answers = read_answers(decoder.answers) if decoder.answers is not None else []
    with keeping_engine_tunings(folder):
        export_heads(folder, decoder.heads, decoder.target, tuning.to_json(), facts, answers)
    return f"{describe_tuning(tuning)}. Tree, calibration and model card in {folder} are new"


@contextmanager
def keeping_engine_tunings(folder: Path) -> Iterator[None]:
    """Keep the measurements in serving engines while a folder is rewritten, unless its weights change."""
    kept = (folder / FILE).read_bytes() if (folder / FILE).is_file() else None
    before = content(folder / WEIGHTS)
    yield
    if kept is not None and before == content(folder / WEIGHTS):
        (folder / FILE).write_bytes(kept)
        add_engine_figures(folder)


def validation_file(folder: Path, named: Path | None) -> Path:
    """Return the file of tokenised conversations to tune on; by default the validation split of the folder's run."""
    file = named or folder.parent / CONVERSATIONS / "validation.jsonl"
    if not file.is_file():
        raise UserError(
            "There are no validation conversations to tune on.",
            "Name a file with --conversations; a run keeps its own in data/conversations/validation.jsonl.",
        )
    return file


def copy_heads(heads: Path, out: Path) -> None:
    """Copy a folder of heads; a UserError where `out` holds other files."""
    check_folder(heads)
    refuse_other_files(out)
    write_atomic(out, lambda partial: copytree(heads, partial))


def tokenizer_for(file: Path, target: str | None, trust_remote_code: bool) -> Any:
    """Return the tokenizer of `target`, by default the tokenizer kept in the run of a conversation file."""
    if target is not None:
        return load_target(target, trust_remote_code=trust_remote_code).tokenizer
    for folder in file.resolve().parents:
        if (kept := folder / TARGET / "tokenizer").is_dir():
            return AutoTokenizer.from_pretrained(kept)
    raise UserError(
        f"{file} is not in the folder of a run: its tokenizer is unknown.", "Name the target with --target."
    )


def describe_tuning(tuning: Tuning) -> str:
    predicted, kinds = tuning.predicted, describe_kinds(tuning.kinds)
    if tuning.shape.size == 1:
        return f"no tree pays on this machine: decoding stays plain{kinds}"
    what = "dynamic trees" if tuning.tree == "dynamic" else f"a tree of {tuning.shape.size} nodes"
    return (
        f"{what}, {tuning.shape.depth} deep: predicted {predicted['speedup']:.2f}x over "
        f"plain decoding (τ {predicted['tokens_per_round']:.2f}){kinds}"
    )


def describe_kinds(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Describe the prompt kinds with the lowest and highest τ of a chain; empty with fewer than two kinds.

    >>> of_all = {"kind": "", "tau": 2.2, "entropy": 1.5}
    >>> summary = {"kind": "summary", "tau": 1.9, "entropy": 1.7}
    >>> describe_kinds([of_all, summary, {"kind": "math", "tau": 2.5, "entropy": 1.1}])
    '; a chain gives τ 1.90 on summary (entropy of the target 1.70 nats) to 2.50 on math (1.10)'
    """
    if len(kinds) < 3:
        return ""
    worst, best = kinds[1], kinds[-1]
    return (
        f"; a chain gives τ {worst['tau']:.2f} on {worst['kind']} (entropy of the target {worst['entropy']:.2f} nats) "
        f"to {best['tau']:.2f} on {best['kind']} ({best['entropy']:.2f})"
    )
