"""Storage format of hidden states: raw, or 8-bit codes with a scale per token; and checksums.

    auto   the target's dtype
    int8   codes -127 to 127, evenly spaced: values far below a token's largest are lost
    fp8    float8_e4m3fn: 4 significant bits, down to a 200,000th of a token's largest value

Shard metadata holds the CRC-32 of every conversation in every tensor. Each is verified once, at its first read (4 GB a
second, faster than most disks).

Shape suffixes: S tokens of one shard, E hidden size.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.errors import UserError
from headstart.support.files import DAMAGED

AUTO = "auto"
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
SCALE_BYTES = 4


def encode(layer: int, states_SE: Tensor, states_dtype: str = AUTO) -> dict[str, Tensor]:
    """Encode a layer's states as a shard's named tensors."""
    if states_dtype == AUTO:
        return {f"states.{layer}": states_SE}
    kind, largest = _CODES[states_dtype]
    exact_SE = states_SE.float()
    scales_S = (exact_SE.abs().amax(-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes_SE = exact_SE / scales_S[:, None]
    codes_SE = codes_SE.round().to(kind) if kind == torch.int8 else codes_SE.to(kind)
    return {f"states.{layer}": codes_SE, f"scales.{layer}": scales_S}


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode codes [..., E] with scales [...]."""
    return (codes.float() * scales[..., None]).to(dtype)


KEY = "checksums"
"""Metadata key of a shard."""
REBUILD = "Build the states again (headstart data build RECIPE): only that shard is computed anew."
UNREADABLE = (SafetensorError, ValueError, KeyError, AttributeError, TypeError)
"""Errors of reading a damaged shard. Not RuntimeError, which running out of memory raises too."""


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def checksums(tensors: Mapping[str, Tensor], lengths: Sequence[int]) -> str:
    """Return the checksums of tensors [S, ...] of concatenated conversations, as JSON for a shard's metadata."""
    return json.dumps(
        {name: list(map(checksum, torch.split(tensor, list(lengths)))) for name, tensor in tensors.items()}
    )


def read_checksums(file: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Read (tokens, checksum) by (tensor, first token) from a shard.

    Raises FileNotFoundError, or one of UNREADABLE for a damaged shard.
    """
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    lengths = json.loads(metadata["lengths"])
    starts = list(accumulate(lengths, initial=0))
    return {
        (name, start): (length, stored)
        for name, sums in json.loads(metadata[KEY]).items()
        for start, length, stored in zip(starts, lengths, sums, strict=False)
    }


def is_intact(file: Path) -> bool:
    """Verify all checksums of a shard."""
    try:
        expected = read_checksums(file)
        with safe_open(file, framework="pt") as handle:
            return all(
                checksum(handle.get_slice(name)[start : start + length]) == stored
                for (name, start), (length, stored) in expected.items()
            )
    except (FileNotFoundError, *UNREADABLE):
        return False


def quarantine(file: Path) -> UserError:
    """Rename a damaged shard, so that the next build recomputes it; return the error to raise."""
    renamed = file.with_name(file.name + DAMAGED)
    with suppress(OSError):  # another process was first, or the folder is read-only
        file.rename(renamed)
    if file.exists():
        return damage_error(file)
    return UserError(f"{damage_error(file).problem} It is kept as {renamed.name}.", REBUILD)


def damage_error(file: Path) -> UserError:
    return UserError(f"{file} is damaged: its checksums do not match.", f"Delete it. {REBUILD}")
