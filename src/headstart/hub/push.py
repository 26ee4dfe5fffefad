"""Upload of heads and conversations to the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from headstart.errors import UserError
from headstart.heads.io import CONFIG, RUN_RECIPE, heads_folder
from headstart.hub.card import ENGINE_FILES, TARGET_LICENSE, is_engine_folder
from headstart.hub.engines.export import check_export
from headstart.hub.format import CARD, FILES, check_folder
from headstart.hub.pull import HUB_ID
from headstart.model.loading import PACKAGED
from headstart.recipes.recipe import load_recipe
from headstart.support.hub_errors import LOGIN, explained

Contents = dict[str, bytes | Path]
"""Content, or file, by path in the repository."""
_CONVERSATIONS = Path("data", "conversations")
_DATA_CARD = """---
license: other
license_name: {license}
configs:
- config_name: default
  data_files:
{files}
---

# Conversations of {target}

Training data for draft heads of this model, written by headstart. A line has `messages`, their token ids (`tokens`),
and the supervised spans (`supervised`): the model's own answers, unless the recipe used given ones. The licence of the
prompts applies.
"""


@dataclass(frozen=True)
class Upload:
    """Result of a push; `url` and `commit` are empty after a dry run.

    `files` are (path in the repository, size in bytes); `left_out` are files not written by headstart.
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
    conversations: bool = False,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    message: str = "",
) -> Upload:
    """Upload an exported folder in one commit; creates the repository and the branch `revision` if missing.

    Uploads only files written by headstart, without local paths: a local target keeps its name and fingerprint, and
    users of the heads pass its location. A dry run needs no token.

    With `conversations`, upload a run's training and validation conversations as a dataset with a card instead.
    Recipes read it as `data.prompts=user/name`.

    A UserError where the folder is incomplete, the token lacks write access, or an existing repository is public and
    `private` is set.
    """
    kind = "dataset" if conversations else "model"
    contents, left_out, stale = _conversations(folder) if conversations else _heads(heads_folder(folder))
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"{repo_id!r} is not a Hub id.", "Write it as user/name.")
    files = tuple(
        (name, len(content) if isinstance(content, bytes) else content.stat().st_size)
        for name, content in contents.items()
    )
    if dry_run:
        return Upload(repo_id, files, left_out)
    if huggingface_hub.get_token() is None:
        raise UserError(f"Pushing to {repo_id} needs a Hub token.", LOGIN)
    with explained("Cannot push to", repo_id):
        url = huggingface_hub.create_repo(repo_id, private=private, exist_ok=True, repo_type=kind)
        if private and not huggingface_hub.repo_info(repo_id, repo_type=kind).private:
            raise UserError(f"{repo_id} exists and is public.", "Make it private, or choose another name.")
        if revision is not None:
            huggingface_hub.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=kind)
        existing = huggingface_hub.list_repo_files(repo_id, revision=revision, repo_type=kind) if stale else ()
        commit = huggingface_hub.create_commit(
            repo_id,
            [
                *(huggingface_hub.CommitOperationAdd(name, content) for name, content in contents.items()),
                *(huggingface_hub.CommitOperationDelete(name) for name in sorted(stale.intersection(existing))),
            ],
            commit_message=message or f"Upload {'conversations' if conversations else 'draft heads'} with headstart",
            revision=revision,
            repo_type=kind,
        )
    return Upload(repo_id, files, left_out, url=str(url), commit=str(commit.oid))


def _heads(folder: Path) -> tuple[Contents, tuple[str, ...], set[str]]:
    """Check a folder of heads. Returns its contents, its files that are not ours, and files to delete on the Hub."""
    if not is_engine_folder(folder):
        check_folder(folder)
        if not (folder / CARD).is_file():
            raise UserError(f"{folder} has no {CARD}.", "Export the heads again; the model card is written with them.")
        return _contents(folder, FILES), _left_out(folder, FILES), set()
    for finding in check_export(folder):
        raise UserError(f"{finding.engine} cannot serve {folder}: {finding.problem}", finding.remedy)
    contents = _contents(folder, ENGINE_FILES)
    # Files of other engine formats from an earlier push: the new card does not mention them.
    return contents, _left_out(folder, ENGINE_FILES), set(ENGINE_FILES) - set(contents)


def _conversations(run: Path) -> tuple[Contents, tuple[str, ...], set[str]]:
    """Return the conversations of a run with a card, in the form of `_heads`."""
    folder = run / _CONVERSATIONS
    splits = [split for split in ("train", "validation") if (folder / f"{split}.jsonl").is_file()]
    if not splits:
        raise UserError(f"{run} has no conversations.", "Write them first: headstart data build RECIPE")
    target = load_recipe(str(run / RUN_RECIPE)).target.spec
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
    name = Path(target).name if Path(target).is_dir() else target
    card = _DATA_CARD.format(license=TARGET_LICENSE, files=files, target=name)
    return {"README.md": card.encode(), **{f"{split}.jsonl": folder / f"{split}.jsonl" for split in splits}}, (), set()


def _contents(folder: Path, ours: Sequence[str]) -> Contents:
    """Map paths in the repository to their content: binary files unchanged, texts without local paths."""
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
        config["target"]["spec"] = ""  # a bare name would be resolved as a spec
        texts[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {name: texts[name].encode() if name in texts else folder / name for name in files}


def _local_paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _local_paths(inner)
    elif isinstance(value, str) and value not in PACKAGED and Path(value).name:
        path = Path(value).expanduser()
        if path.is_absolute() or value.startswith((".", "~")) or ("/" in value and path.exists()):
            yield value


def _left_out(folder: Path, files: Sequence[str]) -> tuple[str, ...]:
    """List files that are not ours, including those inside our folders; other folders end with a slash."""
    ours = {part for name in files for part in (name, name.partition("/")[0])}
    folders = [folder, *(folder / name for name in ours if (folder / name).is_dir())]
    paths = {path.relative_to(folder).as_posix(): path for place in folders for path in place.iterdir()}
    return tuple(sorted(f"{name}/" if path.is_dir() else name for name, path in paths.items() if name not in ours))
