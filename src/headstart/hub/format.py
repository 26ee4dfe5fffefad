"""Headstart's folder format for heads. Folders are written atomically.

    config.json         format version, target (spec, name, fingerprint, sketch, chat template variables), family and
                        settings of the heads
    heads.safetensors   parameters and draft vocabulary; the header has the heads' version
    tree.json           the tuned tree as rank paths; empty if plain decoding is fastest
    calibration.json    measured costs and acceptance, and the machine
    README.md           the model card
    answers.bin         up to a megabyte of training answers for the drafter "memory", see
                        `headstart.support.answer_file`
    engines.json        measurements in serving engines, if any
    adapter/            the target's adapter in peft's format, if it is not on the Hub
    custom_generate/    for transformers: model.generate(..., custom_generate=FOLDER)

README.md, answers.bin, engines.json and custom_generate are optional on loading, but answers.bin must be intact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile, copytree, ignore_patterns
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

import headstart
from headstart.data.prompts.chat import has_variable, template_kwargs, with_template_kwargs
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.io import AGAIN, CONFIG, WEIGHTS, build_heads, version_of, write_weights
from headstart.hub.card import write_card
from headstart.hub.engine_tuning import FILE as ENGINES
from headstart.hub.engine_tuning import read_engine_tunings
from headstart.model.adapter import FILES as ADAPTER_FILES
from headstart.model.adapter import find_adapter
from headstart.model.frozen import FrozenModel
from headstart.model.identity import BUNDLED, Sketch
from headstart.model.loading import PACKAGED
from headstart.model.model import Target
from headstart.support.answer_file import read_answers, write_answers
from headstart.support.files import no_folder, read_json, refuse_foreign_code, write_atomic, write_json
from headstart.tree.tree import TreeShape
from headstart.tuning.tune import Tuning

FORMAT = "headstart"
FORMAT_VERSION = 1
"""Raise it when older versions of headstart cannot read new folders correctly."""

TREE = "tree.json"
CALIBRATION = "calibration.json"
CARD = "README.md"
ANSWERS = "answers.bin"
MOST_ANSWER_BYTES = 1_000_000
CUSTOM_GENERATE = "custom_generate"
_NEEDED = (CONFIG, WEIGHTS, TREE, CALIBRATION)
_TEMPLATES = Path(__file__).parent / "templates"
FILES = (
    *(CARD, ANSWERS, CALIBRATION, CONFIG, f"{CUSTOM_GENERATE}/generate.py", WEIGHTS, TREE, ENGINES),
    *(f"{BUNDLED}/{file}" for file in ADAPTER_FILES),
)
"""All files of an exported folder; anything else there is not ours."""
_PATHS = TypeAdapter(
    Annotated[list[Annotated[list[NonNegativeInt], Field(min_length=1, max_length=64)]], Field(max_length=1023)]
)


class HeadsAdapter(BaseModel):
    """The target's adapter; it is in the folder of the heads if `spec` is empty."""

    spec: str
    hash: str


class HeadsTarget(BaseModel):
    """The heads' target in config.json; `spec` is empty if others cannot resolve it."""

    spec: str
    name: str
    fingerprint: str
    sketch: Sketch
    quantization: str = "none"
    adapter: HeadsAdapter | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def adapter_spec(self, folder: Path) -> str | None:
        """Return the adapter for `load_target`, for heads in `folder`."""
        return None if self.adapter is None else self.adapter.spec or str(folder / BUNDLED)

    def with_variables(self, target: Target) -> Target:
        """Apply the chat template variables of the training that the target's template has."""
        known = {key: value for key, value in self.chat_template_kwargs.items() if has_variable(target.tokenizer, key)}
        return target.with_tokenizer(with_template_kwargs(target.tokenizer, known))


def export_heads(
    folder: Path,
    heads: DraftHead,
    target: FrozenModel,
    tuning: Mapping[str, Any],
    facts: Mapping[str, Any],
    answers: Iterable[Sequence[int]] = (),
) -> None:
    """Write a folder of heads in their dtype, replacing an earlier one.

    `tuning` is `Tuning.to_json()`; a UserError if the heads cannot draft its tree. `facts` go to
    `headstart.hub.card.write_card`. `answers` are token ids, kept up to `MOST_ANSWER_BYTES`.
    """
    paths = [list(path) for path in tuning["paths"]]
    _shape({"paths": paths}, heads, folder)
    identity, adapter, variables = target.identity(), target.adapter, template_kwargs(target.tokenizer)
    bundled = None if adapter is None or not Path(adapter.spec).expanduser().is_dir() else find_adapter(adapter.spec)
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "headstart_version": headstart.__version__,
        "target": {
            "spec": _absolute(identity.spec),
            "name": display_name(target),
            "fingerprint": identity.fingerprint,
            "sketch": target.sketch(),
            **({} if target.quantization == "none" else {"quantization": target.quantization}),
            **({} if adapter is None else {"adapter": {"spec": "" if bundled else adapter.spec, "hash": adapter.hash}}),
            **({"chat_template_kwargs": variables} if variables else {}),
        },
        "heads": heads.config.model_dump(mode="json"),
        "training": dict(facts.get("training") or {}),
    }

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        write_json(partial / CONFIG, config)
        write_weights(heads, partial / WEIGHTS)
        write_json(partial / TREE, {"paths": paths})
        write_json(partial / CALIBRATION, {key: value for key, value in tuning.items() if key != "paths"})
        if bundled is not None:
            (partial / BUNDLED).mkdir()
            for name in ADAPTER_FILES:
                copyfile(bundled / name, partial / BUNDLED / name)
        write_answers(partial / ANSWERS, answers, MOST_ANSWER_BYTES)
        write_card(partial, facts)
        copytree(_TEMPLATES / CUSTOM_GENERATE, partial / CUSTOM_GENERATE, ignore=ignore_patterns("__pycache__"))

    write_atomic(folder, write)


def read_heads(folder: Path, target: Target, any_target: bool = False) -> tuple[DraftHead, TreeShape, dict[str, Any]]:
    """Read an exported folder for decoding; `any_target` accepts any target of the right sizes.

    Returns:
        The heads (frozen, in the target's dtype and on its device), the tree, and the calibration for
        `Tuning.from_json`.

    Raises:
        UserError: a missing or damaged file, a folder of a newer headstart, another target, or a tree that the heads
            cannot draft.
    """
    config = read_config(folder)
    if not any_target:
        _check_target(folder, HeadsTarget.model_validate(config["target"]), target)
    heads, shape, calibration = _read(folder, config, target)
    return heads.eval().requires_grad_(False), shape, calibration


def _read(folder: Path, config: dict[str, Any], target: Target | None) -> tuple[DraftHead, TreeShape, dict[str, Any]]:
    heads = build_heads(config["heads"], folder / WEIGHTS, target, dtype=None if target is None else target.dtype)
    heads.version = version_of(folder)
    shape = _shape(read_json(folder / TREE, AGAIN), heads, folder)
    calibration = read_json(folder / CALIBRATION, AGAIN)
    if not isinstance(calibration, dict):
        raise UserError(f"{folder / CALIBRATION} is damaged: it does not hold a JSON object.", AGAIN)
    calibration = {**calibration, "paths": [list(path) for path in shape.paths]}
    with _prefixed_errors(folder / CALIBRATION):
        Tuning.from_json(calibration)
    return heads, shape, calibration


@contextmanager
def _prefixed_errors(path: Path) -> Iterator[None]:
    """Prefix the problem of a UserError with a path."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from None


def _check_target(folder: Path, theirs: HeadsTarget, target: Target) -> None:
    """Raise a UserError for a model that the heads were not trained on; any rounding of the same model passes."""
    given = target.identity()
    if given.fingerprint == theirs.fingerprint or (why := target.differs_from(theirs.sketch)) is None:
        return
    load = f"Load {theirs.name}"
    if adapter := theirs.adapter_spec(folder):
        load = f"Load it with load_target(SPEC, adapter={adapter!r}), or let headstart.load do it"
    raise UserError(
        f"The heads in {folder} were trained on {theirs.name} (fingerprint {theirs.fingerprint[:12]}), "
        f"and {given.name} (fingerprint {given.fingerprint[:12]}) is another model: {why}.",
        f"{load}, or train heads for {given.name}. To try all the same, pass any_target=True "
        "(--any-target): the text stays the target's own, and fewer drafts may be accepted.",
    )


def heads_target(folder: Path) -> HeadsTarget:
    """Read the heads' target; errors as in `read_config`."""
    return HeadsTarget.model_validate(read_config(folder)["target"])


def check_folder(folder: Path) -> DraftHead:
    """Check a folder without its target; a UserError for missing, damaged or invalid files. Returns unbound heads."""
    adapter = heads_target(folder).adapter
    bundled = [f"{BUNDLED}/{name}" for name in ADAPTER_FILES] if adapter is not None and not adapter.spec else []
    for name in (*_NEEDED, *bundled):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}.", AGAIN)
    if (folder / ANSWERS).is_file():
        read_answers(folder / ANSWERS)
    read_engine_tunings(folder)
    return _read(folder, read_config(folder), None)[0]


def is_ours(folder: Path) -> bool:
    """Whether a folder's config is in headstart's format; other files are not checked."""
    config = read_json(folder / CONFIG, AGAIN)
    return isinstance(config, dict) and config.get("format") == FORMAT


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of an exported folder; a UserError where it is not ours, or of a newer headstart."""
    if not folder.is_dir():
        raise no_folder(folder, "Give a folder that headstart export wrote, or a Hub id (user/name).")
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG}.", "Give a folder that headstart export wrote.")
    config = read_json(path, AGAIN)
    if isinstance(config, dict) and "format" not in config and "model_type" in config:
        raise no_heads(folder)
    version = config.get("format_version") if isinstance(config, dict) and config.get("format") == FORMAT else None
    if not isinstance(version, int) or version < 1:
        raise UserError(f"{path} was not written by headstart export.", "Give a folder that headstart export wrote.")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{folder} has format version {version}, written by headstart {config.get('headstart_version')}; "
            f"headstart {headstart.__version__} reads up to version {FORMAT_VERSION}.",
            "Upgrade headstart.",
        )
    try:
        HeadsTarget.model_validate(config.get("target"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("target", *first["loc"])))
        raise UserError(f"{path}: {where} is missing or damaged ({first['msg']}).", AGAIN) from None
    return {"heads": None, **config}


def no_heads(place: Path | str) -> UserError:
    """Build the error for a model, or heads in an engine's format, given as heads."""
    return UserError(
        f"{place} holds no heads in headstart's own format.",
        "A model without heads decodes with --drafter ngram (in Python load(target=...)). For heads in another format "
        "add their model with --target.",
    )


def _shape(tree: Any, heads: DraftHead, folder: Path) -> TreeShape:
    """Parse the tree; a UserError if the heads cannot draft it."""
    try:
        shape = TreeShape.from_paths(_PATHS.validate_python(tree["paths"]))
    except (ValidationError, TypeError, KeyError):
        raise UserError(f"{folder / TREE} holds no rank paths.", AGAIN) from None
    with _prefixed_errors(folder / TREE):
        heads.check_tree(shape)
    return shape


def _absolute(spec: str) -> str:
    path = Path(spec).expanduser()
    return str(path.resolve()) if spec and spec not in PACKAGED and path.exists() else spec


def display_name(target: FrozenModel) -> str:
    """Return a target's display name, with adapter and quantization, but without local paths."""
    if target.spec in PACKAGED:
        return target.named(PACKAGED[target.spec].title)
    path = Path(target.spec).expanduser()
    return target.named(path.resolve().name if target.spec and path.exists() else target.model_name)


def refuse_other_files(folder: Path) -> None:
    """Raise a UserError if a folder to replace holds anything but exported heads."""
    refuse_foreign_code(folder, {name.partition("/")[0] for name in FILES})
    if folder.exists() and any(folder.iterdir()) and not ((folder / CONFIG).is_file() and is_ours(folder)):
        raise UserError(
            f"{folder} holds files that headstart export did not write, and they would be lost.",
            "Move them away, or choose another folder.",
        )
