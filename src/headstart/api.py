"""What Python programs call: `headstart.load`, `headstart.export` and `headstart.import_heads`."""

from __future__ import annotations

from pathlib import Path

from headstart.decode.options import DecodeOptions as DecodeOptions
from headstart.decoder import Decoder as Decoder
from headstart.errors import UserError
from headstart.hub.engines import importing
from headstart.hub.engines.export import Exported as Exported
from headstart.hub.engines.export import export_for
from headstart.hub.format import check_folder, heads_target, read_heads
from headstart.hub.pull import locate
from headstart.streaming import Answer as Answer
from headstart.streaming import Stream as Stream
from headstart.target.loading import load_target
from headstart.target.model import Exact, Target


def load(
    heads: str | Path | None = None,
    target: Target | str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    any_target: bool = False,
    exact: Exact = "auto",
    quantization: str | None = None,
) -> Decoder:
    """Load heads and the model they belong to.

    Args:
        heads: a folder of heads, the folder of a run, or a Hub id (user/name); None for a target alone, with drafters
            that need no heads, such as "mtp" for the multi-token-prediction modules of its own checkpoint.
        target: the model, when it is loaded already or lies elsewhere than the heads say (then what `load_target`
            takes). By default the one that the heads name is loaded. The adapter of a target comes with the heads.
        revision: branch, tag or commit of the heads, when they come from the Hub.
        dtype: of the model and the heads, see `load_target`; a model that is loaded already keeps its own.
        device: likewise.
        any_target: take a target that does not look like the one the heads were trained on, if its sizes fit; the
            text stays the target's own, and fewer drafts may be accepted.
        exact: with "bits" the logits with drafts are, bit for bit, those without, so greedy text is the same; with
            "tokens", which "auto" takes, they are the same up to rounding, and in bfloat16 and float16 near-ties may
            turn out otherwise. See `Target.exact`. A model that is loaded already keeps its own setting unless this is
            given.
        quantization: "int8" or "int4" puts the linear layers of the model into so many bits (with torchao), "none"
            leaves them; by default as for the heads' target when they were exported or tuned. Heads fit both: the text
            is the quantised model's own. A model that is loaded already stays as it is.

    Raises:
        UserError: no such heads, files that are cut short, a target that cannot be loaded, or one that the heads were
            not trained on.
    """
    if isinstance(target, Target) and (dtype, device, quantization) != ("auto", "auto", None):
        raise UserError(
            "dtype, device and quantization are those of the target, and it is loaded already.",
            "Give them to load_target, or give headstart.load the target's name instead of a Target.",
        )
    if heads is None:
        if target is None:
            raise UserError("Neither heads nor a target are named.", "Name a folder of heads, or give target=.")
        if not isinstance(target, Target):
            target = load_target(target, dtype, device, revision, exact=exact, quantization=quantization or "none")
        elif exact != "auto":
            target.exact = exact
        return Decoder(target)
    folder = locate(heads, revision)
    check_folder(folder)
    if not isinstance(target, Target):
        known = heads_target(folder)
        adapter = None if target and any_target else known.adapter_spec(folder)
        bits = known.quantization if quantization is None else quantization
        named = target or _named_target(folder)
        target = load_target(named, dtype, device, exact=exact, adapter=adapter, quantization=bits)
    elif exact != "auto":
        target.exact = exact
    return Decoder(target, *read_heads(folder, target, any_target))


def export(
    heads: str | Path, out: str | Path, format: str, target: Target | str | None = None, dtype: str | None = None
) -> Exported:
    """Write heads as a serving engine loads them.

    Args:
        heads: a folder of heads, the folder of a run, or a Hub id (user/name).
        out: folder to write.
        format: "vllm", "sglang", "speculators" or "gguf".
        target: where the target is, when it is not where the heads say, or the loaded target.
        dtype: of the weights: "bfloat16" by default, "float16", "float32", and for GGUF files "q8_0".

    Returns:
        What was written, with the command that serves it in each engine.

    Raises:
        UserError: no such heads or format, heads that no engine of the format can serve, or a folder in use.
    """
    return export_for(locate(heads), Path(out), format, target=target, dtype=dtype)


def import_heads(
    source: str | Path, target: Target | str, out: str | Path, revision: str | None = None, dtype: str = "auto"
) -> Path:
    """Write a published EAGLE, EAGLE-3, DFlash, DSpark or Medusa checkpoint as a folder of heads of ours.

    Args:
        source: a folder with config.json and safetensors files, or a Hub id (user/name).
        target: the model that the heads were trained on, or what `load_target` takes.
        out: folder to write, for `headstart.load` and `train.start_from`.
        revision: branch, tag or commit of a Hub id.
        dtype: of the target while it is read, see `load_target`.

    Returns:
        The folder.

    Raises:
        UserError: no such checkpoint, pickled or damaged files, a variant that headstart has no heads for, or another
            target.
    """
    known = target if isinstance(target, Target) else load_target(target, dtype)
    importing.import_heads(source, known, Path(out), revision)
    return Path(out)


def _named_target(folder: Path) -> str:
    """What to load for heads that name their target."""
    known = heads_target(folder)
    spec, name = known.spec, known.name
    if not spec or (Path(spec).is_absolute() and not Path(spec).exists()):
        raise UserError(
            f"The heads in {folder} belong to {name}, and {spec or 'where it lies'} is not on this machine.",
            f"Say where {name} is: a folder or a hub id as target.",
        )
    return spec
