"""Folders of the speculators library, which vLLM loads too: `vllm serve FOLDER` takes the target from the config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Layout, Published
from headstart.hub.engines.base import NOTE, TargetFacts, drafts_of, kind_of, refuse_activation
from headstart.hub.engines.checkpoint import Checkpoint
from headstart.hub.engines.folder import FolderFormat
from headstart.hub.engines.huggingface import (
    eagle3_keys,
    layers_config,
    markov_keys,
    note,
    rounded,
    vocabulary_map,
    write_files,
)
from headstart.hub.engines.reading import SPECULATORS
from headstart.hub.engines.vllm import block_remarks, vllm_command

_VERSION = "0.9.0"
"""Of the library whose config this is."""


class Speculators(FolderFormat):
    """config.json and model.safetensors as speculators writes them."""

    name = "speculators"
    engines = ("speculators", "vllm")

    def holds_embeddings(self, published: Published) -> bool:
        # The library's EAGLE-3 class fills embeddings that a file lacks with zeros, whatever the target has; block
        # drafters take them from the verifier.
        return published.layout is Layout.EAGLE3

    def check_heads(self, published: Published, facts: TargetFacts) -> list[str]:
        if published.layout is not Layout.EAGLE3 and published.layout not in BLOCKS:
            raise UserError(
                "The speculators format has EAGLE-3 heads and block drafters, and these are "
                f"{kind_of(published)} heads.",
                "Export them with --format vllm.",
            )
        refuse_activation(published, "vLLM")
        if published.layout in BLOCKS:
            return block_remarks(published)
        if len(published.aux_layers) != 3:
            raise UserError(
                f"vLLM fuses 3 layers of heads in the speculators format, and these read {len(published.aux_layers)}.",
                "Export them with --format vllm.",
            )
        return []

    def remarks(self, published: Published, engine: str) -> list[str]:
        return block_remarks(published) if engine == "vllm" else []

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        held = rounded(published, dtype)
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": drafts_of(published),
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config: dict[str, Any] = {
            **(_block_keys(published) if published.layout in BLOCKS else _eagle3_keys(published)),
            "transformer_layer_config": layers_config(published, facts, dtype),
            "speculators_version": _VERSION,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "speculators_config": {
                "algorithm": str(published.layout),
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": facts.folder, "architectures": list(facts.architectures)},
            },
            NOTE: note(held, facts),
        }
        write_files(folder, config, {**held.tensors, **vocabulary_map(published)})

    def knows(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.is_speculators

    def commands(
        self, folder: Path | str, published: Published, facts: TargetFacts, drafts: Mapping[str, int]
    ) -> dict[str, list[str]]:
        return {"vllm": vllm_command(folder, published, facts, drafts.get("vllm", 0))}


def _eagle3_keys(published: Published) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **eagle3_keys(published),
        "eagle_aux_hidden_state_layer_ids": list(published.aux_layers),
        "embed_requires_grad": False,
    }


def _block_keys(published: Published) -> dict[str, Any]:
    """`sliding_window_non_causal` is about sliding layers, and there are none; but vLLM takes false for all layers, and
    lets no slot of a block see those after it.
    """
    return {
        "architectures": [SPECULATORS[published.layout]],
        "speculators_model_type": str(published.layout),
        "aux_hidden_state_layer_ids": list(published.aux_layers),
        "block_size": published.block_size,
        "draft_vocab_size": published.vocab_size,
        "mask_token_id": published.mask_token_id,
        "sample_from_anchor": published.layout is Layout.DSPARK,
        "sliding_window_non_causal": True,
        "target_hidden_size": published.hidden_size,
        **(markov_keys(published) if published.layout is Layout.DSPARK else {}),
    }
