"""Stages of a run: skipped when done, continued when interrupted, extended when the recipe grows.

A stage completes a content-addressed artifact (see `headstart.support.artifacts`). It is done when its record
(`stages/<name>.json` in the run's folder) is complete and current and its outputs exist. The record holds the stage's
version, its settings (`headstart.heads.settings.Role`) and the identities of earlier stages: a changed setting that
leads to the same artifact leaves later stages done.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from rich.console import Console
from rich.markup import escape

from headstart.errors import UserError, out_of_memory
from headstart.heads.settings import Role, Section
from headstart.recipes.values import recipe_text
from headstart.support.artifacts import references, referred
from headstart.support.files import file_hash, read_json, write_json, write_text
from headstart.support.lock import locked
from headstart.support.provenance import note_provenance
from headstart.support.terminal import format_seconds

if TYPE_CHECKING:
    from headstart.model.frozen import FrozenModel
    from headstart.model.model import Target
    from headstart.model.teacher import TeacherModel
    from headstart.recipes.recipe import Recipe


NAMES = ("target", "conversations", "states", "train", "tune", "export", "eval")
"""Stages in order."""

# Paths in the folder of a run.
TARGET = "target"
CONVERSATIONS = "data/conversations"
QUESTIONS = "data/heldout.jsonl"
STATES = "data/states"
TRAIN = "train"
TUNE = "tune"
HEADS = "heads"
REPORT = "report"


class NoTarget(UserError):
    """The target of a run cannot be loaded here."""


@dataclass
class Run:
    """One recipe in one folder. Stages in `again` are redone even if done; `device` overrides the recipe's on a rank
    of a distributed training. With several `processes`, the stage `train` launches ranks."""

    recipe: Recipe
    folder: Path
    console: Console
    again: Collection[str] = ()
    earlier: Record | None = None
    device: str | None = None
    processes: int = 1

    @cached_property
    def target(self) -> Target:
        """The frozen model, loaded on first access; a UserError if it is not the model that the run began with."""
        return self._checked(self.load())

    @cached_property
    def described(self) -> Target:
        """The target's tokenizer, sizes and identity; read from its files, without weights, if servers run it."""
        from headstart.data.prompts.chat import with_template_kwargs
        from headstart.model.outline import unloaded

        section = self.recipe.target
        if "target" in vars(self) or not self._is_served or section.adapter or section.quantization != "none":
            return self.target
        device = self.device or section.device
        try:
            known = unloaded(section.spec, section.dtype, device, section.revision, section.trust_remote_code)
        except UserError:  # loading raises a better message
            known = None
        if known is None:
            return self.target
        templated = known.with_tokenizer(with_template_kwargs(known.tokenizer, self.recipe.data.chat_template_kwargs))
        return self._checked(cast("Target", templated))  # nothing runs through it

    @property
    def _is_served(self) -> bool:
        return bool(self.recipe.data.server or self.recipe.data.states_source)

    def _checked(self, target: Target) -> Target:
        record = self.finished_record("target")
        if record is not None and record.identity != target.whole_identity:
            raise UserError(
                f"{self.recipe.target.spec} is not the model (or not in the dtype) that the run in {self.folder} began "
                "with.",
                "Load the earlier model, or choose another --run-dir.",
            )
        return target

    def load(self, sharded: bool = False) -> Target:
        """Load the recipe's target; `sharded` splits it over the ranks. Raises `NoTarget`."""
        from headstart.data.prompts.chat import with_template_kwargs
        from headstart.model.loading import load_sharded_target, load_target

        section = self.recipe.target
        device, trusted = self.device or section.device, section.trust_remote_code
        with self.console.status(f"loading {escape(section.spec)}"):
            try:
                source = section.spec, section.dtype, device, section.revision
                if sharded:
                    target = load_sharded_target(*source, trust_remote_code=trusted)
                else:
                    options = section.exact, section.adapter, section.quantization
                    target = load_target(*source, *options, trust_remote_code=trusted)
            except UserError as error:
                raise NoTarget(error.problem, error.remedy) from error
        return target.with_tokenizer(with_template_kwargs(target.tokenizer, self.recipe.data.chat_template_kwargs))

    def frozen(self) -> FrozenModel:
        """Return the target if it is loaded. Otherwise return the stored teacher, or build one from the target's files
        if servers run the target. Load the target if neither is possible."""
        from headstart.heads.base import make_config
        from headstart.model.loading import pick_device
        from headstart.model.outline import Outline
        from headstart.model.teacher import teach

        if "target" in vars(self):
            return self.target
        kept, heads = self.teacher(), self.recipe.heads
        if kept is not None and (not self._is_served or kept.starts(make_config(heads, kept).start_layers)):
            return kept
        described: FrozenModel = self.described
        if not isinstance(described, Outline):
            return self.target
        device = pick_device(self.device or self.recipe.target.device)
        return teach(described, make_config(heads, described).start_layers, device) or self.target

    def teacher(self) -> TeacherModel | None:
        """Load the teacher kept with the states; None if it is missing or incomplete."""
        from headstart.model.loading import pick_device
        from headstart.model.teacher import load_teacher, teacher_folder

        record, states = self.finished_record("target"), referred(self.folder, "states")
        if record is None or states is None:
            return None
        fingerprint, _, dtype = record.identity.split(" ")
        folder = teacher_folder(states, fingerprint, dtype)
        if not folder.is_dir() or self.recipe.target.dtype not in ("auto", dtype):
            return None
        try:
            teacher = load_teacher(folder, pick_device(self.device or self.recipe.target.device))
        except UserError:  # the states stage rewrites it
            return None
        return teacher if teacher.whole_identity == record.identity else None

    def release(self) -> None:
        """Free the memory of the loaded target."""
        if vars(self).pop("target", None) is not None:
            vars(self).pop("described", None)
            gc.collect()
            import torch

            torch.cuda.empty_cache()

    def record_file(self, stage: str) -> Path:
        return self.folder / "stages" / f"{stage}.json"

    def record(self, stage: str) -> Record | None:
        """Read the record of a stage; None if it is missing or unreadable."""
        try:
            return Record(**read_json(self.record_file(stage)))
        except (UserError, TypeError):
            return None

    def finished_record(self, stage: str) -> Record | None:
        """Read the record of a finished stage; None if it is not finished."""
        record = self.record(stage)
        return record if record is not None and record.is_complete else None


@dataclass
class Record:
    """The state of a stage. It is current if `version`, `settings` and `before` equal the stage's.

    Attributes:
        settings: dependencies of the stage, by dotted key.
        before: the identities of its inputs.
        is_complete: whether it is finished.
        identity: string that later stages depend on; new for each build unless the stage returns one.
        seconds: time spent, interrupted attempts included.
        artifact: the run's reference when the stage finished; empty for stages without artifacts.
    """

    version: int
    settings: dict[str, Any]
    before: dict[str, str]
    is_complete: bool = False
    identity: str = ""
    seconds: float = 0.0
    summary: str = ""
    artifact: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a stage: a phrase to display, and an identity if the stage has its own."""

    summary: str
    identity: str = ""


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        version: raise it when the same settings produce another result.
        outputs: paths in the run's folder.
        settings: dependencies by dotted key, in addition to the stages in `after`; values must survive JSON.
        work: completes the outputs; called again after an interruption, and when a setting has changed.
        broken: describes damage to a finished stage; None if intact.
        takes_memory: settings to change when memory runs out.
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
        """Run `work`; running out of memory becomes a UserError that names the settings to change."""
        try:
            return self.work(run)
        except Exception as error:
            if not out_of_memory(error):
                raise
            what = (str(error).splitlines() or [""])[0]
            raise UserError(f"Memory ran out while {self.title}: {what}", f"Change {self.takes_memory}.") from error


def execute(run: Run, stages: Sequence[Stage], again: Collection[str] = ()) -> bool:
    """Bring every stage up to date, in order; returns False if all were done. Stages in `again` are redone.

    A folder in use by another run is a UserError.
    """
    worked = False
    run.again = again
    with locked(run.folder):
        write_text(run.folder / "recipe.yaml", recipe_text(run.recipe))
        for number, stage in enumerate(stages, start=1):
            label = f"[bold]{number}/{len(stages)} {stage.name}[/bold]"
            current, record = _current_record(run, stage), run.record(stage.name)
            reason = _stale_reason(run, stage, current, record) if stage.name not in again else "requested"
            if reason is None and record is not None and record.is_complete:
                done = f"done, {format_seconds(record.seconds)}  {escape(record.summary)}"
                run.console.print(f"{label}  [dim]{done}[/dim]", highlight=False, soft_wrap=True)
                continue
            if not worked:
                note_provenance(run.folder)
            worked, run.earlier = True, record
            began = " (continuing)" if reason is None else f" ({escape(reason)})" if reason else ""
            run.console.print(f"{label}  {stage.title}{began}", highlight=False, soft_wrap=True)
            _work(run, stage, record if reason is None and record is not None else current)
    return worked


def left_to_do(run: Run, stages: Sequence[Stage], unchanged: Collection[str] = ()) -> dict[str, str]:
    """Return the stages left to `execute`, with reasons ("" if not begun), without building anything.

    Later stages are included, since their inputs may change, unless the earlier stage is in `unchanged`.
    """
    left: dict[str, str] = {}
    for stage in stages:
        record = run.record(stage.name)
        earlier = [name for name in stage.after if name in left and name not in unchanged]
        if record is None:
            left[stage.name] = ""
        elif earlier:
            left[stage.name] = f"again, after {earlier[0]}"
        elif (reason := _stale_reason(run, stage, _current_record(run, stage), record)) is not None:
            left[stage.name] = reason
        elif not record.is_complete:
            left[stage.name] = f"begun, {format_seconds(record.seconds)} so far"
    return left


def _work(run: Run, stage: Stage, record: Record) -> None:
    record.is_complete = False
    write_json(run.record_file(stage.name), asdict(record))
    start = perf_counter()
    try:
        outcome = stage.do(run)
        record.summary = outcome.summary
        record.artifact = references(run.folder).get(stage.name, "")
        record.identity = outcome.identity or uuid4().hex
        record.is_complete = True
    finally:
        record.seconds += perf_counter() - start
        write_json(run.record_file(stage.name), asdict(record))
    took = f"[dim]{format_seconds(record.seconds)}[/dim]"
    run.console.print(f"    {escape(outcome.summary)}  {took}", highlight=False, soft_wrap=True)


def _current_record(run: Run, stage: Stage) -> Record:
    """Build an incomplete record with the stage's version, settings and inputs of now."""
    earlier = {name: before(run, name) for name in stage.after}
    settings = json.loads(json.dumps(stage.settings(run)))
    record, sections = run.record(stage.name), type(run.recipe).model_fields
    if record is not None:
        files = {key for key in {*settings, *record.settings} if key.partition(".")[0] not in sections}
        if all(record.settings.get(key) == value for key, value in settings.items() if key not in files):
            # Files (of the target, of prompts) that are not on this machine count as unchanged.
            for key in files & record.settings.keys():
                found = settings.get(key)
                if found is None or (isinstance(found, list) and not any(found)):
                    settings[key] = record.settings[key]
    return Record(stage.version, settings, earlier)


def _stale_reason(run: Run, stage: Stage, current: Record, record: Record | None) -> str | None:
    """Explain why the stage must run, "" if it has not begun; None if its record, finished or not, is current."""
    if record is None:
        return ""
    if record.version != current.version:
        return "this version of headstart does it differently"
    keys = {*record.settings, *current.settings}
    for key in sorted(keys, key=lambda key: (key != "heads.family", key)):  # other settings follow from the family
        old, new = record.settings.get(key), current.settings.get(key)
        if old != new:
            return f"{key} changed from {_short(old)} to {_short(new)}"
    for name, identity in current.before.items():
        if record.before.get(name) != identity:
            return f"{name} changed"
    return _damage(run, stage, record) if record.is_complete else None


def _damage(run: Run, stage: Stage, record: Record) -> str | None:
    """Describe missing or damaged outputs of a finished stage; None if it is intact."""
    missing = [output for output in stage.outputs if not (run.folder / output).exists()]
    if (path := referred(run.folder, stage.name)) is not None and not path.is_dir():
        missing.append(str(path))
    if missing:
        return f"{missing[0]} is gone"
    if references(run.folder).get(stage.name, "") != record.artifact:
        return "its reference in references.json has changed"
    return stage.broken(run)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else "…"


# -- dependencies of stages, as recorded -------------------------------------------------------------------------------


def flat(prefix: str, section: Section) -> dict[str, Any]:
    """Return the settings of a section that its stage must run again for, by dotted key."""
    return {f"{prefix}.{key}": value for key, value in section.of_role(Role.CONTENT, Role.AMOUNT).items()}


def content(source: str | Path) -> str | None:
    """Return the hash of a file's content; None if `source` is not a file."""
    path = Path(source).expanduser()
    return file_hash(path)[:16] if path.is_file() else None


def where(run: Run) -> dict[str, Any]:
    """Return the settings that timings depend on: device, dtype, quantization."""
    target = run.recipe.target
    device = run.device or target.device
    return {"target.device": device, "target.dtype": target.dtype, "target.quantization": target.quantization}


def conditions(run: Run) -> dict[str, Any]:
    """Return the actual conditions of timings: machine, device, dtype, threads."""
    from headstart.decode.costs import Conditions

    return Conditions.of(run.target).to_json()


def before(run: Run, stage: str) -> str:
    record = run.finished_record(stage)
    assert record is not None, f"{stage} is finished"
    return record.identity
