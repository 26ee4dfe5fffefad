"""The stages of `headstart run`: target, conversations, states, train, tune, export, eval.

Each finds its artifact by what it depends on, and completes it. In the run's folder stand the conversations and the
store that it uses of them, links to its training and tuning, and its heads and report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.artifacts import Artifact, artifact, give, held, read_note, referred
from headstart.errors import UserError
from headstart.files import format_bytes, need_disk, read_json, write_atomic, write_json, write_jsonl
from headstart.pipeline.actions import describe_tuning, refuse_other_files, refuse_others, report
from headstart.pipeline.layout import CONVERSATIONS, HEADS, QUESTIONS, REPORT, STATES, TARGET, TRAIN, TUNE
from headstart.pipeline.run import Outcome, Run, Stage, target_identity
from headstart.recipe import Recipe, Section
from headstart.terminal import progress_bar

if TYPE_CHECKING:
    from headstart.data.conversations import Conversation
    from headstart.data.store import StateStore
    from headstart.heads import DraftHead

_TOKENIZER = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
"""Files of the target's tokenizer, as the target's stage keeps them."""
_REPORT_FILES = {"report.html", "report.md", "results.json"}
_SPLITS = ("train", "calibration")
_VERSIONS = {"states": 1, "tune": 4, "export": 1, "eval": 1}
"""Raised when the same settings come to mean something else; those of conversations and training are in their rooms."""


# -- before anything ---------------------------------------------------------------------------------------------------


def check_inputs(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Refuse now what would otherwise stop one of these stages after minutes of work.

    Raises:
        UserError: settings of heads or training that cannot work, a file that is missing or malformed, a report without
            prompts to measure on, or with a drafter that is none.
    """
    from headstart.data.questions import read_questions
    from headstart.drafters.catalog import check_drafter
    from headstart.eval.compare import TREES, wanted
    from headstart.eval.methods import ASSISTANT
    from headstart.train.setup import check_training

    names = {stage.name for stage in stages}
    if "train" in names:
        check_training(recipe)

    prompts = Path(recipe.data.prompts).expanduser()
    if prompts.suffix in (".json", ".jsonl") and not prompts.is_file():
        raise UserError(f"No file at {recipe.data.prompts}.", "Check data.prompts; a relative path starts here.")
    if "eval" not in names:
        return
    for name in wanted(recipe.eval.compare, "heads"):
        if name not in TREES and not name.startswith(ASSISTANT):
            check_drafter(name)
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


def states_artifact(run: Run) -> Artifact:
    """The artifact of all hidden states of the run's target."""
    target = run.target
    identity = {
        "version": _VERSIONS["states"],
        "target": target.identity().fingerprint,
        "settings": target.settings,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    return artifact(run.folder, "states", Path(target.name).name, identity)


def kept_state_bytes(run: Run) -> int:
    """Bytes of hidden states of the run's target that are on the disk already, whoever uses them."""
    return sum(file.stat().st_size for file in states_artifact(run).folder.glob("shard-*.safetensors"))


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
        need_disk(run.folder, state_bytes(run, count) - kept_state_bytes(run), "Keeping hidden states")
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
    key = {"heads": run.recipe.heads.to_recipe(), "target": record.identity if record and record.whole else ""}
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
    return {
        **_flat("data", run.recipe.data),
        "the prompts' content": _prompts_content(run.recipe.data.prompts),
        "states of a token": len(taps(run)),
        **{name: _content(str(run.folder / TARGET / "tokenizer" / name)) for name in _TOKENIZER},
    }


def _prompts_content(source: str) -> str | None:
    """Hash of a file or folder of prompts on this machine; None for everything else."""
    from headstart.data.sources import find_origin

    return find_origin(source).content if Path(source.partition(":")[0]).expanduser().exists() else None


def _conversations(run: Run) -> Outcome:
    from headstart.data.generate import build_conversations, identity
    from headstart.data.store import estimate_bytes

    data, target = run.recipe.data, run.target
    slug = "self" if data.prompts == "self" else Path(data.prompts).stem
    settings = data.model_dump(mode="json")
    if data.revision is None and (known := referred(run.folder, "conversations")) is not None:
        begun = read_note(known)
        if begun.get("revision") and begun.get("prompts") == f"{data.prompts} at {begun['revision']}":
            settings["revision"] = begun["revision"]  # what the run began with, whatever is newer
    made = artifact(run.folder, "conversations", slug, identity(target, settings))
    # More text than there is room for states of would be written for nothing.
    most = 1e9 * data.cache_gigabytes / estimate_bytes(1, len(taps(run)), target.hidden_size, target.dtype)
    folder = run.folder / CONVERSATIONS
    with held(made, run.console) as place:
        run.refer("conversations", made)
        pinned = data.model_copy(update={"revision": made.identity["revision"]})
        splits = build_conversations(target, pinned, folder, run.console, place / "parts", most)
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
    held_out = _content(str(folder / "heldout.jsonl"))
    used = [_content(str(folder / f"{split}.jsonl")) for split in _SPLITS]
    return Outcome(
        f"{len(splits.train)} conversations with {answers} answer tokens; {len(splits.calibration)} for calibration, "
        f"{len(splits.heldout)} held out",
        identity=" ".join(map(str, [made.name, *used, held_out])),
    )


def conversations(run: Run, split: str) -> list[Conversation]:
    """What the conversation stage wrote."""
    from headstart.data.conversations import read_conversations

    return read_conversations(run.folder / CONVERSATIONS / f"{split}.jsonl")


def _state_settings(run: Run) -> dict[str, Any]:
    return {"data.cache_gigabytes": run.recipe.data.cache_gigabytes, "taps of the heads": taps(run)}


def _states(run: Run) -> Outcome:
    stores = both_stores(run)
    notice = f"; {stores['train'].notice}" if stores["train"].notice else ""
    size = format_bytes(sum(part.bytes for part in stores.values()))
    return Outcome(
        f"hidden states of {sum(part.tokens for part in stores.values())} tokens, {size}{notice}",
        identity=" ".join([*(part.fingerprint for part in stores.values()), *map(str, taps(run))]),
    )


def _broken_states(run: Run) -> str | None:
    from headstart.data.store import StateStore

    try:
        for split in _SPLITS:
            StateStore(run.folder / STATES / split)
    except (UserError, KeyError, TypeError) as error:
        return error.problem if isinstance(error, UserError) else "a manifest is damaged"
    return None


def both_stores(run: Run) -> dict[str, StateStore]:
    """The hidden states of both splits: what is there is kept, what is missing or cut short is computed.

    Those for calibration come first: the byte budget, which holds for both together, leaves out training text.
    """
    from headstart.data.store import build_store, estimate_bytes

    target, stores, shared = run.target, dict[str, "StateStore"](), states_artifact(run)
    budget = int(run.recipe.data.cache_gigabytes * 1e9)
    with held(shared, run.console) as shards:
        run.refer("states", shared)
        for split in reversed(_SPLITS):
            with progress_bar(run.console, f"hidden states ({split})", unit="tokens") as bar:
                stores[split] = build_store(
                    run.folder / STATES / split,
                    conversations(run, split),
                    target,
                    taps(run),
                    budget_bytes=budget,
                    shards=shards,
                    advance=bar.update,
                )
            budget -= estimate_bytes(stores[split].tokens, len(taps(run)), target.hidden_size, target.dtype)
    return stores


# -- train and tune --------------------------------------------------------------------------------------------------


def _train_settings(run: Run) -> dict[str, Any]:
    from headstart.recipe import FREE_TO_CHANGE
    from headstart.train.place import AMOUNT, weights_hash

    heads = {f"heads.{key}": value for key, value in run.recipe.heads.to_recipe().items()}
    settings = _flat("train", run.recipe.train, leave_out=FREE_TO_CHANGE - set(AMOUNT))
    return {**settings, "train.start_from": weights_hash(run.recipe.train.start_from), **heads}


def _train(run: Run) -> Outcome:
    from headstart.heads import make_config
    from headstart.train.loop import train
    from headstart.train.place import RESULT, finished, go_on_from_shorter, training

    stores = both_stores(run)
    lessons, judged = stores["train"], stores["calibration"]
    made = training(run.folder, run.recipe, make_config(run.recipe.heads, run.target), lessons, judged)
    with held(made, run.console) as folder:
        if not finished(folder):  # before the shorter one is referred to no more
            go_on_from_shorter(made, 1, lambda text: run.console.print(text, highlight=False, soft_wrap=True))
        run.refer("train", made, TRAIN)
        if not finished(folder):
            train(run.recipe, run.target, lessons, judged, folder, run.console)
    result = read_json(folder / RESULT)
    return Outcome(f"{result['steps']} steps; predicted τ of a chain {result['best']['tau']:.2f}", identity=made.name)


def _tune_settings(run: Run) -> dict[str, Any]:
    return {**_flat("tune", run.recipe.tune), **_where(run)}


def _where(run: Run) -> dict[str, Any]:
    """What is timed belongs to a device and a dtype, as far as the recipe names them."""
    return {"target.device": run.recipe.target.device, "target.dtype": run.recipe.target.dtype}


def _conditions(run: Run) -> dict[str, Any]:
    """The same as it is found here: machine, device, dtype, threads."""
    from headstart.decode.costs import Conditions

    return Conditions.of(run.target).to_json()


def _tune(run: Run) -> Outcome:
    from headstart.tuning.tune import Tuning, tune

    section, file = run.recipe.tune, run.folder / TUNE / "tuning.json"
    identity = {
        "version": _VERSIONS["tune"],
        "heads": _before(run, "train"),
        "texts": _content(str(run.folder / CONVERSATIONS / "calibration.jsonl")),
        **_tune_settings(run),
        "conditions": _conditions(run),
    }
    made = artifact(run.folder, "tuning", run.recipe.heads.family, identity)
    with held(made, run.console):
        run.refer("tune", made, TUNE)
        if "tune" in run.again or not file.is_file():
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
            write_json(file, tuning.to_json())
    return Outcome(describe_tuning(Tuning.from_json(read_json(file))), identity=f"{made.name} {_content(str(file))}")


def trained_heads(run: Run) -> DraftHead:
    """The best heads of training, in the target's dtype."""
    from headstart.heads.io import load_heads

    return load_heads(run.folder / TRAIN / "best", run.target).to(run.target.dtype)


# -- export and report -----------------------------------------------------------------------------------------------


def _export(run: Run) -> Outcome:
    from headstart.hub import export_heads

    made = _exported(run)
    with held(made, run.console) as folder:
        run.refer("export", made)
        if not (folder / HEADS).is_dir():
            tuning = read_json(run.folder / TUNE / "tuning.json")
            export_heads(folder / HEADS, trained_heads(run), run.target, tuning, {"training": _training_facts(run)})
        _give(folder / HEADS, run.folder / HEADS)
    return Outcome(f"heads, tree and model card in {run.folder / HEADS}", identity=made.name)


def _exported(run: Run) -> Artifact:
    identity = {
        "version": _VERSIONS["export"],
        "heads": _before(run, "train"),
        "tuning": _before(run, "tune"),
        "target": run.recipe.target.spec,  # where the heads say that their target is
    }
    return artifact(run.folder, "exports", run.recipe.heads.family, identity)


def _give(source: Path, place: Path) -> None:
    """Let a run have the heads of an artifact; refuses to replace a folder that somebody put other files into."""
    if place.exists():
        refuse_other_files(place)
    give(source, place)


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
    settings = {**_flat("eval", run.recipe.eval), **_where(run)}
    return {**settings, "the questions' file": _content(run.recipe.eval.questions)}


def _eval(run: Run) -> Outcome:
    from headstart.api import load
    from headstart.data.questions import read_questions
    from headstart.eval import EvalOptions
    from headstart.hub import write_card

    if (run.folder / REPORT).exists():
        refuse_others(run.folder / REPORT, _REPORT_FILES)
    section, asked = run.recipe.eval, run.recipe.eval.questions
    file = run.folder / QUESTIONS if asked == "heldout" else Path(asked).expanduser()
    exported = _exported(run)
    identity = {
        "version": _VERSIONS["eval"],
        "heads": exported.name,
        **_eval_settings(run),
        "questions": _content(str(file)),
        "conditions": _conditions(run),
    }
    made = artifact(run.folder, "reports", run.recipe.heads.family, identity)
    with held(made, run.console) as folder, held(exported, run.console):
        run.refer("eval", made)
        if not (folder / REPORT / "results.json").is_file():
            options = EvalOptions(
                limit=section.limit,
                max_new_tokens=section.max_new_tokens,
                temperature=section.temperature,
                compare=section.compare,
            )
            # Read back what was exported: the report is about what people will load.
            decoder = load(exported.folder / HEADS, run.target)
            questions = read_questions(file)

            def measure(partial: Path) -> None:
                report(decoder, questions, options, partial, run.console)

            write_atomic(folder / REPORT, measure)
        results = read_json(folder / REPORT / "results.json")
        name = "held-out prompts" if asked == "heldout" else Path(asked).stem
        facts = {"training": _training_facts(run), "measurements": [{"name": name, "results": results}]}
        write_card(exported.folder / HEADS, facts)
        _give(exported.folder / HEADS, run.folder / HEADS)
        give(folder / REPORT, run.folder / REPORT)
    speedup = results["summary"]["speedup_vs_plain"]
    measured = f"{speedup['mean']:.2f}x over plain decoding, measured; " if speedup else ""
    return Outcome(
        f"{measured}τ {results['summary']['tokens_per_round']:.2f} on {len(results['per_prompt'])} prompts",
        identity=made.name,
    )


def _before(run: Run, stage: str) -> str:
    """Identity of a stage that is finished."""
    record = run.record(stage)
    assert record is not None and record.whole, f"{stage} is finished"
    return record.identity


# -- the list --------------------------------------------------------------------------------------------------------

STAGES = (
    Stage("target", "loading and checking the target", 1, (TARGET,), (), _target_settings, _target),
    Stage(
        "conversations",
        "the target writes and answers prompts",
        3,
        (CONVERSATIONS, QUESTIONS),
        ("target",),
        _conversation_settings,
        _conversations,
    ),
    Stage(
        "states",
        "computing hidden states",
        _VERSIONS["states"],
        (STATES,),
        ("target", "conversations"),
        _state_settings,
        _states,
        _broken_states,
    ),
    Stage("train", "training the heads", 1, (TRAIN,), ("target", "states"), _train_settings, _train),
    Stage(
        "tune",
        "measuring costs, choosing the tree",
        _VERSIONS["tune"],
        (TUNE,),
        ("conversations", "train"),
        _tune_settings,
        _tune,
    ),
    Stage(
        "export",
        "writing the folder to keep and share",
        _VERSIONS["export"],
        (HEADS,),
        ("train", "tune"),
        lambda _: {},
        _export,
    ),
    Stage(
        "eval",
        "measuring against the baselines",
        _VERSIONS["eval"],
        (REPORT,),
        ("conversations", "export"),
        _eval_settings,
        _eval,
    ),
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
