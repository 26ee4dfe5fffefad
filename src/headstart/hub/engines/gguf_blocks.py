"""Block drafters as llama.cpp knows them: DFlash, and DSpark by the Markov head beside it.

Rows of queries and keys are as in a Hugging Face checkpoint: of this architecture llama.cpp turns the halves of a head.
Embeddings and LM head are the target's. The mask token is one of the tokenizer's fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, MARKOV_EMBEDDING, MARKOV_LM_HEAD, Layout, Published
from headstart.hub.engines.gguf_file import (
    AGAIN,
    D2T,
    OTHER,
    Arrangement,
    Limit,
    layer_sizes_of,
    needed,
    shape_of,
    tokens_of,
    value,
)

MASK = "tokenizer.ggml.mask_token_id"
_MARKOV, _CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
_WHOLE = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    MARKOV_EMBEDDING: _MARKOV,
    MARKOV_LM_HEAD: "markov_w2.weight",
    "confidence_head.proj.weight": _CONFIDENCE,
    "confidence_head.proj.bias": "conf_proj.bias",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_REFUSED = {
    "selector_rank": "is of DFlash 2",
    "attention.sliding_window": "has sliding layers",
    "attention.causal": "has blocks whose slots do not see those after them",
}
"""Keys of variants that headstart does not have."""
_BLOCK = 16
"""What llama.cpp takes where a file says no block size."""


class Blocks(Arrangement):
    """Of any number of layers and aux layers."""

    architecture = "dflash"
    layouts = BLOCKS

    def spec_type(self, published: Published) -> str:
        return f"draft-{published.layout}"

    def limits(self, published: Published, layers: int) -> Iterator[Limit]:
        aux_layers = list(published.aux_layers)
        yield (
            sorted(set(aux_layers)) != aux_layers,
            f"The layers {aux_layers} do not rise, and engines join their outputs in the order of the layers.",
            "Train with rising heads.aux_layers.",
        )
        yield (
            not 0 <= published.mask_token_id < published.vocab_size,
            f"The mask token is {published.mask_token_id}, which is no token of a vocabulary of "
            f"{published.vocab_size}: llama.cpp stops.",
            "Train with a heads.mask_token_id of the target's vocabulary.",
        )
        yield (
            published.layout is Layout.DSPARK and not published.markov_rank,
            "llama.cpp knows DSpark heads by their Markov head, and these have none (heads.markov_rank=0).",
            "Train dflash heads, or with a heads.markov_rank.",
        )

    def keys(self, published: Published) -> dict[str, Any]:
        keys = {f"{self.architecture}.block_size": published.block_size, MASK: published.mask_token_id}
        if published.layout is Layout.DSPARK:
            keys |= {
                f"{self.architecture}.sample_from_anchor": True,
                f"{self.architecture}.has_confidence_head": published.confidence,
            }
        return keys

    def names(self, published: Published) -> dict[str, str]:
        layers = range(published.num_layers)
        return _WHOLE | {
            f"layers.{number}.{name}.weight": f"blk.{number}.{own}.weight"
            for number in layers
            for name, own in _LAYER.items()
        }

    def settings(self, reader: Any) -> Published:
        of = self.architecture
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        layout = Layout.DSPARK if _MARKOV in tensors else Layout.DFLASH
        refused = {key: what for key, what in _REFUSED.items() if value(reader, f"{of}.{key}")}
        if layout is Layout.DSPARK and value(reader, f"{of}.sample_from_anchor", True) is False:
            refused["sample_from_anchor"] = "drafts each slot's own place"
        for key, what in refused.items():
            raise UserError(f"The GGUF file {what} ({of}.{key}), which headstart has not.", "Take another file.")
        block_size = int(value(reader, f"{of}.block_size", _BLOCK))
        return Published(
            layout=layout,
            hidden_size=int(needed(reader, of, "embedding_length")),
            vocab_size=tokens_of(reader, of),
            steps=block_size - (layout is Layout.DFLASH),
            tensors={},
            layer=layer_sizes_of(reader, of),
            num_layers=int(needed(reader, of, "block_count")),
            aux_layers=tuple(int(layer) for layer in needed(reader, of, "target_layers")),
            block_size=block_size,
            mask_token_id=int(value(reader, MASK, -1)),
            markov_rank=shape_of(tensors[_MARKOV])[1] if _MARKOV in tensors else 0,
            confidence=_CONFIDENCE in tensors,
        )

    def beside(self, published: Published) -> dict[str, tuple[int, ...]]:
        whole = (published.vocab_size, published.hidden_size)
        return {**super().beside(published), "output.weight": whole}

    def faults(self, reader: Any, published: Published) -> Iterator[tuple[str, str]]:
        of = self.architecture
        if value(reader, f"{of}.block_size") is None:
            then = "stops" if published.layout is Layout.DSPARK else f"takes {_BLOCK}"
            yield f"The file does not say {of}.block_size, and llama.cpp then {then}.", AGAIN
        if value(reader, MASK) is None:
            yield f"The file does not say {MASK}, and llama.cpp fills blocks with no token at all.", AGAIN
        if any(tensor.name == D2T for tensor in reader.tensors):
            yield "There is a d2t, and the whole vocabulary is drafted.", OTHER
