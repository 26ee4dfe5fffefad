"""Facts of a target for formats and cards, and display names of layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.heads.exchange.published import Layout, Published
from headstart.model.lm_head import LogitTransform

_KINDS = {
    Layout.EAGLE3: "EAGLE-3",
    Layout.PEAGLE: "P-EAGLE",
    Layout.EAGLE: "EAGLE-1",
    Layout.MEDUSA: "Medusa",
    Layout.DFLASH: "DFlash",
    Layout.DFLASH2: "DFlash 2",
    Layout.DSPARK: "DSpark",
}


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a target that formats record or depend on.

    `context` is in tokens, 0 if unknown. `spec` is for `load_target`, `folder` (or a Hub id) for transformers; both are
    empty if the target is not on this machine. `tokens` are special token ids by config key. `trust_remote_code` allows
    the target's own code to run.
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
    tokens: Mapping[str, int] = field(default_factory=dict)
    trust_remote_code: bool = False
    context: int = 0
    logits: LogitTransform = field(default_factory=LogitTransform)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Chat template variables of the training."""

    @property
    def server_options(self) -> list[str]:
        """Options for the target, the same for vLLM and SGLang."""
        trust = ["--trust-remote-code"] if self.trust_remote_code else []
        return trust + self.template_option("--default-chat-template-kwargs")

    def template_option(self, name: str) -> list[str]:
        return [name, json.dumps(self.chat_template_kwargs)] if self.chat_template_kwargs else []


def kind_of(published: Published) -> str:
    """Return the display name of the layout."""
    return _KINDS[published.layout]
