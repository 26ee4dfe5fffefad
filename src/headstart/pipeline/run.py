"""The stages of a run: skipped when done, continued when interrupted, extended when more is asked for.

What a stage makes is an artifact (see `headstart.support.artifacts`), found again by what it is; its work completes
what is there. A stage is done when its record (`stages/<name>.json` in the run's folder) says so for the same
fingerprint and its outputs are there. The fingerprint covers the stage's version, the recipe settings it depends on,
and the identity of every stage before it: a changed setting that comes to the same artifact leaves the stages after it
done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.markup import escape

from headstart.errors import UserError, out_of_memory
from headstart.recipes.recipe import Recipe, recipe_text
from headstart.recipes.sections import Section
from headstart.support.artifacts import references, referred
from headstart.support.files import file_hash, read_json, write_json, write_text
from headstart.support.lock import locked
from headstart.support.provenance import note_provenance
from headstart.support.terminal import format_seconds

if TYPE_CHECKING:
    from headstart.target.frozen import FrozenModel
    from headstart.target.model import Target
    from headstart.target.teacher import TeacherModel


NAMES = ("target", "conversations", "states", "train", "tune", "export", "eval")
"""Of the stages, in order."""

# Where things lie in the folder of a run.
TARGET = "target"
CONVERSATIONS = "data/conversations"
QUESTIONS = "data/heldout.jsonl"
STATES = "data/states"
TRAIN = "train"
ADAPTER = "adapter"
"""Beside heads that were trained with it, as peft saves adapters."""
TUNE = "tune"
HEADS = "heads"
REPORT = "report"


class NoTarget(UserError):
    """The target of a run cannot be loaded here."""


@dataclass
class Run:
    """One recipe in one folder. Stages in `again` are done anew even where their result is there; `device` is that of
    this process where several train, None for that of the recipe."""

    recipe: Recipe
    folder: Path
    console: Console
    again: Collection[str] = ()
    earlier: Record | None = None
    device: str | None = None

    @cached_property
    def target(self) -> Target:
        """The frozen model, loaded when first asked for; a UserError where it is no longer the run's."""
        return self._checked(self.load(self.recipe.target.adapter))

    @cached_property
    def described(self) -> Target:
        """The target as far as texts need it. While servers write, its weights are not loaded: tokenizer, sizes and
        identity are those of its files."""
        from headstart.data.prompts.chat import with_template_kwargs
        from headstart.target.outline import unloaded

        section = self.recipe.target
        if "target" in vars(self) or not self.recipe.data.server or section.adapter or section.quantization != "none":
            return self.target
        device = self.device or section.device
        try:
            known = unloaded(section.spec, section.dtype, device, section.revision, section.trust_remote_code)
        except UserError:  # loading says what is wrong
            known = None
        if known is None:
            return self.target
        templated = known.with_tokenizer(with_template_kwargs(known.tokenizer, self.recipe.data.chat_template_kwargs))
        return self._checked(cast("Target", templated))  # nothing runs through it

    def _checked(self, target: Target) -> Target:
        record = self.whole_record("target")
        if record is not None and record.identity != target.whole_identity:
            raise UserError(
                f"{self.recipe.target.spec} is not the model (or not in the dtype) that the run in {self.folder} began "
                "with.",
                "Load the one that the run began with, or choose another --run-dir.",
            )
        return target

    @cached_property
    def decoded(self) -> Target:
        """The model that the heads draft for: the target, or what training has made of it together with the heads."""
        if not self.recipe.train.joint.rank:
            return self.target
        vars(self).pop("target", None)  # there may not be room for both
        return self.load(str(self.folder / TRAIN / "best" / ADAPTER))

    def load(self, adapter: str | None, sharded: bool = False) -> Target:
        """The recipe's target with this adapter, or `NoTarget`; `sharded` keeps a part of it on each process."""
        from headstart.data.prompts.chat import with_template_kwargs
        from headstart.target.loading import load_sharded_target, load_target

        section = self.recipe.target
        device, trusted = self.device or section.device, section.trust_remote_code
        with self.console.status(f"loading {escape(section.spec)}"):
            try:
                target = (
                    load_sharded_target(
                        section.spec, section.dtype, device, section.revision, trust_remote_code=trusted
                    )
                    if sharded
                    else load_target(
                        section.spec,
                        dtype=section.dtype,
                        device=device,
                        revision=section.revision,
                        exact=section.exact,
                        adapter=adapter,
                        quantization=section.quantization,
                        trust_remote_code=trusted,
                    )
                )
            except UserError as error:
                raise NoTarget(error.problem, error.remedy) from error
        return target.with_tokenizer(with_template_kwargs(target.tokenizer, self.recipe.data.chat_template_kwargs))

    def frozen(self) -> FrozenModel:
        """What training reads of the target: its teacher, where one lies beside the states, unless it is loaded."""
        return self.target if "target" in vars(self) else self.teacher() or self.target

    def teacher(self) -> TeacherModel | None:
        """What lies of the target beside the states; None where there is nothing, or nothing whole."""
        from headstart.target.loading import pick_device
        from headstart.target.teacher import load_teacher, teacher_folder

        record, states = self.whole_record("target"), referred(self.folder, "states")
        if record is None or states is None:
            return None
        fingerprint, _, dtype = record.identity.split(" ")
        folder = teacher_folder(states, fingerprint, dtype)
        if not folder.is_dir() or self.recipe.target.dtype not in ("auto", dtype):
            return None
        try:
            teacher = load_teacher(folder, pick_device(self.device or self.recipe.target.device))
        except UserError:  # the stage of the states finds it broken, and writes it again
            return None
        return teacher if teacher.whole_identity == record.identity else None

    def record_file(self, stage: str) -> Path:
        return self.folder / "stages" / f"{stage}.json"

    def record(self, stage: str) -> Record | None:
        """What is known of a stage; None when there is nothing, or nothing readable."""
        try:
            return Record(**read_json(self.record_file(stage)))
        except (UserError, TypeError):
            return None

    def whole_record(self, stage: str) -> Record | None:
        """The record of a stage that is finished."""
        record = self.record(stage)
        return record if record is not None and record.whole else None


@dataclass
class Record:
    """What a stage leaves behind.

    Attributes:
        fingerprint: of everything the stage depends on: its version, `settings` by dotted key, and `before`, the
            identity of each stage it reads from.
        whole: whether it is finished.
        identity: what later stages depend on: new each time the stage is built, unless the stage knows better.
        seconds: spent on it, interrupted attempts included where they could be timed.
        artifact: that the run referred to when the stage was finished; empty for stages that make none.
    """

    fingerprint: str
    version: int
    settings: dict[str, Any]
    before: dict[str, str]
    whole: bool = False
    identity: str = ""
    seconds: float = 0.0
    summary: str = ""
    artifact: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a stage's work returns: a short phrase for people, and an identity when the stage has one of its own."""

    summary: str
    identity: str = ""


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        version: raise it when the same settings come to mean another result.
        outputs: what it leaves in the run's folder.
        settings: what it depends on, by dotted key, beside the stages `after` which it comes; values must survive JSON.
        work: completes what is there; called again after an interruption, and when a setting has changed.
        broken: says what of a finished stage can no longer be used; None when all of it can.
        takes_memory: settings to lower, or to set, where memory runs out in it.
    """

    name: str
    title: str
    version: int
    outputs: tuple[str, ...]
    after: tuple[str, ...]
    settings: Callable[[Run], dict[str, Any]]
    work: Callable[[Run], Outcome]
    broken: Callable[[Run], str | None] = lambda _: None
    takes_memory: str = "target.device or target.quantization (a smaller or spread target)"

    def do(self, run: Run) -> Outcome:
        """Its work; where memory runs out, a UserError names what takes it."""
        try:
            return self.work(run)
        except Exception as error:
            if not out_of_memory(error):
                raise
            what = (str(error).splitlines() or [""])[0]
            raise UserError(f"Memory ran out while {self.title}: {what}", f"Change {self.takes_memory}.") from error


def execute(run: Run, stages: Sequence[Stage], again: Collection[str] = ()) -> bool:
    """Bring every stage up to date, in order; returns whether there was anything to do.

    Stages named in `again` are done anew even when they are done. A folder in use by another run is a UserError.
    """
    worked = False
    run.again = again
    with locked(run.folder):
        write_text(run.folder / "recipe.yaml", recipe_text(run.recipe))
        for number, stage in enumerate(stages, start=1):
            label = f"[bold]{number}/{len(stages)} {stage.name}[/bold]"
            wanted, record = _wanted(run, stage), run.record(stage.name)
            reason = _stale(run, stage, wanted, record) if stage.name not in again else "asked for again"
            if reason is None and record is not None and record.whole:
                done = f"done, {format_seconds(record.seconds)}  {escape(record.summary)}"
                run.console.print(f"{label}  [dim]{done}[/dim]", highlight=False, soft_wrap=True)
                continue
            if not worked:
                note_provenance(run.folder)
            worked, run.earlier = True, record
            began = " (continuing)" if reason is None else f" ({escape(reason)})" if reason else ""
            run.console.print(f"{label}  {stage.title}{began}", highlight=False, soft_wrap=True)
            _work(run, stage, record if reason is None and record is not None else wanted)
    return worked


def left_to_do(run: Run, stages: Sequence[Stage], unchanged: Collection[str] = ()) -> dict[str, str]:
    """The stages that `execute` would work on now, each with why: "" for one that has not begun. Builds nothing.

    A stage that reads from one of these is among them: only the work itself can tell that nothing has changed for it.
    Stages that are `unchanged` are known to come to the same as before.
    """
    left: dict[str, str] = {}
    for stage in stages:
        record = run.record(stage.name)
        earlier = [name for name in stage.after if name in left and name not in unchanged]
        if record is None:
            left[stage.name] = ""
        elif earlier:
            left[stage.name] = f"again, after {earlier[0]}"
        elif (reason := _stale(run, stage, _wanted(run, stage), record)) is not None:
            left[stage.name] = reason
        elif not record.whole:
            left[stage.name] = f"begun, {format_seconds(record.seconds)} so far"
    return left


def _work(run: Run, stage: Stage, record: Record) -> None:
    record.whole = False
    write_json(run.record_file(stage.name), asdict(record))
    start = perf_counter()
    try:
        outcome = stage.do(run)
        record.summary = outcome.summary
        record.artifact = references(run.folder).get(stage.name, "")
        record.identity = outcome.identity or _hash([record.fingerprint, datetime.now(UTC).isoformat()])
        record.whole = True
    finally:
        record.seconds += perf_counter() - start
        write_json(run.record_file(stage.name), asdict(record))
    took = f"[dim]{format_seconds(record.seconds)}[/dim]"
    run.console.print(f"    {escape(outcome.summary)}  {took}", highlight=False, soft_wrap=True)


def _wanted(run: Run, stage: Stage) -> Record:
    """The record that the stage should have, not whole yet."""
    earlier = {name: before(run, name) for name in stage.after}
    settings = json.loads(json.dumps(stage.settings(run)))
    record = run.record(stage.name)
    if record is not None and all(record.settings.get(key) == settings[key] for key in settings if _of_recipe(key)):
        settings |= {key: value for key, value in record.settings.items() if _is_elsewhere(key, settings)}
    fingerprint = _hash([stage.name, stage.version, settings, earlier])
    return Record(fingerprint, stage.version, settings, earlier)


def _of_recipe(key: str) -> bool:
    return key.partition(".")[0] in Recipe.model_fields


def _is_elsewhere(key: str, settings: dict[str, Any]) -> bool:
    """Whether a setting tells of files (the target's, prompts) that are not on this machine: they have not changed."""
    found = settings.get(key)
    return not _of_recipe(key) and (found is None or (isinstance(found, list) and not any(found)))


def _stale(run: Run, stage: Stage, wanted: Record, record: Record | None) -> str | None:
    """Why there is work to do, "" when nothing was done yet; None when what is there is as wanted, whole or begun."""
    if record is None:
        return ""
    if record.fingerprint == wanted.fingerprint:
        return _lost(run, stage, record) if record.whole else None
    if record.version != wanted.version:
        return "headstart does this differently now"
    for key in sorted({*record.settings, *wanted.settings}):
        old, new = record.settings.get(key), wanted.settings.get(key)
        if old != new:
            return f"{key} changed from {_short(old)} to {_short(new)}"
    for name, identity in wanted.before.items():
        if record.before.get(name) != identity:
            return f"{name} changed"
    return "something changed"


def _lost(run: Run, stage: Stage, record: Record) -> str | None:
    """What a finished stage has lost since; None when it is as it was left."""
    gone = [output for output in stage.outputs if not (run.folder / output).exists()]
    if (path := referred(run.folder, stage.name)) is not None and not path.is_dir():
        gone.append(str(path))
    if gone:
        return f"{gone[0]} is gone"
    if references(run.folder).get(stage.name, "") != record.artifact:
        return "the run refers to something else since"  # the note of it is lost
    return stage.broken(run)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else "…"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


# -- what stages depend on, in the words of their records --------------------------------------------------------------


def flat(prefix: str, section: Section, leave_out: set[str] | None = None) -> dict[str, Any]:
    """The settings of a section, by dotted key."""
    values = section.model_dump(mode="json", exclude=leave_out)
    return {f"{prefix}.{key}": value for key, value in values.items()}


def content(source: str | Path) -> str | None:
    """Hash of a file's content; None when `source` is not a file."""
    path = Path(source).expanduser()
    return file_hash(path)[:16] if path.is_file() else None


def where(run: Run) -> dict[str, Any]:
    """What is timed belongs to a device and a dtype, as far as the recipe names them."""
    target = run.recipe.target
    bits = {} if "quantization" in target.unset() else {"target.quantization": target.quantization}
    return {"target.device": run.device or target.device, "target.dtype": target.dtype, **bits}


def conditions(run: Run) -> dict[str, Any]:
    """The same as it is found here: machine, device, dtype, threads."""
    from headstart.decode.costs import Conditions

    return Conditions.of(run.decoded).to_json()


def before(run: Run, stage: str) -> str:
    record = run.whole_record(stage)
    assert record is not None, f"{stage} is finished"
    return record.identity
