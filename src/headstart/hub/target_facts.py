"""What formats and cards need to know of a target, and what they call heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the heads were trained with."""

    @property
    def server_options(self) -> list[str]:
        """Options that vLLM and SGLang serve the target with; both call them the same."""
        trust = ["--trust-remote-code"] if self.trust_remote_code else []
        return trust + self.template_option("--default-chat-template-kwargs")

    def template_option(self, name: str) -> list[str]:
        return [name, json.dumps(self.chat_template_kwargs)] if self.chat_template_kwargs else []


def kind_of(published: Published) -> str:
    """What the arrangement is called in messages."""
    return _KINDS[published.layout]
