"""config.json and model.safetensors of block drafters, for vLLM, SGLang, llama.cpp's converter and speculators.

Layer ids: our aux layers index transformers' `hidden_states`, and so do `aux_hidden_state_layer_ids` in the config of
speculators. `target_layer_ids` count layers' outputs from 0: one less.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.heads.exchange.published import Layout, Published
from headstart.hub.engines.base import NOTE, TargetFacts
from headstart.hub.engines.huggingface import llama_config, note, rounded

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
"""What engines call the two kinds."""
SPECULATORS = {Layout.DFLASH: "DFlashSpeculator", Layout.DSPARK: "DSparkSpeculator"}
"""What the speculators library calls them."""


def block_files(published: Published, facts: TargetFacts, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors as the kinds were first published; embeddings and LM head are the target's."""
    held = rounded(published, dtype)
    of_target = {"mask_token_id": published.mask_token_id, "target_layer_ids": target_layer_ids(published)}
    if published.layout is Layout.DFLASH:
        own: dict[str, Any] = {"architectures": [DFLASH], "dflash_config": of_target}
    else:
        own = {"architectures": [DSPARK], **of_target, "sample_from_anchor": True, **_markov_keys(published)}
    config = {
        **qwen3_config(published, facts, dtype),
        **own,
        "block_size": published.block_size,
        "num_target_layers": facts.num_layers,
        NOTE: note(held, facts),
    }
    return config, dict(held.tensors)


def speculators_keys(published: Published, facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """What the config of the speculators library says of these heads.

    `sliding_window_non_causal` is about sliding layers, and there are none; but vLLM takes false for all layers, and
    lets no slot of a block see those after it.
    """
    markov = _markov_keys(published) if published.layout is Layout.DSPARK else {}
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
        **markov,
        "transformer_layer_config": qwen3_config(published, facts, dtype),
    }


def qwen3_config(published: Published, facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """The keys of a Qwen3 that has only the heads' layers, whatever the target is."""
    assert published.layer is not None, "these heads have decoder layers"
    return {
        **llama_config(published, published.layer, facts, dtype),
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * published.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def target_layer_ids(published: Published) -> list[int]:
    """The aux layers as layers' outputs from 0 on."""
    return [layer - 1 for layer in published.aux_layers]


def _markov_keys(published: Published) -> dict[str, Any]:
    return {
        "markov_rank": published.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": published.confidence,
        "confidence_head_with_markov": published.confidence,
    }
