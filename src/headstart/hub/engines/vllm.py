"""Folders that vLLM loads, and SGLang too where it knows the same heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Layout, Published
from headstart.hub.engines.base import TargetFacts, drafts_of, refuse_activation
from headstart.hub.engines.checkpoint import Checkpoint
from headstart.hub.engines.folder import FolderFormat
from headstart.hub.engines.huggingface import files_for, without_bias, write_files
from headstart.hub.engines.sglang import is_for_sglang_alone, sglang_command, why_not_sglang

_SHARED = (Layout.EAGLE3, Layout.DFLASH)
"""Of which one folder serves vLLM and SGLang."""
_ON_GPUS = (
    "vLLM drafts with DSpark heads on GPUs alone (V2 model runner), and they cannot be served as DFlash, whose slots "
    "draft their own places and not the next ones: on a CPU serve them with llama.cpp (--format gguf)."
)


class Vllm(FolderFormat):
    """config.json and model.safetensors for vLLM."""

    name = "vllm"
    engines = ("vllm", "sglang")

    def check_heads(self, published: Published, facts: TargetFacts) -> list[str]:
        refuse_activation(published, "vLLM")
        if published.layout is Layout.MEDUSA and published.draft_ids_D is not None:
            raise UserError(
                "vLLM 0.32 stops at Medusa heads with a reduced vocabulary: it reads token_map and then misses it.",
                "Train with heads.draft_vocab_size=0 heads.shared_lm_head=true.",
            )
        if published.layout is Layout.DSPARK and not published.markov_rank:
            raise UserError(
                "vLLM knows DSpark heads by their Markov head, and these have none (heads.markov_rank=0).",
                "Train dflash heads, or with a heads.markov_rank.",
            )
        if published.layout is Layout.EAGLE:
            without_bias(published)
        if (why := why_not_sglang(published, facts)) is None and published.layout not in _SHARED:
            why = "it has another format for such heads (--format sglang)"
        remarks = [] if why is None else [f"SGLang cannot serve this folder: {why}."]
        if published.layout is Layout.MEDUSA:
            remarks.append("vLLM reads Medusa heads up to version 0.32.")
        return remarks + self.remarks(published, "vllm")

    def remarks(self, published: Published, engine: str) -> list[str]:
        return block_remarks(published) if engine == "vllm" else []

    def as_held(self, published: Published) -> Published:
        return without_bias(published) if published.layout is Layout.EAGLE else published

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        write_files(folder, *files_for(self.as_held(published), facts, dtype, "LlamaForCausalLM"))

    def knows(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.is_speculators and not is_for_sglang_alone(checkpoint)

    def commands(
        self, folder: Path | str, published: Published, facts: TargetFacts, drafts: Mapping[str, int]
    ) -> dict[str, list[str]]:
        commands = {"vllm": vllm_command(folder, published, facts, drafts.get("vllm", 0))}
        if published.layout in _SHARED and why_not_sglang(published, facts) is None:
            commands["sglang"] = sglang_command(folder, published, facts, drafts.get("sglang", 0))
        return commands


def block_remarks(published: Published) -> list[str]:
    """What vLLM does not do with block drafters on a CPU.

    There the kernel that norms the keys of the text, for all layers at once, takes the first layer's weights for all.
    """
    if published.layout not in BLOCKS:
        return []
    remarks = [_ON_GPUS] if published.layout is Layout.DSPARK else []
    first, *others = (
        published.tensors[f"layers.{number}.self_attn.k_norm.weight"] for number in range(published.num_layers)
    )
    if any(not other.equal(first) for other in others):
        remarks.append(
            "vLLM's CPU build norms the text's keys in every layer with the k_norm of the first, and accepts fewer "
            "drafts; its GPU builds do not. For a CPU train with heads.num_layers=1, or serve these with llama.cpp."
        )
    return remarks


def vllm_command(folder: Path | str, published: Published, facts: TargetFacts, drafts: int = 0) -> list[str]:
    """The command that serves target and heads with vLLM."""
    count = drafts_of(published, drafts or (published.steps if published.layout is Layout.MEDUSA else 0))
    asked = {"method": str(published.layout), "model": str(folder), "num_speculative_tokens": count}
    return ["vllm", "serve", facts.folder or "TARGET", "--speculative-config", json.dumps(asked)]
