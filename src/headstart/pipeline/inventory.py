"""Runs in a folder, the artifacts they share, and files that can be deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.errors import UserError
from headstart.pipeline.run import NAMES, REPORT, STATES, TRAIN
from headstart.recipes.values import read_values
from headstart.support.artifacts import FOLDER, NOTE, references, referred
from headstart.support.files import DAMAGED, PARTIAL, format_bytes, no_folder, partial_name, read_object, remove, size
from headstart.support.lock import Busy, locked


@dataclass(frozen=True)
class RunState:
    """One row of `headstart runs`. `bytes` covers its folder and its artifacts, shared ones included. `tau` and
    `speedup` come from the report, `predicted_tau` from training; None if these stages are not up to date."""

    folder: Path
    state: str
    bytes: int
    family: str
    tau: float | None
    predicted_tau: float | None
    speedup: float | None
    changed: datetime


@dataclass(frozen=True)
class Deletable:
    """A folder or file to delete, with a description; `bytes` is an upper bound, since files may have hard links."""

    path: Path
    bytes: int
    what: str


def runs_in(folder: Path) -> list[Path]:
    """List the runs in a folder, sorted by name; a UserError where the folder does not exist."""
    if not folder.is_dir():
        raise no_folder(folder, "Name the folder of your runs with --runs; the default is runs/.")
    return sorted(path for path in folder.iterdir() if (path / "recipe.yaml").is_file())


def run_states(folder: Path) -> list[RunState]:
    """Describe the runs in a folder, newest first; raises as `runs_in`."""
    return sorted(map(_state, runs_in(folder)), key=lambda run: run.changed, reverse=True)


def _state(folder: Path) -> RunState:
    records = _records(folder)
    done = _up_to_date(records)
    begun = [name for name, record in records.items() if record and not record.get("is_complete")]
    summary = (read_object(folder / REPORT / "results.json").get("summary") if "eval" in done else None) or {}
    trained = ((read_object(folder / TRAIN / "result.json").get("best") if "train" in done else None) or {}).get("tau")
    if len(done) == len(NAMES):
        state = "done"
    else:
        state = f"{begun[0]} begun" if begun else f"{done[-1]} done" if done else "not begun"
    try:
        family = str(read_values(str(folder / "recipe.yaml"))["heads"]["family"])
    except (UserError, KeyError, TypeError):
        family = "?"
    stamps = [file.stat().st_mtime for file in (folder / "stages").glob("*.json")]
    return RunState(
        folder,
        state,
        sum(size(path) for path in {folder, *_artifacts_of(folder)} if path.is_dir()),
        family,
        summary.get("tokens_per_round"),
        trained,
        (summary.get("speedup_vs_plain") or {}).get("mean"),
        datetime.fromtimestamp(max(stamps, default=folder.stat().st_mtime), UTC),
    )


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: read_object(folder / "stages" / f"{name}.json") for name in NAMES}


def _up_to_date(records: dict[str, dict[str, Any]]) -> list[str]:
    """Return the finished stages that used the current output of earlier stages."""
    done: list[str] = []
    for name, record in records.items():
        read = record.get("before") or {}
        same = all(stage in done and identity == records[stage].get("identity") for stage, identity in read.items())
        if record.get("is_complete") and same:
            done.append(name)
    return done


def _artifacts_of(run: Path) -> list[Path]:
    return [path for stage in references(run) if (path := referred(run, stage)) is not None]


def show_runs(states: Sequence[RunState], console: Console) -> None:
    table = Table(box=None)
    for name in ("run", "state", "heads"):
        table.add_column(name)
    for name in ("τ", "predicted τ", "speed-up", "size", "age"):
        table.add_column(name, justify="right")
    now = datetime.now(UTC)

    def figure(value: float | None, unit: str = "") -> str:
        return "" if value is None else f"{value:.2f}{unit}"

    for run in states:
        figures = figure(run.tau), figure(run.predicted_tau), figure(run.speedup, "x")
        age = _age((now - run.changed).total_seconds())
        table.add_row(escape(str(run.folder)), run.state, run.family, *figures, format_bytes(run.bytes), age)
    console.print(table)
    note = (
        "τ and speed-up (over plain decoding) come from the report, predicted τ from training, for a chain. Files that "
        "runs share count for each of them."
    )
    console.print(note, style="dim", soft_wrap=True)


def unreferenced(folder: Path, mine: Path | None = None) -> list[Deletable]:
    """List unreferenced artifacts and shards of hidden states, and partial files of killed processes.

    Skips artifacts that another process has locked; `mine` is locked by the caller. All shards are kept while a run
    still adds to them. A UserError where the references of a run cannot be read.
    """
    runs = runs_in(folder)
    for run in runs:
        known = references(run)
        if any(record.get("artifact") and name not in known for name, record in _records(run).items()):
            raise UserError(
                f"The references of {run} cannot be read, so unused artifacts are unknown.",
                "Run it once more (headstart run), or move it away.",
            )
    used = {path.resolve() for run in runs for path in _artifacts_of(run)}
    noted = {note.parent for note in (folder / FOLDER).glob(f"*/*/{NOTE}")}
    unused = []
    for path in sorted(noted | set((folder / FOLDER).glob(f"*/*{PARTIAL}"))):
        if path != mine and not _idle(path):
            continue
        if path.suffix == PARTIAL:
            unused.append(Deletable(path, size(path), "half deleted"))
        elif path.resolve() not in used:
            unused.append(Deletable(path, size(path), _unused(path)))
        elif path.parent.name == "states":
            unused += _unused_shards(path, runs)
        else:
            unused += _half_written(path)
    return unused


def _unused(path: Path) -> str:
    """Describe an unreferenced artifact; for an interrupted training, its step."""
    kind, steps = path.parent.name, sorted(path.glob("checkpoints/step-*/checkpoint.json"))
    if kind != "heads" or not steps or (path / "result.json").is_file():
        return f"{kind} that no run refers to"
    step = int(steps[-1].parent.name.removeprefix("step-"))
    return f"a training interrupted at step {step}, needed by no run; its command would resume it"


def _unused_shards(path: Path, runs: Sequence[Path]) -> Iterator[Deletable]:
    for shard in sorted(path.glob(f"shard-*{DAMAGED}")):
        yield Deletable(shard, shard.stat().st_size, "damaged hidden states")
    read = _read_shards(path, runs)
    if read is None:
        return
    for shard in sorted(path.glob("shard-*.safetensors")):
        if shard.name not in read:
            yield Deletable(shard, shard.stat().st_size, "hidden states that no run reads")
    yield from _half_written(path)


def _half_written(path: Path) -> Iterator[Deletable]:
    for part in sorted(path.rglob(f"*{PARTIAL}")):
        yield Deletable(part, size(part), "half written")


def _read_shards(path: Path, runs: Sequence[Path]) -> dict[str, bool] | None:
    """Map each shard that runs read to whether a training still needs it; None while a run adds shards."""
    read: dict[str, bool] = {}
    for run in runs:
        states = referred(run, "states")
        if states is None or states.resolve() != path.resolve():
            continue
        done = _up_to_date(_records(run))
        if "states" not in done or not _idle(run):
            return None
        for manifest in (run / STATES).glob("*/manifest.json"):
            for file in read_object(manifest).get("files", ()):
                name = str(file["file"])
                read[name] = read.get(name, False) or "train" not in done
    return read


def over_budget(folder: Path, maximum: int, mine: Path | None = None) -> list[Deletable]:
    """List the shards of hidden states to delete so that at most `maximum` bytes remain, least recently read first.

    Shards that a training still needs stay, even above the budget; shards that no run reads do not count (see
    `unreferenced`). Deleted shards are recomputed on demand.
    """
    runs, total, may_go = runs_in(folder), 0, list[Path]()
    for path in sorted((folder / FOLDER / "states").glob("*/")):
        read = _read_shards(path, runs)
        for shard in sorted(path.glob("shard-*.safetensors")):
            if read is not None and shard.name not in read:
                continue
            total += size(shard)
            if read is not None and not read[shard.name] and (path == mine or _idle(path)):
                may_go.append(shard)
    chosen = []
    for shard in sorted(may_go, key=_last_read):
        if total <= maximum:
            break
        total -= size(shard)
        age = _age(datetime.now(UTC).timestamp() - _last_read(shard))
        chosen.append(Deletable(shard, size(shard), f"hidden states of finished trainings, last read {age} ago"))
    return chosen


def _last_read(shard: Path) -> float:
    status = shard.stat()
    return max(status.st_atime, status.st_mtime)


def deletable(folder: Path, maximum: int | None = None, mine: Path | None = None) -> list[Deletable]:
    """List `unreferenced` files, and with a maximum the states `over_budget`."""
    return [*unreferenced(folder, mine), *(() if maximum is None else over_budget(folder, maximum, mine))]


def delete(folder: Path, listed: Sequence[Deletable], maximum: int | None = None) -> int:
    """Delete listed files that are still `deletable`; returns the bytes freed.

    Each artifact is locked while it is checked again and deleted.
    """
    by_artifact: dict[Path, list[Path]] = {}
    for item in listed:
        owner = next((up for up in [item.path, *item.path.parents] if (up / NOTE).is_file()), item.path)
        by_artifact.setdefault(owner, []).append(item.path)
    freed = 0
    for owner, paths in by_artifact.items():
        with suppress(Busy), locked(owner) if owner.is_dir() else nullcontext():
            for path in sorted({item.path for item in deletable(folder, maximum, owner)}.intersection(paths)):
                freed += size(path, second_names=False)
                if path == owner and path.suffix != PARTIAL:  # from here on it is a partial folder
                    path = path.rename(partial_name(path))
                remove(path)
    return freed


def _idle(path: Path) -> bool:
    try:
        with locked(path):
            return True
    except Busy:
        return False


def _age(seconds: float) -> str:
    """Format an age in the largest unit that fits.

    >>> _age(30), _age(7300), _age(200_000)
    ('1 min', '2 h', '2 d')
    """
    if seconds < 3600:
        return f"{max(1, round(seconds / 60))} min"
    return f"{round(seconds / 3600)} h" if seconds < 86_400 else f"{round(seconds / 86_400)} d"
