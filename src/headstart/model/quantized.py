"""Quantise a target's linear layers to 8 or 4 bits with torchao, on a CPU or a GPU.

LM head and embeddings are left alone, since heads read them. transformers loads models that were saved quantised
(bitsandbytes, GPTQ, AWQ ...); GGUF files are dequantised at loading.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import nn

from headstart.errors import UserError, nearest

Quantization = Literal["none", "int8", "int4"]
_GROUP = 32
"""Group size in 4 bits; in 8 bits there is a scale per output."""


def check_quantization(kind: str, device: torch.device) -> None:
    """Refuse an unknown kind, a kind without a benefit on this device, or a missing torchao, before loading."""
    if kind not in get_args(Quantization):
        raise UserError(f"Unknown quantization {kind!r}.", nearest(kind, get_args(Quantization)))
    if kind == "int4" and device.type == "cuda":
        raise UserError(
            "On a GPU, torchao's 4 bits save no memory here: they are unpacked in every forward.",
            "Use int8, or a model that was saved in 4 bits (bitsandbytes, GPTQ, AWQ).",
        )
    if kind != "none" and find_spec("torchao") is None:
        raise UserError("Quantising a target needs the package torchao.", "Run: pip install torchao")


def quantize(model: Any, kind: str) -> None:
    """Quantise a model's linear layers in place.

    Raises:
        UserError: as `check_quantization`, the model is quantised already, or torchao cannot quantise it.
    """
    check_quantization(kind, next(model.parameters()).device)
    if getattr(model, "is_quantized", False):
        raise UserError(
            "The target is quantised already, as it was saved.", "Set target.quantization=none (--quantization none)."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        kind4 = torch.int4  # type: ignore[attr-defined]  # torch has it
        int4 = IntxWeightOnlyConfig(weight_dtype=kind4, granularity=PerGroup(_GROUP))
        lm_head = model.get_output_embeddings()
        chosen = {module for module in model.modules() if isinstance(module, nn.Linear) and module is not lm_head}
        try:
            quantize_(model, Int8WeightOnlyConfig() if kind == "int8" else int4, lambda module, _: module in chosen)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            raise UserError(
                f"torchao cannot put this target into {kind}: {(str(error).splitlines() or ['no reason'])[0]}",
                "Use int8, or a model that was saved quantised.",
            ) from error
