"""What formats and cards need to know of a target, and what they call heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.exchange.published import Layout, Published

_KINDS = {
    Layout.EAGLE3: "EAGLE-3",
    Layout.EAGLE: "EAGLE-1",
    Layout.MEDUSA: "Medusa",
    Layout.DFLASH: "DFlash",
    Layout.DSPARK: "DSpark",
}


@dataclass(frozen=True)
class TargetFacts:
    """What formats say of a target, or depend on.

    `context` is the target's longest text in tokens, 0 if unknown. `spec` is what `load_target` takes, `folder` what
    transformers loads, or a Hub id: empty where there is none here. `tokens` are special tokens' ids by their name in a
    config; `trust_remote_code` says whether code that comes along with the target may run.
    """

    spec: str
    name: str
    fingerprint: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    folder: str = ""
    gguf: Path | None = None
    architectures: tuple[str, ...] = ()
    tokens: Mapping[str, int] | None = None
    trust_remote_code: bool = False
    context: int = 0


def kind_of(published: Published) -> str:
    """What the arrangement is called in messages."""
    return _KINDS[published.layout]
