"""Reader of the results that `headstart eval` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.support.files import read_json

FILE = "results.json"


def read_results(path: Path) -> tuple[dict[str, Any], Path]:
    """Read a report, given its folder, its run's folder, or results.json; also return the path of that file."""
    inside = (path / FILE, path / "report" / FILE)
    file = next((file for file in inside if file.is_file()), inside[0]) if path.is_dir() else path
    results = read_json(file)
    if not isinstance(results, dict) or "settings" not in results:
        raise UserError(f"{file} is no report.", "Name the results.json of a report; headstart eval writes them.")
    return results, file
