"""Sharing heads: an exported folder becomes a repository on the Hub."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml

from headstart.errors import UserError
from headstart.heads.io import CONFIG, RUN_RECIPE, heads_folder
from headstart.hub.card import ENGINE_FILES, OF_THE_TARGET, is_engine_folder
from headstart.hub.engines.export import check_export
from headstart.hub.format import CARD, FILES, check_folder
from headstart.hub.pull import HUB_ID
from headstart.recipes.recipe import load_recipe
from headstart.support.hub_errors import LOGIN, explained
from headstart.target.loading import PACKAGED

MESSAGE = "Upload draft heads with headstart"
DATA_MESSAGE = "Upload conversations with headstart"
_CONVERSATIONS = Path("data", "conversations")
_DATA_CARD = """---
{metadata}---

# Conversations of {target}

Draft heads for this model learn from them with headstart. A line has `messages`, its token ids as the model's tokenizer
has them (`tokens`), and which runs of these heads learn (`supervised`): the model's own answers, unless the recipe took
given ones. The licence of the prompts holds for them.
"""


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
    ours: Sequence[str] = FILES
    if is_engine_folder(folder):
        ours = ENGINE_FILES
        for finding in check_export(folder):
            raise UserError(f"{finding.engine} cannot serve {folder}: {finding.problem}", finding.remedy)
    else:
        check_folder(folder)
        if not (folder / CARD).is_file():
            raise UserError(f"{folder} has no {CARD}.", "Export the heads again; the model card is written with them.")
    contents, left_out = _contents(folder, ours), _left_out(folder, ours)
    # Files of a format that this folder does not have, from an earlier push: the new card says nothing of them.
    gone = set(ENGINE_FILES) - set(contents) if ours is ENGINE_FILES else set[str]()
    how = _How(private, dry_run, revision, message)
    return replace(_upload(repo_id, contents, how, gone), left_out=left_out)


def push_conversations(
    run: Path,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    message: str = DATA_MESSAGE,
) -> Upload:
    """Create a dataset repository, and upload what a run learned from and was judged on as its splits `train` and
    `validation`, with a card; see `push`. Recipes read it as `data.prompts=user/name`."""
    folder = run / _CONVERSATIONS
    splits = [split for split in ("train", "validation") if (folder / f"{split}.jsonl").is_file()]
    if not splits:
        raise UserError(f"{run} has no conversations.", "Name the folder of a run that has written some.")
    target = load_recipe(str(run / RUN_RECIPE)).target.spec
    metadata = {
        "license": "other",
        "license_name": OF_THE_TARGET,
        "configs": [
            {"config_name": "default", "data_files": [{"split": one, "path": f"{one}.jsonl"} for one in splits]}
        ],
    }
    name = Path(target).name if Path(target).is_dir() else target
    card = _DATA_CARD.format(metadata=yaml.safe_dump(metadata, sort_keys=False), target=name)
    contents: dict[str, bytes | Path] = {"README.md": card.encode()}
    contents |= {f"{split}.jsonl": folder / f"{split}.jsonl" for split in splits}
    return _upload(repo_id, contents, _How(private, dry_run, revision, message, "dataset"))


@dataclass(frozen=True)
class _How:
    """How something is uploaded; `kind` is that of the repository, as the Hub calls it."""

    private: bool
    dry_run: bool
    revision: str | None
    message: str
    kind: str = "model"


def _upload(repo_id: str, contents: Mapping[str, bytes | Path], how: _How, gone: Collection[str] = ()) -> Upload:
    """Upload files by their names in the repository, and delete those of the `gone` that are there."""
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"{repo_id!r} is not a Hub id.", "Write it as user/name.")
    files = tuple((name, _size(content)) for name, content in contents.items())
    if how.dry_run:
        return Upload(repo_id, files)
    if huggingface_hub.get_token() is None:
        raise UserError(f"Pushing to {repo_id} needs a Hub token, and there is none.", LOGIN)
    with explained("Cannot push to", repo_id):
        url = huggingface_hub.create_repo(repo_id, private=how.private, exist_ok=True, repo_type=how.kind)
        if how.private and not huggingface_hub.repo_info(repo_id, repo_type=how.kind).private:
            raise UserError(
                f"{repo_id} already exists and is public.", "Make it private in its settings, or choose another name."
            )
        if how.revision is not None:
            huggingface_hub.create_branch(repo_id, branch=how.revision, exist_ok=True, repo_type=how.kind)
        there = huggingface_hub.list_repo_files(repo_id, revision=how.revision, repo_type=how.kind) if gone else ()
        commit = huggingface_hub.create_commit(
            repo_id,
            [
                *(huggingface_hub.CommitOperationAdd(name, content) for name, content in contents.items()),
                *(huggingface_hub.CommitOperationDelete(name) for name in sorted({*there} & {*gone})),
            ],
            commit_message=how.message,
            revision=how.revision,
            repo_type=how.kind,
        )
    return Upload(repo_id, files, url=str(url), commit=str(commit.oid))


def _contents(folder: Path, ours: Sequence[str]) -> dict[str, bytes | Path]:
    """What is uploaded, by its path in the repository: the weights as they lie there, texts without local paths."""
    files = [name for name in ours if (folder / name).is_file()]
    texts = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in files
        if not name.endswith((".safetensors", ".gguf", ".bin"))
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
