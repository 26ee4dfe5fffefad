"""Costs of heads that were tuned elsewhere: measured again on this machine, once, and cached.

Each set of heads, target and conditions has a file under `$XDG_CACHE_HOME/headstart/costs` (default `~/.cache`).
Losing one costs some seconds of measuring.
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
"""Increased when the meaning of the values changes; older files are then measured anew."""


def tuned_here(tuning: Tuning, heads: DraftHead, target: Target, conditions: Conditions) -> Tuning:
    """The tuning with costs for the current conditions: unchanged, cached, or measured (logged to stderr). If measuring
    fails, the tuned costs remain."""
    if tuning.conditions == conditions:
        return tuning
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    file = cache / "headstart" / "costs" / f"{_key(heads, target, conditions)}.json"
    measured = _kept(file)
    if measured is None:
        measured = _measured(tuning, heads, target, conditions)
        if measured is None:
            return tuning
        if measured.steady:
            with suppress(OSError):  # nowhere to keep it: measured again the next time
                write_json(file, {"version": _VERSION, "conditions": conditions.to_json(), **asdict(measured)})
    return tuning.under(measured)


def tuned_there(tuning: Tuning, conditions: Conditions) -> Tuning:
    """The tuning with its stored costs; logs to stderr if they were measured under other conditions."""
    if tuning.conditions != conditions:
        _say(f"These heads were {_when(tuning, conditions)}; deterministic decoding takes their stored costs.\n")
    return tuning


def _when(tuning: Tuning, conditions: Conditions) -> str:
    before = tuning.conditions
    return f"tuned with {before.beside(conditions)}" if before else f"never tuned (better: {TUNE})"


def _measured(tuning: Tuning, heads: DraftHead, target: Target, conditions: Conditions) -> Measured | None:
    before = tuning.conditions
    here = conditions.beside(before) if before else f"dtype={conditions.dtype}"
    _say(f"These heads were {_when(tuning, conditions)}; measuring what drafting costs with {here} ... ")
    started = perf_counter()
    try:
        measured = measure_costs(target, heads, tuning.usual_paths)
    except Exception as error:  # drafting raises the same error and names it; plain decoding is unaffected
        _say(f"failed ({type(error).__name__}).\n")
        return None
    busy = "" if measured.steady else "; the machine is busy, so they are measured again the next time"
    _say(f"{format_seconds(perf_counter() - started)}{busy}\n")
    return measured


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _kept(file: Path) -> Measured | None:
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
