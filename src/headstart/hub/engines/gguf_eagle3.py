"""EAGLE-3 heads as llama.cpp knows them.

Of a Hugging Face checkpoint three things differ: rows of queries and keys are permuted, since llama.cpp turns pairs of
neighbours where transformers turns the two halves of a head; `d2t` holds token ids, not offsets; and tensors have other
names.

Shape suffixes: D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.exchange.published import Layout, Published
from headstart.hub.engines.gguf_file import (
    D2T,
    OTHER,
    Arrangement,
    Limit,
    layer_sizes_of,
    needed,
    tokens_of,
    value,
    written,
)

_NAMES = {
    "fc.weight": "fc.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_norm.weight": "enc.output_norm.weight",
}


class Eagle3(Arrangement):
    """Of one layer and three aux layers."""

    architecture = "eagle3"
    layouts = frozenset({Layout.EAGLE3})

    def spec_type(self, published: Published) -> str:
        return "draft-eagle3"

    def limits(self, published: Published, layers: int) -> Iterator[Limit]:
        count = len(published.aux_layers)
        yield published.num_layers != 1, f"llama.cpp runs one layer, and the heads have {published.num_layers}.", OTHER
        yield count != 3, f"llama.cpp fuses 3 layers of the target, and the heads read {count}.", OTHER
        yield published.aux_norms, "llama.cpp has no norm of each aux state (heads.aux_norms).", OTHER
        yield (
            published.norm_output,
            "llama.cpp feeds back the state before the norm, whatever norm_output says (heads.feedback).",
            "Export with --format vllm, or train with heads.feedback=pre_norm.",
        )

    def keys(self, published: Published) -> dict[str, Any]:
        return {
            "eagle3.target_hidden_size": published.hidden_size,
            "eagle3.norm_before_residual": published.norm_before_residual,
            "eagle3.norm_before_fc": published.norm_before_fc,
        }

    def names(self, published: Published) -> dict[str, str]:
        return _NAMES

    def permuted(self, published: Published) -> dict[str, int]:
        assert published.layer is not None, "these heads have a decoder layer"
        return {
            "layers.0.self_attn.q_proj.weight": published.layer.num_attention_heads,
            "layers.0.self_attn.k_proj.weight": published.layer.num_key_value_heads,
        }

    def settings(self, reader: Any) -> Published:
        of, noted = self.architecture, written(reader)
        d2t = next((tensor for tensor in reader.tensors if tensor.name == D2T), None)
        return Published(
            layout=Layout.EAGLE3,
            hidden_size=int(needed(reader, of, "embedding_length")),
            vocab_size=tokens_of(reader, of),
            steps=noted.steps if noted and noted.steps else 5,
            tensors={},
            draft_ids_D=None if d2t is None else torch.from_numpy(np.array(d2t.data)).reshape(-1),
            layer=layer_sizes_of(reader, of),
            num_layers=int(needed(reader, of, "block_count")),
            aux_layers=tuple(int(layer) for layer in needed(reader, of, "target_layers")),
            norm_before_residual=bool(value(reader, f"{of}.norm_before_residual", False)),
            norm_before_fc=bool(value(reader, f"{of}.norm_before_fc", False)),
        )

    def beside(self, published: Published) -> dict[str, tuple[int, ...]]:
        return {**super().beside(published), D2T: (published.draft_width,)}

    def faults(self, reader: Any, published: Published) -> Iterator[tuple[str, str]]:
        if published.draft_ids_D is not None:
            yield from _wrong_ids(published.draft_ids_D, published.vocab_size)


def _wrong_ids(ids_D: Tensor, vocab_size: int) -> Iterator[tuple[str, str]]:
    outside = bool(((ids_D < 0) | (ids_D >= vocab_size)).any())
    if outside or len(torch.unique(ids_D)) != len(ids_D):
        yield (
            "d2t does not name distinct tokens of the target: llama.cpp reads token ids there, and Hugging Face files "
            "hold offsets.",
            "Add each entry's place to it.",
        )
