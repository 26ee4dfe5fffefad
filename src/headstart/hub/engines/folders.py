"""Folders of config.json and model.safetensors, for vLLM, SGLang and the speculators library.

Layer ids: our aux layers index transformers' `hidden_states`. So do the top-level ids of vLLM and llama.cpp, and
`aux_hidden_state_layer_ids` of speculators. SGLang's ids in `eagle_config` and the `target_layer_ids` of block drafters
count layer outputs from 0: one less.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import (
    BLOCKS,
    DFLASH2_LOGITS,
    DFLASH2_SIZES,
    EMBEDDINGS,
    FUSED,
    LM_HEAD,
    Layout,
    Published,
)
from headstart.hub.engines.base import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    EAGLE3_NORMED,
    NOTE,
    SGLANG_EAGLE,
    Faults,
    Format,
    note_of,
    rounded,
)
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint, checkpoint_of, offsets, open_checkpoint
from headstart.hub.engines.faults import checkpoint_faults
from headstart.hub.engines.known_engines import usual_drafts
from headstart.hub.engines.parsing import SPECULATORS, read_published
from headstart.hub.target_facts import TargetFacts, kind_of
from headstart.support.files import write_json, write_tensors

WEIGHTS = "model.safetensors"
_SPECULATORS_VERSION = "0.9.0"
"""Library version of the written config."""
Files = tuple[dict[str, Any], dict[str, Tensor]]
"""Config and tensors of a folder."""


class FolderFormat(Format):
    """A format of config.json and safetensors files."""

    @abstractmethod
    def files(self, stored: Published, facts: TargetFacts, dtype: str) -> Files:
        """Build config and tensors of rounded heads. Raises UserError if the format has no such heads."""

    @abstractmethod
    def knows(self, checkpoint: Checkpoint) -> bool:
        """Whether a folder's config is of this format."""

    def limits(self, published: Published, facts: TargetFacts, engine: str) -> Faults:
        embeddings_VE = torch.empty(published.vocab_size, published.hidden_size, device="meta")
        stored = self.as_stored(self.with_embeddings(published, embeddings_VE))
        return checkpoint_faults(checkpoint_of(*self.files(stored, facts, "float32")), engine, facts)

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        stored = rounded(self.as_stored(published), dtype)
        config, tensors = self.files(stored, facts, dtype)
        write_json(folder / CONFIG, {**config, NOTE: note_of(stored, facts)})
        write_tensors(folder / WEIGHTS, tensors)

    def recognizes(self, folder: Path) -> bool:
        return (folder / CONFIG).is_file() and self.knows(open_checkpoint(folder))

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return read_published(open_checkpoint(folder), facts)

    def faults(self, folder: Path, engine: str, facts: TargetFacts | None) -> Faults:
        return checkpoint_faults(open_checkpoint(folder), engine, facts)


class Vllm(FolderFormat):
    """vLLM's format, which SGLang also reads for EAGLE-3 and DFlash heads."""

    name = "vllm"
    engines = ("vllm",)
    also = ("sglang",)

    def as_stored(self, published: Published) -> Published:
        return _without_bias(published) if published.layout is Layout.EAGLE else published

    def files(self, stored: Published, facts: TargetFacts, dtype: str) -> Files:
        return _engine_files(stored, facts, dtype, "LlamaForCausalLM")

    def knows(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.is_speculators and checkpoint.architectures != {SGLANG_EAGLE}


class Sglang(FolderFormat):
    """SGLang's own format."""

    name = "sglang"
    engines = ("sglang",)

    def as_stored(self, published: Published) -> Published:
        """Drop the embeddings: SGLang uses the target's, and adds the bias of `fc`."""
        if published.normed_embeddings:
            raise UserError(
                "SGLang feeds the target's embeddings without a norm, and these heads need normed embeddings.",
                "Export with --format vllm, or train with heads.embedding_norm=false.",
            )
        tensors = {name: tensor for name, tensor in published.tensors.items() if name != EMBEDDINGS}
        return published.with_tensors(tensors)

    def files(self, stored: Published, facts: TargetFacts, dtype: str) -> Files:
        return _engine_files(stored, facts, dtype, SGLANG_EAGLE)

    def knows(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.architectures == {SGLANG_EAGLE}


class Speculators(FolderFormat):
    """The speculators library's format; vLLM loads it and takes the target from the config."""

    name = "speculators"
    engines = ("speculators", "vllm")

    def stores_embeddings(self, published: Published) -> bool:
        # The library's EAGLE-3 classes fill missing embeddings with zeros; block drafters use the verifier's.
        return published.layout in FUSED and EMBEDDINGS not in published.tensors

    def files(self, stored: Published, facts: TargetFacts, dtype: str) -> Files:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": usual_drafts(stored),
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config: dict[str, Any] = {
            **_speculators_keys(stored),
            "transformer_layer_config": _layers_config(stored, facts, dtype),
            "speculators_version": _SPECULATORS_VERSION,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "speculators_config": {
                "algorithm": str(stored.layout),
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": facts.folder, "architectures": list(facts.architectures)},
            },
        }
        return config, {**stored.tensors, **_vocabulary_map(stored)}

    def knows(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.is_speculators


def _engine_files(stored: Published, facts: TargetFacts, dtype: str, eagle_architecture: str) -> Files:
    """Build files for vLLM or SGLang; only their architecture names of EAGLE-1 heads differ."""
    tensors = dict(stored.tensors)
    match stored.layout:
        case Layout.EAGLE3 | Layout.PEAGLE:
            config = {
                "architectures": [EAGLE3_NORMED if stored.qk_norm else EAGLE3],
                **_layers_config(stored, facts, dtype),
                **_eagle3_keys(stored),
                "eagle_aux_hidden_state_layer_ids": list(stored.aux_layers),
                "num_aux_hidden_states": len(stored.aux_layers),
                "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": _outputs(stored)},
            }
            if stored.layout is Layout.PEAGLE:
                config["pard_token"] = stored.mask_token_id  # read by vLLM up to 0.25
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
            tensors |= _vocabulary_map(stored)
        case Layout.EAGLE:
            config = {"architectures": [eagle_architecture], **_layers_config(stored, facts, dtype)}
        case Layout.DFLASH | Layout.DFLASH2 | Layout.DSPARK:
            # As first published; embeddings and LM head are the target's.
            reads = {"mask_token_id": stored.mask_token_id, "target_layer_ids": _outputs(stored)}
            config = _layers_config(stored, facts, dtype)
            if stored.layout is Layout.DFLASH:
                config |= {"architectures": [DFLASH], "dflash_config": reads}
            elif stored.layout is Layout.DFLASH2:
                reads |= {name: getattr(stored, name) for name in (*DFLASH2_SIZES, *DFLASH2_LOGITS)}
                config |= {"architectures": [DFLASH2], "dflash_config": reads}
            else:
                config |= {"architectures": [DSPARK], **reads, "sample_from_anchor": True, **_markov_keys(stored)}
            config |= {"block_size": stored.block_size, "num_target_layers": facts.num_layers}
        case Layout.MEDUSA:
            config = {  # vLLM up to 0.32 renames all other keys with "num" and "heads" or "layers" in them
                "architectures": ["MedusaModel"],
                "model_type": "medusa",
                "hidden_size": stored.hidden_size,
                "vocab_size": stored.vocab_size,
                "truncated_vocab_size": stored.draft_width,
                "num_heads": stored.steps,
                "num_hidden_layers": stored.num_layers,
                "medusa_fc_bias": True,
                "original_lm_head": LM_HEAD in stored.tensors,
                "torch_dtype": dtype,
            }
            if LM_HEAD in tensors:
                tensors["lm_heads.0.weight"] = tensors.pop(LM_HEAD)
    return config, tensors


def _layers_config(published: Published, facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """Return a Llama config of the heads' layers, or a Qwen3 config with QK norm; RoPE in old and new spelling."""
    layer = published.layer
    assert layer is not None, "these heads have decoder layers"
    rope = dict(layer.rope_parameters)
    kind = rope.get("rope_type", "default")
    scaling = None if kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    config = {
        "model_type": "qwen3" if published.layout in BLOCKS or published.qk_norm else "llama",
        "hidden_size": published.hidden_size,
        "num_hidden_layers": published.num_layers,
        **asdict(layer),
        "rope_parameters": {"rope_type": kind, **rope},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "vocab_size": published.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **facts.tokens,
    }
    if published.layout in BLOCKS:
        window, causal = published.sliding_window, published.causal_layers
        kinds = ["sliding_attention" if slides else "full_attention" for slides in published.sliding]
        config |= {"layer_types": kinds, "use_sliding_window": bool(window), "sliding_window": window or None}
        # The default is causal sliding layers and bidirectional full layers.
        if (window or published.causal) and len(set(causal)) == 1:
            config["is_causal"] = causal[0]
    return config


def _speculators_keys(published: Published) -> dict[str, Any]:
    if published.layout in FUSED:
        return {
            "architectures": [SPECULATORS[published.layout]],
            "speculators_model_type": str(published.layout),
            **_eagle3_keys(published),
            "eagle_aux_hidden_state_layer_ids": list(published.aux_layers),
            "embed_requires_grad": False,
        }
    if published.layout not in BLOCKS:
        problem = f"speculators supports EAGLE-3 heads and block drafters, not {kind_of(published)} heads."
        raise UserError(problem, "Export them with --format vllm.")
    if (published.output_multiplier, published.final_logit_softcapping) != (1, 0):
        problem = "speculators' configs of DFlash 2 have no fields for the target's logit scale and cap."
        raise UserError(problem, "Export them with --format vllm.")
    return {
        "architectures": [SPECULATORS[published.layout]],
        "speculators_model_type": str(published.layout),
        "aux_hidden_state_layer_ids": list(published.aux_layers),
        "block_size": published.block_size,
        "draft_vocab_size": published.vocab_size,
        "mask_token_id": published.mask_token_id,
        "sample_from_anchor": published.layout is Layout.DSPARK,
        # Meant for sliding layers, but vLLM applies false to all layers.
        "sliding_window_non_causal": not published.causal,
        "target_hidden_size": published.hidden_size,
        **(_markov_keys(published) if published.layout is Layout.DSPARK else {}),
        **{name: getattr(published, name) for name in DFLASH2_SIZES if published.layout is Layout.DFLASH2},
    }


def _eagle3_keys(published: Published) -> dict[str, Any]:
    return {
        "draft_vocab_size": published.draft_width,
        "target_hidden_size": published.hidden_size,
        "norm_before_residual": published.norm_before_residual,
        "norm_before_fc": published.norm_before_fc,
        "fc_norm": published.aux_norms,
        "norm_output": published.norm_output,
        **({"mask_token_id": published.mask_token_id} if published.layout is Layout.PEAGLE else {}),
    }


def _markov_keys(published: Published) -> dict[str, Any]:
    return {
        "markov_rank": published.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": published.confidence,
        "confidence_head_with_markov": published.confidence,
    }


def _outputs(published: Published) -> list[int]:
    """Return the aux layers as indices of layer outputs, from 0."""
    return [layer - 1 for layer in published.aux_layers]


def _vocabulary_map(published: Published) -> dict[str, Tensor]:
    """Return `d2t` (offsets) and `t2d` (mask of drafted tokens) of a reduced vocabulary."""
    if published.draft_ids_D is None:
        return {}
    drafted_V = torch.zeros(published.vocab_size, dtype=torch.bool)
    drafted_V[published.draft_ids_D] = True
    return {"d2t": offsets(published.draft_ids_D), "t2d": drafted_V}


def _without_bias(published: Published) -> Published:
    """Fold the bias of `fc` into the embeddings: add a vector that `fc` maps to the bias."""
    tensors = dict(published.tensors)
    bias_E = tensors.pop("fc.bias", None)
    if bias_E is None or not bias_E.any():
        return published.with_tensors(tensors)
    map_EE = tensors["fc.weight"][:, : published.hidden_size].double()
    added_E = torch.linalg.lstsq(map_EE, bias_E.double()[:, None], driver="gelsd").solution[:, 0]
    embeddings_VE = tensors[EMBEDDINGS]
    missing = (map_EE @ added_E - bias_E.double()).norm() / bias_E.double().norm()
    if missing > 1e-6 or added_E.abs().max() > 16 * embeddings_VE.abs().max():
        problem = "vLLM does not add the bias of fc in EAGLE-1 heads, and it cannot be folded into these embeddings."
        raise UserError(problem, "Train eagle3 heads for vLLM.")
    return published.with_tensors({**tensors, EMBEDDINGS: embeddings_VE + added_E.to(embeddings_VE)})
