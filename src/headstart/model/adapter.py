"""Find, hash and merge a target's peft adapter.

A merged adapter has no overhead at decoding. Quantised layers keep it unmerged, as merging would round it away.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from headstart.errors import UserError
from headstart.model.identity import Adapter
from headstart.support.files import read_json
from headstart.support.hub_errors import explained

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
_IRRELEVANT = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type", "auto_mapping"}
"""Config fields that do not affect the adapted model."""


def find_adapter(spec: str, token: str | bool | None = None) -> Path:
    """Resolve a path or a Hub id to a local folder."""
    path = Path(spec).expanduser()
    if not path.is_dir():
        if spec.count("/") != 1 or spec.startswith((".", "/", "~")):
            raise UserError(f"No adapter at {spec}.", "Give a folder that peft saved, or a hub id (user/name).")
        with explained("Cannot fetch the adapter", spec, None):
            path = Path(snapshot_download(spec, token=token, allow_patterns=list(FILES)))
    for name in FILES:
        if not (path / name).is_file():
            raise UserError(
                f"The adapter {spec} has no {name}.", "Give a folder that peft's save_pretrained wrote (safetensors)."
            )
    return path


def read_adapter(spec: str, token: str | bool | None = None) -> Adapter:
    """Hash the weights and the config fields that affect the adapted model."""
    folder = find_adapter(spec, token)
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} holds no settings.", "Fetch or save the adapter again.")
    known = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    digest = hashlib.sha256(json.dumps(_sorted(known), sort_keys=True).encode())
    with (folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return Adapter(spec, digest.hexdigest()[:32])


def apply_adapter(model: Any, spec: str, merge: bool = True, token: str | bool | None = None) -> Any:
    """Merge an adapter into the transformers model in place, or keep it as separate layers without `merge`.

    Raises:
        UserError: prompt-learning adapter, adapter of another model, or one that changes tied embeddings.
    """
    import peft

    folder = find_adapter(spec, token)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            config = peft.PeftConfig.from_pretrained(str(folder))
            if config.is_prompt_learning:
                raise UserError(
                    f"The adapter {spec} is of the kind {config.peft_type.value}, which is no change of weights.",
                    "Use one that can be merged, such as LoRA.",
                )
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
            if missing := [warning for warning in warned if "missing adapter keys" in str(warning.message)]:
                raise ValueError(str(missing[0].message))
            ends = {model.get_input_embeddings(), model.get_output_embeddings()}
            if tied and any(isinstance(end, peft.tuners.tuners_utils.BaseTunerLayer) for end in ends):
                raise UserError(
                    f"The adapter {spec} changes the embeddings or the LM head, which are one matrix in this model.",
                    "Use an adapter that leaves both as they are.",
                )
            return _merged(adapted) if merge else adapted.base_model.model
    except UserError:
        raise
    except Exception as error:  # peft raises many kinds; all mean the same to the user
        raise UserError(
            f"The adapter {spec} does not fit the target: {type(error).__name__}: "
            f"{(str(error).splitlines() or ['no reason'])[0][:200]}",
            "Give the target that it was trained for.",
        ) from error


def _merged(adapted: Any) -> Any:
    """Merge in float32 and round once; peft alone would round the update as well."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in adapted.modules():
        weight = getattr(module.get_base_layer(), "weight", None) if isinstance(module, BaseTunerLayer) else None
        if weight is not None and weight.dtype in (torch.bfloat16, torch.float16):
            dtype = weight.dtype
            weight.data = weight.data.float()
            module.merge(safe_merge=True)
            weight.data = weight.data.to(dtype)
    return adapted.merge_and_unload(safe_merge=True)


def _sorted(value: Any) -> Any:
    """Sort lists in JSON values: peft saves sets in arbitrary order."""
    if isinstance(value, dict):
        return {key: _sorted(inner) for key, inner in value.items()}
    return sorted(map(_sorted, value), key=json.dumps) if isinstance(value, list) else value
