"""Reference readers of block drafters, in plain torch without headstart.

They follow the description of the formats in docs/formats.md. The target has read the text. The block follows it: the
newest decided token, then mask tokens in all other slots.

Shape suffixes: T tokens of the text, B slots of the block, E hidden size, V vocabulary, K drafts, d size of an
attention head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.engines.readers import halves, rms, tensors_of


@dataclass
class Block:
    """Settings and tensors of a file, by the names of the native layout."""

    tensors: Mapping[str, Tensor]
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    eps: float
    base: float
    size: int
    mask: int
    taps: list[int]
    from_anchor: bool
    windows: list[int]
    causal: list[bool]
    group: int = 0
    candidates: int = 0

    def hidden(self, layer: int, after: int) -> Tensor:
        """Return the attention mask, True where hidden, bool [B, T + B], for a block after `after` tokens of text."""
        behind = after + torch.arange(self.size)[:, None] - torch.arange(after + self.size)
        hidden = behind < 0 if self.causal[layer] else torch.zeros_like(behind, dtype=torch.bool)
        return hidden | (behind >= self.windows[layer]) if self.windows[layer] else hidden


def convolved(part: Mapping[str, Tensor], name: str, group: int, side: int, normed_BE: Tensor, x_BE: Tensor) -> Tensor:
    """Return the sublayer's input (side 0) or output (side 1) after DFlash 2's convolution, if there is one."""
    if f"{name}.base_kernel" not in part:
        return x_BE
    base, output = part[f"{name}.base_kernel"], torch.zeros_like(x_BE)
    taps, groups = base.shape[1], x_BE.shape[1] // group
    dynamic = (normed_BE @ part[f"{name}.kernel_projection"].T).view(len(x_BE), 2, taps, groups)
    for slot in range(len(x_BE)):
        for tap in range(min(taps, slot + 1)):
            kernel_E = base[side, tap] + dynamic[slot, side, tap].repeat_interleave(group)
            output[slot] += kernel_E * x_BE[slot - tap]
    return output


def outputs(block: Block, hidden: list[Tensor], embed_VE: Tensor, root: int) -> Tensor:
    """Return the LM head's input for each slot [B, E]; `hidden` holds transformers' hidden states of the text."""
    tensors, d = block.tensors, block.head_dim
    context_TE = torch.cat([hidden[tap] for tap in block.taps], dim=-1) @ tensors["fc.weight"].T
    context_TE = rms(context_TE, tensors["hidden_norm.weight"], block.eps)
    after = len(context_TE)
    stream_BE = embed_VE[[root, *[block.mask] * (block.size - 1)]]
    for number in range(block.layers):
        part = {
            name.removeprefix(f"layers.{number}.").removesuffix(".weight"): one
            for name, one in tensors.items()
            if name.startswith(f"layers.{number}.")
        }
        normed_BE, found = rms(stream_BE, part["input_layernorm"], block.eps), []
        read_BE = convolved(part, "attention_conv", block.group, 0, normed_BE, normed_BE)
        for head in range(block.heads):
            shared = head // (block.heads // block.key_heads)
            q, rows = part["self_attn.q_proj"][head * d : (head + 1) * d], slice(shared * d, (shared + 1) * d)
            k, v = part["self_attn.k_proj"][rows], part["self_attn.v_proj"][rows]
            q_Bd = halves(rms(read_BE @ q.T, part["self_attn.q_norm"], block.eps), block.base, after)
            of_text = halves(rms(context_TE @ k.T, part["self_attn.k_norm"], block.eps), block.base)
            of_block = halves(rms(read_BE @ k.T, part["self_attn.k_norm"], block.eps), block.base, after)
            scores = q_Bd @ torch.cat([of_text, of_block]).T * d**-0.5
            shares = scores.masked_fill(block.hidden(number, after), float("-inf")).softmax(-1)
            found.append(shares @ torch.cat([context_TE, read_BE]) @ v.T)
        attended = torch.cat(found, dim=1) @ part["self_attn.o_proj"].T
        stream_BE = stream_BE + convolved(part, "attention_conv", block.group, 1, normed_BE, attended)
        normed_BE = rms(stream_BE, part["post_attention_layernorm"], block.eps)
        x_BE = convolved(part, "mlp_conv", block.group, 0, normed_BE, normed_BE)
        inner = F.silu(x_BE @ part["mlp.gate_proj"].T) * (x_BE @ part["mlp.up_proj"].T) @ part["mlp.down_proj"].T
        stream_BE = stream_BE + convolved(part, "mlp_conv", block.group, 1, normed_BE, inner)
    return rms(stream_BE, tensors["norm.weight"], block.eps)


@torch.no_grad()
def drafted(folder: Path, target: Any, text: list[int], chain: list[int]) -> Tensor:
    """Return the logits [K, V] of a folder after each token of a chain that follows the text, with the confidences as
    a last column if the heads have them."""
    file = folder / "heads.gguf"
    block = read_gguf(file) if file.is_file() else read_folder(folder)
    hidden = [one[0] for one in target.model(torch.tensor([text]), output_hidden_states=True).hidden_states]
    out_BE = outputs(block, hidden, target.embedding_weight, chain[0])
    read_KE = (out_BE if block.from_anchor else out_BE[1:])[: len(chain)]
    logits_KV = read_KE @ target.lm_head_weight.T
    if block.candidates:
        return selected(block, read_KE, logits_KV, chain)
    if "markov_head.markov_w1.weight" not in block.tensors:
        return logits_KV
    before_KR = block.tensors["markov_head.markov_w1.weight"][chain[: len(read_KE)]]
    logits_KV = logits_KV + before_KR @ block.tensors["markov_head.markov_w2.weight"].T
    if "confidence_head.proj.weight" not in block.tensors:
        return logits_KV
    sure_K = torch.cat([read_KE, before_KR], dim=1) @ block.tensors["confidence_head.proj.weight"][0]
    sure_K = (sure_K + block.tensors["confidence_head.proj.bias"]).sigmoid()
    return torch.cat([logits_KV, sure_K[:, None]], dim=1)


def selected(block: Block, read_KE: Tensor, logits_KV: Tensor, chain: list[int]) -> Tensor:
    """Return DFlash 2's scores: of each slot's likely tokens after the token before it, -inf for all others."""
    before, after, project = (
        block.tensors[f"candidate_selector.{name}"]
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    scores_KV = torch.full_like(logits_KV, -torch.inf)
    for slot, (read_E, logits_V, parent) in enumerate(zip(read_KE, logits_KV, chain, strict=False)):
        likely = logits_V.argsort(descending=True)[: block.candidates]
        scores_KV[slot, likely] = logits_V[likely] + after[likely] @ (before[parent] * (project @ read_E))
    return scores_KV


def read_folder(folder: Path) -> Block:
    """Read a folder for vLLM, SGLang and llama.cpp's converter, or of the speculators library."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: one.float() for name, one in load_file(folder / "model.safetensors").items()}
    switches = [config.get(name, False) for name in ("enable_confidence_head", "confidence_head_with_markov")]
    assert switches == [any(name.startswith("confidence_head.") for name in tensors)] * 2, "vLLM builds it by these"
    layer = config.get("transformer_layer_config", config)
    nested = config.get("dflash_config", config)
    if "aux_hidden_state_layer_ids" in config:
        taps = config["aux_hidden_state_layer_ids"]
    else:
        taps = [one + 1 for one in nested["target_layer_ids"]]
    slide = [kind == "sliding_attention" for kind in layer["layer_types"]]
    causal = slide if "is_causal" not in layer else [layer["is_causal"]] * len(slide)
    if "sliding_window_non_causal" in config:
        causal = [one and not config["sliding_window_non_causal"] for one in slide]
    return Block(
        tensors,
        *(layer[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")),
        *(layer[name] for name in ("head_dim", "rms_norm_eps", "rope_theta")),
        config["block_size"],
        nested["mask_token_id"],
        taps,
        config.get("sample_from_anchor", False),
        [layer["sliding_window"] if one else 0 for one in slide],
        causal,
        *(nested.get(name, 0) for name in ("conv_group_size", "selector_top_k")),
    )


_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"{name}_conv_base": f"{part}_conv.base_kernel" for name, part in (("attn", "attention"), ("ffn", "mlp"))},
    **{f"{name}_conv_proj": f"{part}_conv.kernel_projection" for name, part in (("attn", "attention"), ("ffn", "mlp"))},
}
_BESIDE = {
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "conf_proj": "confidence_head.proj",
    "selector_hidden": "candidate_selector.hidden_projection",
    **{f"markov_w{number}": f"markov_head.markov_w{number}" for number in (1, 2)},
}


def read_gguf(file: Path) -> Block:
    """Read a GGUF file for llama.cpp."""
    reader = gguf.GGUFReader(file)
    keys: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items() if "GGUF." not in name}
    assert keys["general.architecture"] == "dflash"
    tensors = {}
    for full_name, tensor in tensors_of(reader).items():
        if full_name.startswith("selector_") and full_name != "selector_hidden.weight":
            tensors[f"candidate_selector.{full_name.removeprefix('selector_').removesuffix('.weight')}_codebook"] = (
                tensor
            )
            continue
        base, _, kind = (full_name if full_name.endswith((".weight", ".bias")) else f"{full_name}.").rpartition(".")
        if base.startswith("blk."):
            _, number, name = base.split(".", 2)
            base = f"layers.{number}.{_IN_LAYERS[name]}"
        tensors[f"{_BESIDE.get(base, base)}.{kind}".rstrip(".")] = tensor
    layers, window = keys["dflash.block_count"], keys.get("dflash.attention.sliding_window", 0)
    slide = keys.get("dflash.attention.sliding_window_pattern", [False] * layers)
    return Block(
        tensors,
        layers,
        *(keys[f"dflash.attention.{name}"] for name in ("head_count", "head_count_kv", "key_length")),
        keys["dflash.attention.layer_norm_rms_epsilon"],
        *(keys[name] for name in ("dflash.rope.freq_base", "dflash.block_size", "tokenizer.ggml.mask_token_id")),
        keys["dflash.target_layers"],
        keys.get("dflash.sample_from_anchor", False),
        [window if one else 0 for one in slide],
        [keys.get("dflash.attention.causal", False)] * layers,
        *(keys.get(f"dflash.{name}", 0) for name in ("conv_group_size", "selector_top_k")),
    )
