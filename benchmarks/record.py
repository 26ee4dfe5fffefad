"""Write results files for `render.py`, and helpers that benchmarks share.

    python benchmarks/record.py runs/quickstart/report/results.json out/quickstart.json --what "16 held-out prompts."

The command converts a report of `headstart eval` or `headstart run`; benchmarks call `record`. To publish a figure,
copy the file to `benchmarks/results/`, add a marker to a page and run `render.py`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headstart.decode.costs import core_count, cpu_model
from headstart.eval.labels import LABELS, PLAIN
from headstart.support.files import read_json, write_json
from headstart.support.provenance import git_state

OF_A_REPORT = (
    *("name", "tokens_per_second", "speedup_vs_plain", "speedup_vs_transformers", "speedup_vs_prompt_lookup"),
    *("tokens_per_round", "acceptance_by_position", "nodes_per_round", "round_ms"),
)
"""Figures kept for each method of a report."""
SETTINGS = ("target", "max_new_tokens", "temperature", "batch_size", "prompt_lookup_tokens")
OUTPUTS = {"compared": "prompts", "different": "count", "unexplained": "unexplained"}
"""Counts of outputs compared with the plain loop's: name in a row, and name in the report."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="results.json of a report")
    parser.add_argument("out", type=Path)
    parser.add_argument("--what", required=True, help="caption of one or two sentences")
    parser.add_argument("--command", help="command that made the report")
    parser.add_argument("--commit", help="commit of the report; default: the present one")
    options = parser.parse_args(arguments)
    report = read_json(options.report)
    _write(
        options.out,
        what=options.what,
        machine=report["environment"],
        commit=options.commit or commit(),
        command=options.command,
        settings={key: report["settings"][key] for key in SETTINGS},
        rows=rows_of(report["compare"]),
    )


def rows_of(compare: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the `compare` of a report to rows: drafters first, no method compared with itself."""
    rows = []
    for method in sorted(compare, key=lambda method: bool(_speedup(method["name"]))):
        row = {key: None if key == _speedup(method["name"]) else method[key] for key in OF_A_REPORT}
        row["round_total_ms"] = sum(method["round_ms"].values()) if method["round_ms"] else None
        if method["name"] != PLAIN:
            row |= {f"outputs_{name}": method["divergences"][key] for name, key in OUTPUTS.items()}
        rows.append(row)
    return rows


def _speedup(method: str) -> str:
    """Return the figure that compares other methods with this one; empty for drafters."""
    return LABELS[method].speedup if method in LABELS else ""


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Rotate the order of methods, so that each goes first equally often.

    >>> in_turn(["plain", "heads"], 3)
    ['heads', 'plain']
    """
    first = number % len(names)
    return [*names[first:], *names[:first]]


def record(
    file: Path,
    what: str,
    rows: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    script: str,
    arguments: Sequence[str] | None,
    settings: Mapping[str, Any] | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write a results file.

    Args:
        file: to write.
        what: caption of the table, one or two sentences.
        rows: of the table, one key per column; the first key names the row.
        machine: `environment` of the target.
        script: `__file__` of the benchmark.
        arguments: of the benchmark; None for `sys.argv`.
        settings: lengths, batch sizes and seeds, for a fair comparison.
        details: further figures that no table shows.
    """
    _write(
        file,
        what=what,
        machine=machine,
        commit=commit(),
        command=command(script, sys.argv[1:] if arguments is None else arguments),
        settings=dict(settings or {}),
        rows=[dict(row) for row in rows],
        **({"details": dict(details)} if details else {}),
    )


def here() -> dict[str, Any]:
    """Describe the machine, for benchmarks without a target."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    threads = torch.get_num_threads()
    return {"cpu": cpu_model(), "cores": core_count(), "threads": threads, "torch": torch.__version__, "date": now}


def commit() -> str | None:
    """Return the commit of the code, with a plus after uncommitted changes; None outside git."""
    sha, clean = git_state()
    return sha and sha + ("" if clean else "+")


def command(script: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats a measurement; absolute paths are cut to the file name.

    >>> command("/somewhere/benchmarks/families.py", ["--out", "out/families", "/data/asked.jsonl"])
    'python benchmarks/families.py --out out/families asked.jsonl'
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", "/".join(Path(script).parts[-2:]), *words])


def _write(file: Path, what: str, machine: Mapping[str, Any], **values: Any) -> None:
    """Write a results file; unknown values get a reason."""
    computer = {key: value for key, value in machine.items() if key != "date"}
    results = {"what": what, "date": machine["date"], "machine": computer, **values}
    reasons = {"commit": "the code does not run from a git checkout", "command": "not given to record.py"}
    unknown = {key: reason for key, reason in reasons.items() if results[key] is None}
    write_json(file, results | ({"unknown": unknown} if unknown else {}))


if __name__ == "__main__":
    main()
