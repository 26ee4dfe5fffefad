"""What it would take to run a command again: kept in every run, however it was started."""

from __future__ import annotations

import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from headstart.errors import UserError
from headstart.support.files import read_json, write_json

PACKAGES = ("headstart", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "pydantic")
"""Packages whose versions a run writes down."""
FILE = "provenance.json"


def git_state() -> tuple[str | None, bool | None]:
    """(commit of the source tree that headstart runs from, whether it has no changes); None when it is not in git."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(Path(__file__).parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    # An installed package may lie in a folder that some other repository holds, without being a part of it.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    sha, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return sha, None if changes is None else changes == ""


def note_provenance(folder: Path) -> None:
    """Add this command to those that worked on a run: what it would take to do it again."""
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    sha, clean = git_state()
    command = {
        "argv": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git_sha": sha,
        "git_clean": clean,
    }
    try:
        earlier = list(read_json(folder / FILE)["commands"])
    except (UserError, KeyError, TypeError):
        earlier = []
    write_json(folder / FILE, {"commands": [*earlier, command]})
