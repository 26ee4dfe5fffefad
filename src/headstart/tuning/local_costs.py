"""Costs on this machine of heads that were tuned elsewhere, measured once and cached.

Each set of heads, target and conditions has a file under `$XDG_CACHE_HOME/headstart/costs` (default `~/.cache`). A
missing file is measured again in a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
from pydantic import TypeAdapter

from headstart.decode.costs import Conditions, Measured
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.support.files import read_json, write_json
from headstart.support.terminal import format_seconds
from headstart.tuning.stopwatch import measure_costs
from headstart.tuning.tune import TUNE, Tuning

_VERSION = 1
"""Format version of the cached files; others are measured again."""


def with_local_costs(tuning: Tuning, heads: DraftHead, target: Target, conditions: Conditions) -> Tuning:
    """Return the tuning with costs for these conditions: stored, cached, or measured (logged to stderr). If measuring
    fails, the stored costs stay."""
    if tuning.conditions == conditions:
        return tuning
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    file = cache / "headstart" / "costs" / f"{_key(heads, target, conditions)}.json"
    measured = _read(file)
    if measured is None:
        measured = _measure(tuning, heads, target, conditions)
        if measured is None:
            return tuning
        if measured.steady:
            with suppress(OSError):  # an unwritable cache: measured again the next time
                write_json(file, {"version": _VERSION, "conditions": conditions.to_json(), **asdict(measured)})
    return tuning.at_costs(measured)


def warn_of_stored_costs(tuning: Tuning, conditions: Conditions) -> None:
    """Log to stderr if the stored costs were measured under other conditions."""
    if tuning.conditions != conditions:
        _say(f"{_origin(tuning, conditions)}; deterministic decoding takes their stored costs.\n")


def _origin(tuning: Tuning, conditions: Conditions) -> str:
    tuned = tuning.conditions
    return "These heads were " + (
        f"tuned with {tuned.difference(conditions)}" if tuned else f"never tuned (better: {TUNE})"
    )


def _measure(tuning: Tuning, heads: DraftHead, target: Target, conditions: Conditions) -> Measured | None:
    local = conditions.difference(tuning.conditions) if tuning.conditions else f"dtype={conditions.dtype}"
    _say(f"{_origin(tuning, conditions)}; measuring the costs of drafting with {local} ... ")
    started = perf_counter()
    try:
        measured = measure_costs(target, heads, tuning.ranked_paths)
    except Exception as error:  # drafting raises the same error and names it; plain decoding is unaffected
        _say(f"failed ({type(error).__name__}).\n")
        return None
    busy = "" if measured.steady else "; the machine is busy, so they are measured again the next time"
    _say(f"{format_seconds(perf_counter() - started)}{busy}\n")
    return measured


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _read(file: Path) -> Measured | None:
    """Read a cached measurement; None if missing or unusable."""
    try:
        values = read_json(file)
        return TypeAdapter(Measured).validate_python(values) if values["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError):  # `UserError` and pydantic's errors are ValueErrors
        return None


def _key(heads: DraftHead, target: Target, conditions: Conditions) -> str:
    """Hash heads (by sampled weights), target and conditions."""
    digest = hashlib.sha256(json.dumps(conditions.to_json(), sort_keys=True).encode())
    digest.update(target.identity().fingerprint.encode())
    digest.update(heads.config.model_dump_json().encode())
    for name, tensor in sorted(heads.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
