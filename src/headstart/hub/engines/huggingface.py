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
from headstart.heads.exchange.published import BLOCKS, EMBEDDINGS, LM_HEAD, Layout, Published, digest
from headstart.hub.engines.base import DTYPES, NOTE, TargetFacts
from headstart.hub.engines.checkpoint import CONFIG, offsets
from headstart.hub.engines.reading import DFLASH, DSPARK
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


def layers_config(published: Published, facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """The keys of a Llama that has only the heads' layers, of a Qwen3 for block drafters, whatever the target is.

    Rotary positions come in both spellings that are in use.
    """
    layer = published.layer
    assert layer is not None, "these heads have decoder layers"
    rope = dict(layer.rope_parameters)
    kind = rope.get("rope_type", "default")
    scaling = None if kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    config = {
        "model_type": "qwen3" if published.layout in BLOCKS else "llama",
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
    if published.layout in BLOCKS:
        full = ["full_attention"] * published.num_layers
        config |= {"layer_types": full, "use_sliding_window": False, "sliding_window": None}
    return config


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
    held = rounded(published, dtype)
    tensors = dict(held.tensors)
    match published.layout:
        case Layout.EAGLE3:
            config = {
                "architectures": ["LlamaForCausalLMEagle3"],
                **layers_config(published, facts, dtype),
                **eagle3_keys(published),
                "eagle_aux_hidden_state_layer_ids": list(published.aux_layers),
                "num_aux_hidden_states": len(published.aux_layers),
                "eagle_config": {
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": _outputs(published),
                },
            }
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
            tensors |= vocabulary_map(published)
        case Layout.EAGLE:
            config = {"architectures": [eagle_architecture], **layers_config(published, facts, dtype)}
        case Layout.DFLASH | Layout.DSPARK:
            # As the kinds were first published; embeddings and LM head are the target's.
            reads = {"mask_token_id": published.mask_token_id, "target_layer_ids": _outputs(published)}
            config = layers_config(published, facts, dtype)
            if published.layout is Layout.DFLASH:
                config |= {"architectures": [DFLASH], "dflash_config": reads}
            else:
                config |= {"architectures": [DSPARK], **reads, "sample_from_anchor": True, **markov_keys(published)}
            config |= {"block_size": published.block_size, "num_target_layers": facts.num_layers}
        case Layout.MEDUSA:
            config = _medusa_config(published, dtype)
            if LM_HEAD in tensors:
                tensors["lm_heads.0.weight"] = tensors.pop(LM_HEAD)
    return {**config, NOTE: note(held, facts)}, tensors


def _outputs(published: Published) -> list[int]:
    """The aux layers as layers' outputs from 0 on."""
    return [layer - 1 for layer in published.aux_layers]


def _medusa_config(published: Published, dtype: str) -> dict[str, Any]:
    """As vLLM up to 0.32 reads it.

    No key with "num" and "heads" in its name but `num_heads`, and none with "num" and "layers" but
    `num_hidden_layers`: vLLM renames all of them to these two.
    """
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": published.hidden_size,
        "vocab_size": published.vocab_size,
        "truncated_vocab_size": published.draft_width,
        "num_heads": published.steps,
        "num_hidden_layers": published.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": LM_HEAD in published.tensors,
        "torch_dtype": dtype,
    }


def markov_keys(published: Published) -> dict[str, Any]:
    """What DSpark adds to DFlash."""
    return {
        "markov_rank": published.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": published.confidence,
        "confidence_head_with_markov": published.confidence,
    }


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
    embeddings_VE = tensors[EMBEDDINGS]
    missing = (map_EE @ added_E - bias_E.double()).norm() / bias_E.double().norm()
    if missing > 1e-6 or added_E.abs().max() > 16 * embeddings_VE.abs().max():
        raise UserError(
            "vLLM does not add the bias of an EAGLE-1 head's joining map, and these heads' embeddings cannot hold it.",
            "Train eagle3 heads for vLLM.",
        )
    return published.with_tensors({**tensors, EMBEDDINGS: embeddings_VE + added_E.to(embeddings_VE)})


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and model.safetensors; the folder is there."""
    write_json(folder / CONFIG, config)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
