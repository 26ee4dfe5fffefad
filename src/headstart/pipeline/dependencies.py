"""What stages depend on, in the words of their records: settings, contents of files, conditions, earlier stages."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from headstart.pipeline.run import Run
from headstart.recipes.sections import Section


def flat(prefix: str, section: Section, leave_out: set[str] | None = None) -> dict[str, Any]:
    values = section.model_dump(mode="json", exclude=leave_out)
    return {f"{prefix}.{key}": value for key, value in values.items()}


def content(source: str) -> str | None:
    """Hash of a file's content; None when `source` is not a file."""
    path = Path(source).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def where(run: Run) -> dict[str, Any]:
    """What is timed belongs to a device and a dtype, as far as the recipe names them."""
    target = run.recipe.target
    bits = {} if "quantization" in target.unset() else {"target.quantization": target.quantization}
    return {"target.device": target.device, "target.dtype": target.dtype, **bits}


def conditions(run: Run) -> dict[str, Any]:
    """The same as it is found here: machine, device, dtype, threads."""
    from headstart.decode.costs import Conditions

    return Conditions.of(run.decoded).to_json()


def before(run: Run, stage: str) -> str:
    """Identity of a stage that is finished."""
    record = run.record(stage)
    assert record is not None and record.whole, f"{stage} is finished"
    return record.identity
