"""Reference readers: draft logits from exported files, as the engines compute them, in plain torch without headstart.

Each reader follows the description of its format in docs/formats.md. They draft a chain: entry t holds the target's
state of token t and the embedding of token t + 1, and gives the logits of token t + 2.

Shape suffixes: T tokens, E hidden size, D draft vocabulary, V vocabulary, d size of an attention head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import torch.nn.functional as F
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def halves(x_Td: Tensor, base: float, start: int = 0) -> Tensor:
    """Apply rotary positions from `start` on, pairing the first half of a head with its second half."""
    count, size = x_Td.shape
    angles = torch.arange(start, start + count)[:, None] * base ** (-torch.arange(0, size, 2) / size)
    left, right = x_Td[:, : size // 2], x_Td[:, size // 2 :]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=1)


def pairs(x_Td: Tensor, base: float) -> Tensor:
    """Apply rotary positions that pair neighbours."""
    turned = halves(torch.cat([x_Td[:, 0::2], x_Td[:, 1::2]], dim=1), base)
    return torch.stack(turned.chunk(2, dim=1), dim=2).flatten(1)


def layer(
    x_TI: Tensor, stream_TE: Tensor, part: Mapping[str, Tensor], sizes: Mapping[str, Any], turn: Any = halves
) -> Tensor:
    """Run a Llama layer that reads `x_TI` and adds to `stream_TE`; a Qwen3 layer if queries and keys have norms."""
    size, heads, keys = sizes["head_dim"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    count = len(x_TI)
    mask = torch.full((count, count), float("-inf")).triu(1)
    found = []
    for head in range(heads):
        shared = head // (heads // keys)
        q = x_TI @ part["q"][head * size : (head + 1) * size].T
        k = x_TI @ part["k"][shared * size : (shared + 1) * size].T
        if "q_norm" in part:
            q, k = (rms(x, part[f"{name}_norm"], sizes["rms_norm_eps"]) for name, x in (("q", q), ("k", k)))
        q, k = turn(q, sizes["rope_theta"]), turn(k, sizes["rope_theta"])
        v = x_TI @ part["v"][shared * size : (shared + 1) * size].T
        found.append((q @ k.T * size**-0.5 + mask).softmax(-1) @ v)
    stream_TE = stream_TE + torch.cat(found, dim=1) @ part["o"].T
    normed = rms(stream_TE, part["mlp_norm"], sizes["rms_norm_eps"])
    return stream_TE + (F.silu(normed @ part["gate"].T) * (normed @ part["up"].T)) @ part["down"].T


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    names = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    names |= {"mlp_norm": "post_attention_layernorm"} | {name: f"self_attn.{name}_proj" for name in "qkvo"}
    if f"{prefix}.self_attn.q_norm.weight" in tensors:
        names |= {f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
    return {short: tensors[f"{prefix}.{name}.weight"] for short, name in names.items()}


def folder_of(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def into_vocabulary(logits_D: Tensor, ids_D: Tensor, size: int) -> Tensor:
    return torch.full((size,), float("-inf")).index_put((ids_D,), logits_D)


def eagle3_folder(folder: Path, hidden: list[Tensor], embed_VE: Tensor, tokens: list[int], chain: list[int]) -> Tensor:
    """Draft as vLLM does, also from speculators folders. `hidden` holds transformers' hidden states."""
    config, tensors, fuse, run = eagle3_parts(folder, embed_VE)
    fed_TE = fuse([hidden[one] for one in config["eagle_aux_hidden_state_layer_ids"]])
    return _chain(run, fed_TE, tokens, chain, tensors["lm_head.weight"], drafted(config, tensors), config["vocab_size"])


def peagle_folder(folder: Path, hidden: list[Tensor], embed_VE: Tensor, tokens: list[int], chain: list[int]) -> Tensor:
    """Draft as vLLM does with parallel_drafting: one pass over the text, the chain's first token and masks."""
    _, in_file = folder_of(folder)
    config, tensors, fuse, run = eagle3_parts(folder, in_file.get("embed_tokens.weight", embed_VE).float())
    masks, aux = len(chain) - 1, config["eagle_aux_hidden_state_layer_ids"]
    mask = fuse(list(tensors["mask_hidden"].view(1, -1).chunk(len(aux), dim=-1)))
    fed_TE = torch.cat([fuse([hidden[one] for one in aux]), *[mask] * masks])
    out_TE, _ = run(fed_TE, [*tokens[1:], chain[0], *[config["mask_token_id"]] * masks])
    logits_KD, ids_D = out_TE[-masks - 1 :] @ tensors["lm_head.weight"].T, drafted(config, tensors)
    return torch.stack([into_vocabulary(logits_D, ids_D, config["vocab_size"]) for logits_D in logits_KD])


def drafted(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the target's ids of drafted tokens."""
    d2t = tensors.get("d2t", torch.zeros(config["draft_vocab_size"])).long()
    return torch.arange(len(d2t)) + d2t


def eagle3_parts(folder: Path, embed_VE: Tensor) -> tuple[dict[str, Any], dict[str, Tensor], Any, Any]:
    """Return config and tensors of EAGLE-3's layers, their fusion of aux states, and their forward."""
    config, tensors = folder_of(folder)
    config = {**config.get("transformer_layer_config", {}), **config}
    tensors = {name.replace("midlayer.", "layers.0."): one.float() for name, one in tensors.items() if name != "t2d"}
    eps = config["rms_norm_eps"]

    def fuse(states: list[Tensor]) -> Tensor:
        if config["fc_norm"]:
            states = [rms(state, tensors[f"fc_norm.{tap}.weight"], eps) for tap, state in enumerate(states)]
        return torch.cat(states, dim=-1) @ tensors["fc.weight"].T

    def run(fed_TE: Tensor, following: list[int]) -> tuple[Tensor, Tensor]:
        embed_TE = rms(embed_VE[following], tensors["layers.0.input_layernorm.weight"], eps)
        normed_TE = rms(fed_TE, tensors["layers.0.hidden_norm.weight"], eps)
        stream = normed_TE if config["norm_before_residual"] else fed_TE
        stream = layer(torch.cat([embed_TE, normed_TE], 1), stream, part_of(tensors, "layers.0"), config)
        for number in range(1, config["num_hidden_layers"]):
            read = rms(stream, tensors[f"layers.{number}.input_layernorm.weight"], eps)
            stream = layer(read, stream, part_of(tensors, f"layers.{number}"), config)
        out = rms(stream, tensors["norm.weight"], eps)
        return out, out if config["norm_output"] else stream

    return config, tensors, fuse, run


def eagle_folder(
    folder: Path, final_TE: Tensor, embed_VE: Tensor, lm_head_VE: Tensor, tokens: list[int], chain: list[int]
) -> Tensor:
    """Draft with EAGLE-1 heads as vLLM does, or as SGLang, which adds the bias and uses the target's embeddings."""
    config, tensors = folder_of(folder)
    sglang = config["architectures"] == ["LlamaForCausalLMEagle"]
    own_VE = embed_VE if sglang else tensors.get("embed_tokens.weight", embed_VE)
    bias = tensors["fc.bias"] if sglang else 0

    def run(fed_TE: Tensor, following: list[int]) -> tuple[Tensor, Tensor]:
        x_TE = torch.cat([own_VE[following], fed_TE], dim=1) @ tensors["fc.weight"].T + bias
        out = layer(x_TE, x_TE, part_of(tensors, "layers.0"), config)
        return out, out

    return _chain(run, final_TE, tokens, chain, lm_head_VE, torch.arange(len(lm_head_VE)), len(lm_head_VE))


def medusa_folder(folder: Path, final_E: Tensor) -> Tensor:
    """Draft with Medusa heads as vLLM up to 0.32 does: logits [heads, V]."""
    config, tensors = folder_of(folder)
    logits = []
    for head in range(config["num_heads"]):
        x_E = final_E
        for block in range(config["num_hidden_layers"]):
            of = f"blocks.{head}.layers.{block}"
            bias = tensors[f"{of}.bias"] if config["medusa_fc_bias"] else 0
            x_E = x_E + F.silu(tensors[f"{of}.weight"] @ x_E + bias)
        shared = config["original_lm_head"]
        logits.append(tensors[f"lm_heads.{0 if shared else head}.weight"] @ x_E)
    return torch.stack(logits)


def tensors_of(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    tensors = {}
    for one in reader.tensors:
        is_exact = one.tensor_type == gguf.GGMLQuantizationType.I64
        numbers = one.data if is_exact else dequantize(one.data, one.tensor_type)
        tensors[one.name] = torch.from_numpy(numbers.copy()).reshape([int(size) for size in reversed(one.shape)])
    return tensors


def eagle3_gguf(file: Path, hidden: list[Tensor], embed_VE: Tensor, tokens: list[int], chain: list[int]) -> Tensor:
    """Draft as llama.cpp does from a GGUF file: rotary positions pair neighbours, and d2t holds ids."""
    reader = gguf.GGUFReader(file)
    named = {name.removeprefix("eagle3."): field for name, field in reader.fields.items() if "eagle3." in name}
    keys = {name: field.contents() for name, field in named.items()}
    tensors = tensors_of(reader)
    eps = keys["attention.layer_norm_rms_epsilon"]
    heads = {"head_dim": "key_length", "num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv"}
    sizes = {name: keys[f"attention.{key}"] for name, key in heads.items()}
    sizes |= {"rope_theta": keys["rope.freq_base"], "rms_norm_eps": eps}
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "mlp_norm": "ffn_norm"}
    names |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    part = {short: tensors[f"blk.0.{name}.weight"] for short, name in names.items()}
    fed_TE = torch.cat([hidden[one] for one in keys["target_layers"]], dim=-1) @ tensors["fc.weight"].T

    def run(fed_TE: Tensor, following: list[int]) -> tuple[Tensor, Tensor]:
        embed_TE = rms(embed_VE[following], tensors["blk.0.attn_norm.weight"], eps)
        normed_TE = rms(fed_TE, tensors["blk.0.attn_norm_2.weight"], eps)
        stream = normed_TE if keys["norm_before_residual"] else fed_TE
        stream = layer(torch.cat([embed_TE, normed_TE], 1), stream, part, sizes, pairs)
        return rms(stream, tensors["output_norm.weight"], eps), stream

    vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    ids_D = tensors.get("d2t", torch.arange(vocab))
    return _chain(run, fed_TE, tokens, chain, tensors["output.weight"], ids_D, vocab)


def _chain(
    run: Any, fed_TE: Tensor, tokens: list[int], chain: list[int], lm_head: Tensor, ids_D: Tensor, size: int
) -> Tensor:
    """Return logits [len(chain), V] of the drafts after each token of a chain that follows the text."""
    following = [*tokens[1:], chain[0]]
    logits = []
    for step in range(len(chain)):
        hidden_TE, out_TE = run(fed_TE, following)
        logits.append(into_vocabulary(lm_head @ hidden_TE[-1], ids_D, size))
        if step + 1 < len(chain):
            fed_TE, following = torch.cat([fed_TE, out_TE[-1:]]), [*following, chain[step + 1]]
    return torch.stack(logits)
