"""config.json and model.safetensors of heads for engines that read Hugging Face folders: vLLM and SGLang.

Layer ids: our aux layers index transformers' `hidden_states`. vLLM and llama.cpp count so too, and read the ids at the
top of the config, and so does `aux_hidden_state_layer_ids` of speculators. SGLang reads those nested in `eagle_config`
alone, and counts layers' outputs from 0: one less. So do the `target_layer_ids` of block drafters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import headstart
from headstart.errors import UserError
from headstart.heads.exchange.published import LayerSizes, Layout, Published, digest
from headstart.hub.engines.base import DTYPES, NOTE, TargetFacts
from headstart.hub.engines.checkpoint import CONFIG, offsets
from headstart.hub.engines.reading import DFLASH, DSPARK, SPECULATORS
from headstart.support.files import write_json

WEIGHTS = "model.safetensors"


def rounded(published: Published, dtype: str) -> Published:
    """The heads in the numbers that a file of this dtype holds."""
    return published.with_tensors({name: tensor.to(DTYPES[dtype]) for name, tensor in published.tensors.items()})


def note(published: Published, facts: TargetFacts) -> dict[str, Any]:
    """What a file says of itself, see `Written`."""
    return {
        "version": headstart.__version__,
        "digest": digest(published),
        "steps": published.steps,
        "target": {
            "name": facts.name,
            "fingerprint": facts.fingerprint,
            "model_type": facts.model_type,
            "num_layers": facts.num_layers,
        },
    }


def llama_config(published: Published, layer: LayerSizes, facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """The keys of a Llama that has only the heads' layers; rotary positions in both spellings that are in use."""
    rope = dict(layer.rope_parameters)
    kind = rope.get("rope_type", "default")
    scaling = None if kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": published.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": published.num_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": {"rope_type": kind, **rope},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": published.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **(facts.tokens or {}),
    }


def layer_ids(aux_layers: tuple[int, ...]) -> dict[str, Any]:
    """The aux layers in the two countings, see the module's docstring."""
    return {
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        "num_aux_hidden_states": len(aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_layers],
        },
    }


def vocabulary_map(published: Published) -> dict[str, Tensor]:
    """`d2t` (offsets) and `t2d` (which tokens are drafted) of a reduced vocabulary."""
    if published.draft_ids_D is None:
        return {}
    drafted = torch.zeros(published.vocab_size, dtype=torch.bool)
    drafted[published.draft_ids_D] = True
    return {"d2t": offsets(published.draft_ids_D), "t2d": drafted}


def eagle3_keys(published: Published) -> dict[str, Any]:
    """What the arrangement of EAGLE-3 heads is, in the words of every config that holds them."""
    return {
        "draft_vocab_size": published.draft_width,
        "target_hidden_size": published.hidden_size,
        "norm_before_residual": published.norm_before_residual,
        "norm_before_fc": published.norm_before_fc,
        "fc_norm": published.aux_norms,
        "norm_output": published.norm_output,
    }


def files_for(
    published: Published, facts: TargetFacts, dtype: str, eagle_architecture: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors for vLLM and SGLang, which know EAGLE-1 heads by architectures of their own."""
    match published.layout:
        case Layout.EAGLE3:
            return _eagle3_files(published, facts, dtype)
        case Layout.EAGLE:
            return _eagle_files(published, facts, dtype, eagle_architecture)
        case Layout.DFLASH | Layout.DSPARK:
            return _block_files(published, facts, dtype)
        case Layout.MEDUSA:
            return _medusa_files(published, facts, dtype)


def _eagle3_files(published: Published, facts: TargetFacts, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    assert published.layer is not None, "these heads have decoder layers"
    held = rounded(published, dtype)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_config(published, published.layer, facts, dtype),
        **eagle3_keys(published),
        **layer_ids(published.aux_layers),
        NOTE: note(held, facts),
    }
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in held.tensors.items()}
    return config, {**tensors, **vocabulary_map(published)}


def _eagle_files(
    published: Published, facts: TargetFacts, dtype: str, architecture: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    assert published.layer is not None, "these heads have decoder layers"
    held = rounded(published, dtype)
    config = {
        "architectures": [architecture],
        **llama_config(published, published.layer, facts, dtype),
        NOTE: note(held, facts),
    }
    return config, dict(held.tensors)


def without_bias(published: Published) -> Published:
    """The same heads without the joining map's bias, which goes into embeddings of their own.

    What is added to every embedding is what the map turns into the bias.

    Raises:
        UserError: the map does not give it back.
    """
    tensors = dict(published.tensors)
    bias_E = tensors.pop("fc.bias", None)
    if bias_E is None or not bias_E.any():
        return published.with_tensors(tensors)
    map_EE = tensors["fc.weight"][:, : published.hidden_size].double()
    added_E = torch.linalg.lstsq(map_EE, bias_E.double()[:, None], driver="gelsd").solution[:, 0]
    embeddings_VE = tensors["embed_tokens.weight"]
    missing = (map_EE @ added_E - bias_E.double()).norm() / bias_E.double().norm()
    if missing > 1e-6 or added_E.abs().max() > 16 * embeddings_VE.abs().max():
        raise UserError(
            "vLLM does not add the bias of an EAGLE-1 head's joining map, and these heads' embeddings cannot hold it.",
            "Train eagle3 heads for vLLM.",
        )
    return published.with_tensors({**tensors, "embed_tokens.weight": embeddings_VE + added_E.to(embeddings_VE)})


def _medusa_files(published: Published, facts: TargetFacts, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As vLLM up to 0.32 reads them.

    No key with "num" and "heads" in its name but `num_heads`, and none with "num" and "layers" but
    `num_hidden_layers`: vLLM renames all of them to these two.
    """
    held = rounded(published, dtype)
    shared = "lm_head.weight" in published.tensors
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": published.hidden_size,
        "vocab_size": published.vocab_size,
        "truncated_vocab_size": published.draft_width,
        "num_heads": published.steps,
        "num_hidden_layers": published.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "torch_dtype": dtype,
        NOTE: note(held, facts),
    }
    tensors = dict(held.tensors)
    if shared:
        tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    return config, tensors


def _block_files(published: Published, facts: TargetFacts, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors as the kinds were first published; embeddings and LM head are the target's."""
    held = rounded(published, dtype)
    of_target = {"mask_token_id": published.mask_token_id, "target_layer_ids": target_layer_ids(published)}
    if published.layout is Layout.DFLASH:
        of_kind: dict[str, Any] = {"architectures": [DFLASH], "dflash_config": of_target}
    else:
        of_kind = {"architectures": [DSPARK], **of_target, "sample_from_anchor": True, **_markov_keys(published)}
    config = {
        **qwen3_config(published, facts, dtype),
        **of_kind,
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


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and model.safetensors; the folder is there."""
    write_json(folder / CONFIG, config)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
