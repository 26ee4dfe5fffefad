"""The stages of `headstart run`: target, conversations, states, train, tune, export, eval."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headstart.errors import UserError
from headstart.files import format_bytes, need_disk, read_json, write_json, write_jsonl
from headstart.pipeline.actions import describe_tuning, report
from headstart.pipeline.layout import CONVERSATIONS, HEADS, QUESTIONS, REPORT, STATES, TARGET, TRAIN, TUNE
from headstart.pipeline.run import Outcome, Run, Stage, target_identity
from headstart.train.config import Recipe, Section

if TYPE_CHECKING:
    from headstart.data.conversations import Conversation
    from headstart.data.store import StateStore
    from headstart.heads import DraftHead

_SPLITS = ("train", "calibration")
_NO_EFFECT = {"tracker", "project", "log_every", "save_every"}
"""Train settings that change nothing about the heads that come out."""


# -- before anything ---------------------------------------------------------------------------------------------------


def check_inputs(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Refuse now what would otherwise stop one of these stages after minutes of work.

    Raises:
        UserError: a file that is missing or malformed, or a report without prompts to measure on.
    """
    from headstart.data.questions import read_questions

    prompts = Path(recipe.data.prompts).expanduser()
    if prompts.suffix in (".json", ".jsonl") and not prompts.is_file():
        raise UserError(f"No file at {recipe.data.prompts}.", "Check data.prompts; a relative path starts here.")
    if all(stage.name != "eval" for stage in stages):
        return
    if recipe.eval.questions != "heldout":
        read_questions(Path(recipe.eval.questions).expanduser())
    elif not recipe.data.heldout:
        raise UserError(
            "The report needs held-out prompts, and data.heldout is 0.",
            "Set data.heldout=64, or eval.questions to a question file.",
        )


def state_bytes(run: Run, conversations: float, tokens: float | None = None) -> int:
    """Bytes of hidden states to expect of so many conversations, as far as the recipe lets them grow.

    Args:
        run: recipe and target.
        conversations: how many.
        tokens: of one, on average (`headstart.pipeline.lengths`); None reads some of the recipe's prompts.
    """
    from headstart.data.store import estimate_bytes
    from headstart.pipeline.lengths import expected_tokens, prompts_of

    data, target = run.recipe.data, run.target
    if tokens is None:
        tokens = expected_tokens(data, target, prompts_of(data, target.tokenizer))
    size = estimate_bytes(int(conversations * tokens), len(taps(run)), target.hidden_size, target.dtype)
    return min(size, int(1e9 * data.cache_gigabytes))


# -- target ----------------------------------------------------------------------------------------------------------


def _target_settings(run: Run) -> dict[str, Any]:
    place = Path(run.recipe.target.spec).expanduser()
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    return {**_flat("target", run.recipe.target), "the target's files": stamps}


def _target(run: Run) -> Outcome:
    from headstart.data.conversations import check_template

    target = run.target
    check_template(target.tokenizer)
    taps(run)  # a mistake in the heads' settings shows now, not after the data
    if run.recipe.data.minutes is None:
        count = run.recipe.data.conversations + run.recipe.data.calibration
        need_disk(run.folder, state_bytes(run, count), "Keeping hidden states")
    target.tokenizer.save_pretrained(run.folder / TARGET / "tokenizer")
    kind = str(target.dtype).removeprefix("torch.")
    return Outcome(
        f"{target.name}, {target.parameters / 1e6:.1f} M parameters, {kind} on {target.device}",
        identity=target_identity(target),
    )


def taps(run: Run) -> list[int]:
    """Hidden states that the recipe's heads need, FINAL among them. Remembered, so that asking again loads no model.

    Raises:
        UserError: unknown family, or a setting that the family does not have.
    """
    file = run.folder / "data" / "taps.json"
    record = run.record("target")
    key = {"heads": run.recipe.heads, "target": record.identity if record and record.whole else ""}
    if file.is_file():
        known = read_json(file)
        if {name: known.get(name) for name in key} == key:
            return [int(tap) for tap in known["taps"]]
    import torch

    from headstart.heads import family, make_config
    from headstart.target import FINAL

    config = make_config(run.recipe.heads, run.target)
    with torch.device("meta"):
        needed = sorted({*family(config.family)(config).taps, FINAL})
    write_json(file, {**key, "target": target_identity(run.target), "taps": needed})
    return needed


# -- data ------------------------------------------------------------------------------------------------------------


def _conversation_settings(run: Run) -> dict[str, Any]:
    settings = _flat("data", run.recipe.data, leave_out={"cache_gigabytes"})
    return {**settings, "the prompts' file": _content(run.recipe.data.prompts)}


def _conversations(run: Run) -> Outcome:
    from headstart.data.generate import build_conversations

    splits = build_conversations(run.target, run.recipe.data, run.folder / CONVERSATIONS, run.console)
    questions = [
        {
            "question_id": item.id,
            "category": item.category,
            "turns": [turn["content"] for turn in item.messages if turn["role"] == "user"],
        }
        for item in splits.heldout
    ]
    write_jsonl(run.folder / QUESTIONS, questions)
    answers = sum(sum(item.supervised) for item in splits.train)
    return Outcome(
        f"{len(splits.train)} conversations with {answers} answer tokens; {len(splits.calibration)} for calibration, "
        f"{len(splits.heldout)} held out"
    )


def conversations(run: Run, split: str) -> list[Conversation]:
    """What the conversation stage wrote."""
    from headstart.data.conversations import read_conversations

    return read_conversations(run.folder / CONVERSATIONS / f"{split}.jsonl")


def _state_settings(run: Run) -> dict[str, Any]:
    return {"data.cache_gigabytes": run.recipe.data.cache_gigabytes, "taps of the heads": taps(run)}


def _states(run: Run) -> Outcome:
    stores = [store(run, split) for split in _SPLITS]
    notice = f"; {stores[0].notice}" if stores[0].notice else ""
    size = format_bytes(sum(part.bytes for part in stores))
    return Outcome(f"hidden states of {sum(part.tokens for part in stores)} tokens, {size}{notice}")


def store(run: Run, split: str) -> StateStore:
    """The hidden states of a split: what is whole is kept, what is missing or cut short is computed."""
    from headstart.data.store import build_store

    with progress(run.console, f"hidden states ({split})", "tokens") as advance:
        return build_store(
            run.folder / STATES / split,
            conversations(run, split),
            run.target,
            taps(run),
            budget_bytes=int(run.recipe.data.cache_gigabytes * 1e9),
            advance=advance,
        )


# -- train and tune --------------------------------------------------------------------------------------------------


def _train_settings(run: Run) -> dict[str, Any]:
    heads = {f"heads.{key}": value for key, value in run.recipe.heads.items()}
    return {**_flat("train", run.recipe.train, leave_out=_NO_EFFECT), **heads}


def _train(run: Run) -> Outcome:
    from headstart.train.loop import train

    folder, lessons = run.folder / TRAIN, store(run, "train")
    if not _finished_here(run, lessons):
        train(run.recipe, run.target, lessons, store(run, "calibration"), folder, run.console)
    result = read_json(folder / "result.json")
    return Outcome(f"{result['steps']} steps; predicted τ of a chain {result['best']['tau']:.2f}")


def _finished_here(run: Run, lessons: StateStore) -> bool:
    """Whether `accelerate launch -m headstart.train`, on any number of processes, has trained these very heads."""
    from headstart.heads import make_config
    from headstart.train import checkpoint

    folder, training = run.folder / TRAIN, run.recipe.train
    if not (folder / "result.json").is_file():
        return False
    found = checkpoint.find(folder / "checkpoints", {}, run.console.print)
    if found is None:
        return False
    standing = found[1]
    over = [standing.epoch >= training.epochs]
    over.append(training.steps is not None and standing.step >= training.steps)
    over.append(training.minutes is not None and standing.elapsed >= 60 * training.minutes)
    if not any(over):  # with a smaller budget than this recipe's: training goes on
        return False
    kept = read_json(found[0] / checkpoint.MANIFEST)["settings"]
    wanted = {
        **_flat("train", training),
        "heads": make_config(run.recipe.heads, run.target).model_dump(mode="json"),
        "data fingerprint": lessons.fingerprint,
    }
    return all(wanted[key] == value for key, value in kept.items() if key in wanted)


def _tune_settings(run: Run) -> dict[str, Any]:
    return _flat("tune", run.recipe.tune)


def _tune(run: Run) -> Outcome:
    from headstart.decode.tune import tune

    section = run.recipe.tune
    tuning = tune(
        run.target,
        trained_heads(run),
        conversations(run, "calibration"),
        widths=section.widths,
        context=section.context,
        max_nodes=section.max_nodes,
        max_rank=section.max_rank,
        console=run.console,
    )
    write_json(run.folder / TUNE / "tuning.json", tuning.to_json())
    return Outcome(describe_tuning(tuning))


def trained_heads(run: Run) -> DraftHead:
    """The best heads of training, in the target's dtype."""
    from headstart.heads.io import load_heads

    return load_heads(run.folder / TRAIN / "best", run.target).to(run.target.dtype)


# -- export and report -----------------------------------------------------------------------------------------------


def _export(run: Run) -> Outcome:
    from headstart.hub import export_heads

    tuning = read_json(run.folder / TUNE / "tuning.json")
    export_heads(run.folder / HEADS, trained_heads(run), run.target, tuning, {"training": _training_facts(run)})
    return Outcome(f"heads, tree and model card in {run.folder / HEADS}")


def _training_facts(run: Run) -> dict[str, str]:
    """Rows of the model card about what the heads learned from."""
    from headstart.data.store import StateStore

    result, data, training = read_json(run.folder / TRAIN / "result.json"), run.recipe.data, run.recipe.train
    source = "written by the target itself" if data.prompts == "self" else data.prompts
    return {
        "recipe": run.recipe.name,
        "prompts": source,
        "answers": "the target's own" if data.regenerate or data.prompts == "self" else "as given",
        "training conversations": str(len(StateStore(run.folder / STATES / "train"))),
        "steps": f"{result['steps']} of at most {training.batch_tokens * training.accumulate} tokens; these are the "
        f"heads of step {result['best']['step']}",
        "loss": training.loss,
        "supervised tokens that the heads can draft": f"{result['coverage']:.1%}",
    }


def _eval_settings(run: Run) -> dict[str, Any]:
    return {**_flat("eval", run.recipe.eval), "the questions' file": _content(run.recipe.eval.questions)}


def _eval(run: Run) -> Outcome:
    from headstart.api import load
    from headstart.data.questions import read_questions
    from headstart.eval import EvalOptions
    from headstart.hub import write_card

    section, asked = run.recipe.eval, run.recipe.eval.questions
    questions = read_questions(run.folder / QUESTIONS if asked == "heldout" else Path(asked).expanduser())
    options = EvalOptions(
        limit=section.limit,
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        compare=section.compare,
    )
    # Read back what was exported: the report is about what people will load.
    decoder = load(run.folder / HEADS, run.target)
    results = report(decoder, questions, options, run.folder / REPORT, run.console)
    name = "held-out prompts" if asked == "heldout" else Path(asked).stem
    facts = {"training": _training_facts(run), "measurements": [{"name": name, "results": results}]}
    write_card(run.folder / HEADS, facts)
    speedup = results["summary"]["speedup_vs_plain"]
    measured = f"{speedup['mean']:.2f}x over plain decoding, measured; " if speedup else ""
    return Outcome(f"{measured}τ {results['summary']['tokens_per_round']:.2f} on {len(results['per_prompt'])} prompts")


# -- the list --------------------------------------------------------------------------------------------------------

STAGES = (
    Stage("target", "loading and checking the target", 1, (TARGET,), (), _target_settings, _target),
    Stage(
        "conversations",
        "the target writes and answers prompts",
        2,
        (CONVERSATIONS, QUESTIONS),
        ("target",),
        _conversation_settings,
        _conversations,
    ),
    Stage("states", "computing hidden states", 1, (STATES,), ("target", "conversations"), _state_settings, _states),
    Stage("train", "training the heads", 1, (TRAIN,), ("target", "states"), _train_settings, _train, adopts=True),
    Stage("tune", "measuring costs, choosing the tree", 3, (TUNE,), ("conversations", "train"), _tune_settings, _tune),
    Stage("export", "writing the folder to keep and share", 1, (HEADS,), ("tune",), lambda _: {}, _export),
    Stage("eval", "measuring against the baselines", 1, (REPORT,), ("conversations", "export"), _eval_settings, _eval),
)
"""In order."""


def stages_until(name: str) -> tuple[Stage, ...]:
    """The stages up to and including `name`."""
    names = [stage.name for stage in STAGES]
    return STAGES[: names.index(name) + 1]


# -- small things ----------------------------------------------------------------------------------------------------


def _flat(prefix: str, section: Section, leave_out: set[str] | None = None) -> dict[str, Any]:
    values = section.model_dump(mode="json", exclude=leave_out)
    return {f"{prefix}.{key}": value for key, value in values.items()}


def _content(source: str) -> str | None:
    """Hash of a file's content; None when `source` is not a file."""
    path = Path(source).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


@contextmanager
def progress(console: Console, title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, moved by calling what it gives with (done, in all)."""
    columns = (
        TextColumn("    {task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(title, total=None, visible=False)
        yield lambda done, total: bars.update(bar, completed=done, total=total, visible=True)
