"""Sharing heads: an exported folder becomes a repository on the Hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from headstart.errors import UserError
from headstart.heads.io import CONFIG, heads_folder
from headstart.hub.card import ENGINE_FILES, is_engine_folder
from headstart.hub.engines.export import check_export
from headstart.hub.format import CARD, FILES, check_folder
from headstart.hub.pull import HUB_ID
from headstart.support.files import read_json
from headstart.support.hub_errors import LOGIN, explained
from headstart.target.adapter import CONFIG as ADAPTER
from headstart.target.identity import BUNDLED
from headstart.target.loading import PACKAGED


@dataclass(frozen=True)
class Upload:
    """What a push did, or with `dry_run` would do.

    Attributes:
        files: (path in the repository, size in bytes).
        left_out: what lies in the folder and stays there, since headstart did not write it.
        url: page of the repository; empty after a dry run, like `commit`, its hash.
    """

    repo_id: str
    files: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...] = ()
    url: str = ""
    commit: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


def push(folder: Path, repo_id: str, *, private: bool = False, dry_run: bool = False, message: str = "") -> Upload:
    """Create a repository, if there is none, and upload an exported folder to it in one commit.

    Only what headstart wrote is uploaded, and no path of this machine with it: a target in a local folder keeps its
    name and fingerprint, and whoever loads the heads says where it lies.

    Args:
        folder: what `export_heads` or an export for engines wrote, or the folder of the run it belongs to.
        repo_id: user/name.
        private: create the repository for its owner's eyes only; one that exists has to be private already.
        dry_run: only say what would be uploaded; nothing is sent and no token is needed.
        message: of the commit.

    Raises:
        UserError: the folder is not whole, the id is none, there is no token, it may not write there, a repository
            that should be private is public, or the Hub cannot be reached.
    """
    folder = heads_folder(folder)
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"{repo_id!r} is not a Hub id.", "Write it as user/name.")
    known: Sequence[str] = ENGINE_FILES
    if is_engine_folder(folder):
        contents = _engine_contents(folder)
    else:
        check_folder(folder)
        if not (folder / CARD).is_file():
            raise UserError(f"{folder} has no {CARD}.", "Export the heads again; the model card is written with them.")
        contents, known = _contents(folder), FILES
    files = tuple((name, _size(content)) for name, content in contents.items())
    left_out = _left_out(folder, known)
    if dry_run:
        return Upload(repo_id, files, left_out)
    if huggingface_hub.get_token() is None:
        raise UserError(f"Pushing to {repo_id} needs a Hub token, and there is none.", LOGIN)
    with explained("Cannot push to", repo_id):
        url = huggingface_hub.create_repo(repo_id, private=private, exist_ok=True)
        if private and not huggingface_hub.model_info(repo_id).private:
            raise UserError(
                f"{repo_id} is there already, and public.", "Make it private in its settings, or choose another name."
            )
        # Files of a format that this folder does not have, from an earlier push: the new card says nothing of them.
        uploaded = huggingface_hub.list_repo_files(repo_id) if known is ENGINE_FILES else ()
        gone = sorted(set(uploaded) & set(ENGINE_FILES) - set(contents))
        commit = huggingface_hub.create_commit(
            repo_id,
            [
                *(huggingface_hub.CommitOperationAdd(name, content) for name, content in contents.items()),
                *(huggingface_hub.CommitOperationDelete(name) for name in gone),
            ],
            commit_message=message or "Upload draft heads with headstart",
        )
    return Upload(repo_id, files, left_out, url=str(url), commit=str(commit.oid))


def _contents(folder: Path) -> dict[str, bytes | Path]:
    """What is uploaded, by its path in the repository: the weights as they lie there, texts without local paths."""
    config = read_json(folder / CONFIG)
    files = [name for name in FILES if (folder / name).is_file()]
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in files if not name.endswith(".safetensors")}
    training = config.get("training")
    paths = [config["target"]["spec"], *(training.values() if isinstance(training, dict) else ())]
    if (adapter := folder / BUNDLED / ADAPTER).is_file():
        paths.append(read_json(adapter).get("base_model_name_or_path"))
    local = [path for path in paths if _is_local(path)]
    for path in sorted(local, key=len, reverse=True):
        texts = {name: text.replace(path, Path(path).name) for name, text in texts.items()}
    if config["target"]["spec"] in local:  # a bare name would be looked for as if it were somewhere
        texts[CONFIG] = _dumped({**json.loads(texts[CONFIG]), "target": {**config["target"], "spec": ""}})
    return {name: texts[name].encode() if name in texts else folder / name for name in files}


def _engine_contents(folder: Path) -> dict[str, bytes | Path]:
    """The same of a folder for engines, which its own check must find whole."""
    for finding in check_export(folder):
        raise UserError(f"{finding.engine} cannot serve {folder}: {finding.problem}", finding.remedy)
    contents: dict[str, bytes | Path] = {name: folder / name for name in ENGINE_FILES if (folder / name).is_file()}
    if CONFIG in contents:
        contents[CONFIG] = _dumped(_without_paths(read_json(folder / CONFIG))).encode()
    return contents


def _without_paths(value: Any) -> Any:
    """What a JSON file holds, with the last part of each path of this machine in its place."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return Path(value).name if _is_local(value) else value


def _is_local(value: Any) -> bool:
    """Whether a value names a path on this machine."""
    if not isinstance(value, str) or value in PACKAGED or not Path(value).name:
        return False
    path = Path(value).expanduser()
    return path.is_absolute() or value.startswith((".", "~")) or ("/" in value and path.exists())


def _dumped(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _left_out(folder: Path, files: Sequence[str]) -> tuple[str, ...]:
    """What is not ours, folders with a slash; of a folder with something of ours, what in it is not."""
    ours = {part for name in files for part in (name, name.partition("/")[0])}
    folders = [folder, *(folder / name for name in ours if (folder / name).is_dir())]
    paths = {path.relative_to(folder).as_posix(): path for place in folders for path in place.iterdir()}
    return tuple(sorted(f"{name}/" if path.is_dir() else name for name, path in paths.items() if name not in ours))
