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
    **options: Unpack[LoadKeywords],
) -> Decoder:
    """Load heads and the model they belong to.

    Args:
        heads: a folder of heads, the folder of a run, a Hub id (user/name), or, with a target, a folder of published
            heads (see `import_heads`); None for a target alone, with drafters that need no heads, such as "mtp" (the
            multi-token-prediction module of its own checkpoint).
        target: a loaded model (by `load_target`, or by transformers with `tokenizer`; it is frozen and put in eval
            mode), or its location for `load_target` if the heads name another one. Adapters come with the heads.
        **options: see `headstart.hub.options.LoadOptions`; dtype may be torch's own, such as torch.bfloat16.

    Raises:
        UserError: missing heads, truncated files, a target that cannot be loaded or that the heads do not belong to.
    """
    check_names(options, LoadKeywords.__annotations__)
    if not isinstance(heads, str | Path | None):
        raise UserError(f"heads is of the type {type(heads).__name__}.", "Pass a folder of heads, a run or a Hub id.")
    if not isinstance(target, Target | PreTrainedModel | str | Path | None):
        raise UserError(
            f"target is of the type {type(target).__name__}.",
            "Give a model that transformers loaded, what load_target returns, a folder or a hub id.",
        )
    target = str(target) if isinstance(target, Path) else target
    asked = LoadOptions(**options)
    asked = replace(asked, dtype=_dtype_name(asked.dtype))
    fixed = (asked.dtype, asked.device, asked.quantization) != ("auto", "auto", None)
    if fixed and isinstance(target, Target | PreTrainedModel):
        raise UserError(
            "dtype, device and quantization cannot be changed: the target is already loaded.",
            "Load it with them, or give headstart.load the target's name.",
        )
    if isinstance(target, PreTrainedModel):
        target = Target(target, asked.tokenizer, exact=asked.exact)
    elif asked.tokenizer is not None:
        raise UserError("tokenizer belongs to a target that transformers loaded.", "Give the model as target, too.")
    if heads is None:
        if target is None:
            raise UserError("Neither heads nor a target was given.", "Name a folder of heads, or give target=.")
        plain = Decoder(_loaded(target, asked, asked.quantization or "none", revision=asked.revision))
        return _logging(plain, asked.log)
    if target is not None and is_published(Path(heads).expanduser()):
        loaded = _loaded(target, asked, asked.quantization or "none")
        with TemporaryDirectory(prefix="headstart-") as place:
            importing.import_heads(Path(heads).expanduser(), loaded, Path(place) / "heads")
            return _logging(Decoder(loaded, *_read(Path(place) / "heads", loaded)), asked.log)
    folder = locate(heads, asked.revision, asked.token)
    check_folder(folder)
    known = heads_target(folder)
    adapter = None if target and asked.any_target else known.adapter_spec(folder)
    if target is None and (not known.spec or (Path(known.spec).is_absolute() and not Path(known.spec).exists())):
        raise UserError(
            f"The heads in {folder} belong to {known.name}, which is not on this machine.",
            f"Say where {known.name} is: a folder or a hub id as target.",
        )
    loaded = _loaded(target or known.spec, asked, asked.quantization or known.quantization, adapter=adapter)
    version = folder.resolve()
    decoder = Decoder(known.with_variables(loaded), *_read(version, loaded, asked.any_target))
    if asked.follow:
        decoder.newer = _follower(folder, version, decoder.target, asked.any_target)
    return _logging(decoder, asked.log)


def _read(folder: Path, target: Target, any_target: bool = False) -> Loaded:
    """Read a folder of heads as arguments of `Decoder`."""
    answers = folder / ANSWERS
    return *read_heads(folder, target, any_target), answers if answers.is_file() else None


def _logging(decoder: Decoder, log: RequestLog | str | Path | None) -> Decoder:
    """Attach a log to the decoder, if given."""
    decoder.log = RequestLog(log) if isinstance(log, str | Path) else log
    return decoder


def _follower(link: Path, at: Path, target: Target, any_target: bool) -> Callable[[], Loaded | None]:
    """Make a function that reads the heads of a link when its target has changed; each target is tried once."""

    def newer() -> Loaded | None:
        nonlocal at
        if (now := link.resolve()) == at:
            return None
        at = now
        check_folder(now)
        return _read(now, target, any_target)

    return newer


def _loaded(target: Target | str, asked: LoadOptions, quantization: str, **origin: str | None) -> Target:
    if not isinstance(target, Target):
        return load_target(
            target,
            asked.dtype,
            asked.device,
            exact=asked.exact,
            quantization=quantization,
            trust_remote_code=asked.trust_remote_code,
            token=asked.token,
            **origin,
        )
    if asked.exact != "auto":
        target.exact = asked.exact
    return target


def _dtype_name(dtype: Any) -> Any:
    """The name of a dtype, which may be torch's own; a UserError for anything else."""
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
    """Write a published EAGLE, EAGLE-3, DFlash, DSpark or Medusa checkpoint as a folder of headstart heads.

    Args:
        source: a folder with config.json and safetensors files, or a Hub id (user/name).
        target: the model that the heads were trained on, or what `load_target` takes.
        out: folder to write, for `headstart.load` and `train.start_from`; it is returned.
        dtype: of the target while it is read, see `load_target`.
        trust_remote_code: run Python code that the target brings along.

    Raises:
        UserError: no such checkpoint, pickled or damaged files, a variant that headstart has no heads for, or another
            target.
    """
    if not isinstance(target, Target):
        target = load_target(target, _dtype_name(dtype), trust_remote_code=trust_remote_code)
    importing.import_heads(source, target, Path(out), revision)
    return Path(out)
