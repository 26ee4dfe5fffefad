"""Sharing heads: an exported folder becomes a repository on the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
from headstart.support.hub_errors import LOGIN, explained
from headstart.target.loading import PACKAGED

MESSAGE = "Upload draft heads with headstart"


@dataclass(frozen=True)
class Upload:
    """What a push did, or with `dry_run` would do: then `url` and `commit` are empty.

    `files` are (path in the repository, size in bytes); what is `left_out` headstart did not write.
    """

    repo_id: str
    files: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...] = ()
    url: str = ""
    commit: str = ""


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    message: str = MESSAGE,
) -> Upload:
    """Create a repository, and the branch `revision` of it, if there is none, and upload an exported folder to it in
    one commit.

    Only what headstart wrote is uploaded, and no path of this machine with it: a target in a local folder keeps its
    name and fingerprint, and whoever loads the heads says where it lies.

    With `private` the repository is created so, and one that exists has to be so already. A dry run needs no token. A
    UserError where the folder is not whole, the token may not write there, or it is public and should not be.
    """
    folder = heads_folder(folder)
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"{repo_id!r} is not a Hub id.", "Write it as user/name.")
    ours: Sequence[str] = FILES
    if is_engine_folder(folder):
        ours = ENGINE_FILES
        for finding in check_export(folder):
            raise UserError(f"{finding.engine} cannot serve {folder}: {finding.problem}", finding.remedy)
    else:
        check_folder(folder)
        if not (folder / CARD).is_file():
            raise UserError(f"{folder} has no {CARD}.", "Export the heads again; the model card is written with them.")
    contents = _contents(folder, ours)
    files = tuple((name, _size(content)) for name, content in contents.items())
    left_out = _left_out(folder, ours)
    if dry_run:
        return Upload(repo_id, files, left_out)
    if huggingface_hub.get_token() is None:
        raise UserError(f"Pushing to {repo_id} needs a Hub token, and there is none.", LOGIN)
    with explained("Cannot push to", repo_id):
        url = huggingface_hub.create_repo(repo_id, private=private, exist_ok=True)
        if private and not huggingface_hub.model_info(repo_id).private:
            raise UserError(
                f"{repo_id} already exists and is public.", "Make it private in its settings, or choose another name."
            )
        if revision is not None:
            huggingface_hub.create_branch(repo_id, branch=revision, exist_ok=True)
        # Files of a format that this folder does not have, from an earlier push: the new card says nothing of them.
        uploaded = huggingface_hub.list_repo_files(repo_id, revision=revision) if ours is ENGINE_FILES else ()
        gone = sorted(set(uploaded) & set(ENGINE_FILES) - set(contents))
        commit = huggingface_hub.create_commit(
            repo_id,
            [
                *(huggingface_hub.CommitOperationAdd(name, content) for name, content in contents.items()),
                *(huggingface_hub.CommitOperationDelete(name) for name in gone),
            ],
            commit_message=message,
            revision=revision,
        )
    return Upload(repo_id, files, left_out, url=str(url), commit=str(commit.oid))


def _contents(folder: Path, ours: Sequence[str]) -> dict[str, bytes | Path]:
    """What is uploaded, by its path in the repository: the weights as they lie there, texts without local paths."""
    files = [name for name in ours if (folder / name).is_file()]
    texts = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in files
        if not name.endswith((".safetensors", ".gguf"))
    }
    local = {path for name, text in texts.items() if name.endswith(".json") for path in _local_paths(json.loads(text))}
    for path in sorted(local, key=len, reverse=True):
        texts = {name: text.replace(path, Path(path).name) for name, text in texts.items()}
    if ours is FILES and json.loads((folder / CONFIG).read_text(encoding="utf-8"))["target"]["spec"] in local:
        config = json.loads(texts[CONFIG])
        config["target"]["spec"] = ""  # a bare name would be looked for as if it were somewhere
        texts[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {name: texts[name].encode() if name in texts else folder / name for name in files}


def _local_paths(value: Any) -> Iterator[str]:
    """Everything in the content of a JSON file that names a path on this machine."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _local_paths(inner)
    elif isinstance(value, str) and value not in PACKAGED and Path(value).name:
        path = Path(value).expanduser()
        if path.is_absolute() or value.startswith((".", "~")) or ("/" in value and path.exists()):
            yield value


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _left_out(folder: Path, files: Sequence[str]) -> tuple[str, ...]:
    """What is not ours, folders with a slash; of a folder with something of ours, what in it is not."""
    ours = {part for name in files for part in (name, name.partition("/")[0])}
    folders = [folder, *(folder / name for name in ours if (folder / name).is_dir())]
    paths = {path.relative_to(folder).as_posix(): path for place in folders for path in place.iterdir()}
    return tuple(sorted(f"{name}/" if path.is_dir() else name for name, path in paths.items() if name not in ours))
