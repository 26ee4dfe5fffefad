"""Provenance of a run, to repeat its commands."""

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
"""Packages with recorded versions."""
FILE = "provenance.json"


def origin() -> str | None:
    """Return a pinned pip requirement for this installation (PEP 610); None for a local folder or a bare name, which
    may mean another package elsewhere."""
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
    """Return (commit of headstart's source tree, whether it is clean); Nones outside git."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(Path(__file__).parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    # An installed package may be in another repository's folder, untracked.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    sha, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return sha, None if changes is None else changes == ""


def typed() -> str | None:
    """Return this process's headstart command line; None in any other program."""
    called = Path(sys.argv[0])
    name = called.parent.name if called.name == "__main__.py" else called.stem
    return shlex.join([name, *sys.argv[1:]]) if name == "headstart" else None


def note_provenance(folder: Path) -> None:
    """Append this command to a run's provenance file."""
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
