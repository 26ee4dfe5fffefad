"""Folders that SGLang loads, where it reads other ones than vLLM; and what it cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headstart.errors import UserError
from headstart.heads.exchange.published import EMBEDDINGS, Layout, Published
from headstart.hub.engines.base import TargetFacts, drafts_of, kind_of
from headstart.hub.engines.checkpoint import Checkpoint
from headstart.hub.engines.folder import FolderFormat
from headstart.hub.engines.huggingface import files_for, write_files
from headstart.hub.engines.rules import sglang_lacks

_EAGLE = "LlamaForCausalLMEagle"
"""What EAGLE-1 heads are called."""


class Sglang(FolderFormat):
    """config.json and model.safetensors for SGLang; of EAGLE-3 and DFlash heads the same as vLLM's."""

    name = "sglang"
    engines = ("sglang",)

    def check_heads(self, published: Published, facts: TargetFacts) -> list[str]:
        if (why := why_not_sglang(published, facts)) is not None:
            raise UserError(f"SGLang cannot serve these {kind_of(published)} heads: {why}.", _instead(published))
        return []

    def as_held(self, published: Published) -> Published:
        """SGLang takes the target's embeddings, and adds the joining map's bias."""
        tensors = {name: tensor for name, tensor in published.tensors.items() if name != EMBEDDINGS}
        return published.with_tensors(tensors)

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        write_files(folder, *files_for(self.as_held(published), facts, dtype, _EAGLE))

    def knows(self, checkpoint: Checkpoint) -> bool:
        return is_for_sglang_alone(checkpoint)

    def commands(
        self, folder: Path | str, published: Published, facts: TargetFacts, drafts: Mapping[str, int]
    ) -> dict[str, list[str]]:
        return {"sglang": sglang_command(folder, published, facts, drafts.get("sglang", 0))}


def is_for_sglang_alone(checkpoint: Checkpoint) -> bool:
    """Whether the folder names heads as SGLang knows them and vLLM does not."""
    return checkpoint.config.get("architectures") == [_EAGLE]


def why_not_sglang(published: Published, facts: TargetFacts) -> str | None:
    """Why SGLang would draft with other numbers than were trained; None where it would not."""
    if published.layout is Layout.MEDUSA:
        return "it has no Medusa heads"
    if published.layer is not None and published.layer.hidden_act != "silu":
        return f"it computes silu alone, and the MLP uses {published.layer.hidden_act}"
    if published.layout is Layout.EAGLE:
        if EMBEDDINGS in published.tensors and published.normed_embeddings:
            return "it takes the target's embeddings as they are (heads.embedding_norm=false)"
        return None
    if published.layout is Layout.DSPARK:
        return "headstart knows of no SGLang that serves DSpark heads as it writes them"
    if published.layout is Layout.DFLASH:
        return None
    for reason in sglang_lacks(published):
        return reason
    if max(published.aux_layers) >= facts.num_layers:
        deepest = facts.num_layers - 1
        return f"it gives no layer after {deepest} of {facts.name}, and the heads read {list(published.aux_layers)}"
    return None


def sglang_command(folder: Path | str, published: Published, facts: TargetFacts, drafts: int = 0) -> list[str]:
    """The command that serves target and heads with SGLang; it counts the root among the draft tokens."""
    steps = drafts_of(published, drafts)
    if published.layout is Layout.DFLASH:
        return [
            *("python", "-m", "sglang.launch_server", "--model-path", facts.folder or "TARGET"),
            *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder)),
            *("--speculative-num-draft-tokens", str(steps + 1)),
        ]
    algorithm = "EAGLE3" if published.layout is Layout.EAGLE3 else "EAGLE"
    return [
        *("python", "-m", "sglang.launch_server", "--model-path", facts.folder or "TARGET"),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(steps + 1)),
    ]


def _instead(published: Published) -> str:
    if published.layout is Layout.MEDUSA:
        return "Export them with --format vllm (up to 0.32), or train eagle3 heads."
    if published.layout is Layout.DSPARK:
        return "Export them with --format gguf for llama.cpp or --format vllm, or train dflash heads."
    return "Export them with --format vllm, or train them without that."
