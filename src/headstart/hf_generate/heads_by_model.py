"""A plain transformers model as a target, for the time of one call.

A `Target` freezes its model, puts it in eval mode and hooks its layers. Here the model belongs to somebody else:
all of that is taken back when the call ends, and what was prepared is kept for the next call without keeping the model
alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.api import Decoder, load
from headstart.heads.io import WEIGHTS
from headstart.hub.pull import locate
from headstart.target.model import Target


@contextmanager
def decoder_for(model: Any, heads: str | Path, revision: str | None = None) -> Iterator[Decoder]:
    """A decoder of this model and these heads; the model is as before when the block ends.

    Calls for the same model wait for each other. While the block runs, the model's own `forward` is not to be used.
    """
    prepared = _PREPARED.setdefault(model, _Prepared())
    with prepared.lock, _restored(model):
        decoder = prepared.decoder(model, heads, revision)
        model.eval()
        try:
            yield decoder
        finally:
            decoder.target.release()


@dataclass
class _Prepared:
    """What is ready for one model.

    All heads share a target, with its prepacked weights, for each dtype and device. Decoders are kept by heads,
    revision, dtype and device; with the file of the heads and when it was written, to notice heads that were exported
    again.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)  # one call at a time
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    decoders: dict[tuple[str, str | None, str, str], tuple[Path, int, Decoder]] = field(default_factory=dict)

    def decoder(self, model: Any, heads: str | Path, revision: str | None) -> Decoder:
        weight = model.get_output_embeddings().weight
        local = Path(heads).expanduser()
        name = str(local.resolve()) if local.is_dir() else str(heads)
        kind = str(weight.dtype), str(weight.device)
        key = (name, revision, *kind)
        if key in self.decoders:
            file, written, decoder = self.decoders[key]
            if file.is_file() and file.stat().st_mtime_ns == written:
                return decoder
        folder = locate(heads, revision)
        target = self.targets.get(kind) or Target(model)
        target.model = model
        try:
            decoder = load(folder, target)
        finally:
            target.model = weakref.proxy(model)  # what is kept here must not keep the model
        self.targets[kind] = target
        self.decoders[key] = (folder / WEIGHTS, (folder / WEIGHTS).stat().st_mtime_ns, decoder)
        return decoder


_PREPARED: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Undo everything that wrapping a model as a target and decoding with it changes about it."""
    training = [(module, module.training) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode
        for parameter in learning:
            parameter.requires_grad_(True)
