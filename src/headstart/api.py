"""The Python API: `headstart.load`, `headstart.export` and `headstart.import_heads`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from headstart.data.served.log import RequestLog
from headstart.decode.options import DecodeOptions as DecodeOptions
from headstart.decode.options import check_names
from headstart.decoder import Decoder as Decoder
from headstart.decoder import Loaded
from headstart.errors import UserError
from headstart.hub.engines import importing
from headstart.hub.engines.export import Exported as Exported
from headstart.hub.engines.export import export_for, is_published
from headstart.hub.format import ANSWERS, check_folder, heads_target, read_heads
from headstart.hub.options import LoadKeywords, LoadOptions
from headstart.hub.pull import locate
from headstart.model.identity import dtype_name
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.streaming import Answer as Answer
from headstart.streaming import Stream as Stream


def load(
    heads: str | Path | None = None,
    target: Target | PreTrainedModel | str | Path | None = None,
    **keywords: Unpack[LoadKeywords],
) -> Decoder:
    """Load heads and the model they belong to.

    Args:
        heads: a folder of heads, the folder of a run, a Hub id (user/name), or, with a target, a folder of published
            heads (see `import_heads`); None for a target alone, with drafters that need no heads, such as "mtp" (the
            multi-token-prediction module of its own checkpoint).
        target: a loaded model (by `load_target`, or by transformers with `tokenizer`; it is frozen and put in eval
            mode), or its location for `load_target` if the heads name another one. Adapters come with the heads.
        **keywords: see `headstart.hub.options.LoadOptions`; dtype may be torch's own, such as torch.bfloat16.

    Raises:
        UserError: missing heads, truncated files, a target that cannot be loaded or that the heads do not belong to.
    """
    check_names(keywords, LoadKeywords.__annotations__)
    if not isinstance(heads, str | Path | None):
        raise UserError(f"heads is of the type {type(heads).__name__}.", "Pass a folder of heads, a run or a Hub id.")
    if not isinstance(target, Target | PreTrainedModel | str | Path | None):
        raise UserError(
            f"target is of the type {type(target).__name__}.",
            "Give a model that transformers loaded, a Target, a folder or a hub id.",
        )
    target = str(target) if isinstance(target, Path) else target
    options = LoadOptions(**keywords)
    options = replace(options, dtype=_dtype_name(options.dtype))
    changed = (options.dtype, options.device, options.quantization) != ("auto", "auto", None)
    if changed and isinstance(target, Target | PreTrainedModel):
        raise UserError(
            "dtype, device and quantization cannot be changed: the target is already loaded.",
            "Load it with them, or give headstart.load the target's name.",
        )
    if isinstance(target, PreTrainedModel):
        target = Target(target, options.tokenizer, exact=options.exact)
    elif options.tokenizer is not None:
        raise UserError("tokenizer belongs to a target that transformers loaded.", "Give the model as target, too.")
    if heads is None:
        if target is None:
            raise UserError("Neither heads nor a target was given.", "Name a folder of heads, or give target=.")
        decoder = Decoder(_load_target(target, options, options.quantization or "none", revision=options.revision))
    elif target is not None and is_published(Path(heads).expanduser()):
        target = _load_target(target, options, options.quantization or "none")
        with TemporaryDirectory(prefix="headstart-") as place:
            importing.import_heads(Path(heads).expanduser(), target, Path(place) / "heads")
            decoder = Decoder(target, *_read(Path(place) / "heads", target))
    else:
        decoder = _load_heads(heads, target, options)
    decoder.log = RequestLog(options.log) if isinstance(options.log, str | Path) else options.log
    return decoder


def _load_heads(heads: str | Path, target: Target | str | None, options: LoadOptions) -> Decoder:
    """Load a folder of heads, and the target that it names if none is given."""
    folder = locate(heads, options.revision, options.token)
    check_folder(folder)
    known = heads_target(folder)
    adapter = None if target and options.any_target else known.adapter_spec(folder)
    if target is None and (not known.spec or (Path(known.spec).is_absolute() and not Path(known.spec).exists())):
        raise UserError(
            f"The heads in {folder} belong to {known.name}, which is not on this machine.",
            f"Say where {known.name} is: a folder or a hub id as target.",
        )
    target = _load_target(target or known.spec, options, options.quantization or known.quantization, adapter=adapter)
    version = folder.resolve()
    decoder = Decoder(known.with_variables(target), *_read(version, target, options.any_target))
    if options.follow:
        decoder.newer = _follower(folder, version, decoder.target, options.any_target)
    return decoder


def _read(folder: Path, target: Target, any_target: bool = False) -> Loaded:
    """Read a folder of heads as arguments of `Decoder`."""
    answers = folder / ANSWERS
    return *read_heads(folder, target, any_target), answers if answers.is_file() else None


def _follower(link: Path, at: Path, target: Target, any_target: bool) -> Callable[[], Loaded | None]:
    """Return a function that reads the heads of a symlink after it has moved; each folder is tried once."""

    def newer() -> Loaded | None:
        nonlocal at
        if (folder := link.resolve()) == at:
            return None
        at = folder
        check_folder(folder)
        return _read(folder, target, any_target)

    return newer


def _load_target(target: Target | str, options: LoadOptions, quantization: str, **origin: str | None) -> Target:
    if not isinstance(target, Target):
        return load_target(
            target,
            options.dtype,
            options.device,
            exact=options.exact,
            quantization=quantization,
            trust_remote_code=options.trust_remote_code,
            token=options.token,
            **origin,
        )
    if options.exact != "auto":
        target.exact = options.exact
    return target


def _dtype_name(dtype: Any) -> Any:
    """Return the name of a dtype, which may be torch's own. Raises UserError for anything else."""
    if isinstance(dtype, torch.dtype):
        return dtype_name(dtype)
    if not isinstance(dtype, str):
        raise UserError(f"dtype is {dtype!r}.", "Give a name such as 'bfloat16', or torch.bfloat16.")
    return dtype


def export(
    heads: str | Path,
    out: str | Path,
    format: str,
    target: Target | str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write heads in the format of a serving engine.

    Args:
        heads: a folder of heads, the folder of a run, or a Hub id (user/name).
        format: one of `headstart.servers.names.FormatName`, such as "vllm".
        target: the target or its location, if it is not where the heads expect it.
        dtype: of the weights: "bfloat16" by default, "float16", "float32", and for GGUF files "q8_0".
        trust_remote_code: run Python code that the target brings along, here and in the engines.

    Returns:
        The export, with the command that serves it in each engine.

    Raises:
        UserError: no such heads or format, heads that no engine of the format can serve, or a folder in use.
    """
    stored = None if dtype is None else _dtype_name(dtype)
    return export_for(locate(heads), Path(out), format, target, stored, trust_remote_code)


def import_heads(
    source: str | Path,
    target: Target | str,
    out: str | Path,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """Write a published checkpoint (EAGLE, EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark, Medusa) as a folder of heads.

    Args:
        source: a folder with config.json and safetensors files, or a Hub id (user/name).
        target: the model that the heads were trained on, or its location for `load_target`.
        out: folder to write, for `headstart.load` and `train.start_from`; it is returned.
        dtype: of the target, see `load_target`.
        trust_remote_code: run Python code that the target brings along.

    Raises:
        UserError: no such checkpoint, pickled or damaged files, a variant that headstart has no heads for, or another
            target.
    """
    if not isinstance(target, Target):
        target = load_target(target, _dtype_name(dtype), trust_remote_code=trust_remote_code)
    importing.import_heads(source, target, Path(out), revision)
    return Path(out)
