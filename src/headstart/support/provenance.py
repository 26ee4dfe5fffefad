"""What it would take to run a command again: kept in every run, however it was started."""

from __future__ import annotations

import json
import platform
import shlex
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


def origin() -> str | None:
    """What pip takes to install this very headstart, as its installation recorded it (PEP 610), pinned; None where that
    was a folder of this machine, or where a name alone was given: whose it is elsewhere is not known here."""
    try:
        recorded = json.loads(metadata.distribution("headstart").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url, source = str(recorded.get("url", "")), recorded.get("vcs_info", {})
    if not url.startswith(("https://", "ssh://")):
        return None
    inside = f"#subdirectory={recorded['subdirectory']}" if recorded.get("subdirectory") else ""
    if source.get("commit_id"):
        return f"headstart @ {source['vcs']}+{url}@{source['commit_id']}{inside}"
    digests = recorded.get("archive_info", {}).get("hashes", {})
    return f"headstart @ {url}#sha256={digests['sha256']}" if "sha256" in digests else None


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


def typed() -> str | None:
    """The headstart command that this process is, as it was typed; None in any other program."""
    called = Path(sys.argv[0])
    name = called.parent.name if called.name == "__main__.py" else called.stem
    return shlex.join([name, *sys.argv[1:]]) if name == "headstart" else None


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
