"""Tiny targets with multi-token-prediction modules in their checkpoints, in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headstart.model.model import Target

WEIGHTS = "model.safetensors"
SIZE = 64
BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": SIZE, "intermediate_size": 96, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    **BASE, **EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
GLM: dict[str, Any] = {
    **BASE, **EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "n_shared_experts": 1, "n_routed_experts": 4,
    "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    **BASE, **EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 32, "num_experts": 4,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    **BASE, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
KINDS = ("deepseek", "deepseek-two", "glm", "qwen3_next", "qwen3_5", "mimo")
"""Checkpoint layouts; `deepseek-two` has two modules."""
ONE_MODULE = tuple(kind for kind in KINDS if kind != "deepseek-two")


@dataclass
class ShippedTarget:
    """A target and the modules of its checkpoint, kept from before it was saved.

    Attributes:
        target: loaded from its folder.
        layers: the modules' decoder layers, as transformers built them.
        outer: per module: norm of the embedding, norm of the state, joining map, last norm.
        rotary: the target's rotary embedding.
        offset: added to the weights of norms.
        state_first: whether the joining map reads the state before the embedding.
        before_norm: whether it reads the target's states before the final norm.
    """

    target: Target
    layers: list[nn.Module]
    outer: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    rotary: nn.Module
    offset: float = 0.0
    state_first: bool = False
    before_norm: bool = False


def ship(
    kind: str, folder: Path, change: Callable[[nn.Module], None] | None = None, vocabulary: int = 61
) -> ShippedTarget:
    """Write a random target with its modules to a folder, and load it from there.

    Args:
        kind: one of `KINDS`.
        folder: to write.
        change: applied to the model and its modules before they are written.
        vocabulary: tokens.
    """
    size = {"vocab_size": vocabulary}
    count = 2 if kind == "deepseek-two" else 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        match kind:
            case "deepseek" | "deepseek-two":
                layers = 2
                config: Any = tf.DeepseekV3Config(num_hidden_layers=layers + count, **{**DEEPSEEK, **size})
                complete: Any = tf.DeepseekV3ForCausalLM(config)
            case "glm":
                layers = 2
                complete = tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(num_hidden_layers=layers + count, **{**GLM, **size}))
            case "qwen3_next":
                layers = 3
                kinds = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
                complete = tf.Qwen3NextForCausalLM(
                    tf.Qwen3NextConfig(num_hidden_layers=4, layer_types=kinds, **{**QWEN3_NEXT, **size})
                )
            case "qwen3_5":
                layers = 2
                kinds = ["linear_attention", "full_attention", "full_attention"]
                complete = tf.Qwen3_5ForCausalLM(
                    tf.Qwen3_5TextConfig(num_hidden_layers=3, layer_types=kinds, **{**QWEN3_5, **size})
                )
            case _:
                layers = 2
                complete = tf.Qwen2ForCausalLM(
                    tf.Qwen2Config(num_hidden_layers=layers + count, num_key_value_heads=2, **{**BASE, **size})
                )
        outer = [(_norm(), _norm(), 0.2 * torch.randn(SIZE, 2 * SIZE), _norm()) for _ in range(count)]
    complete = complete.float().eval()
    offset = 1.0 if kind in ("qwen3_next", "qwen3_5") else 0.0
    if change is not None:
        change(complete)
    complete.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    for number, parts in enumerate(outer):
        _write(
            kind, tensors, layers + number, number, [parts[0] - offset, parts[1] - offset, parts[2], parts[3] - offset]
        )
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    known["num_hidden_layers"] = layers
    if "layer_types" in known:
        known["layer_types"] = known["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(known))
    decoder = complete.model
    return ShippedTarget(
        reload(folder), list(decoder.layers[layers:]), outer, decoder.rotary_emb, offset, kind == "mimo", kind == "mimo"
    )


def reload(folder: Path) -> Target:
    """Load the target in a folder."""
    return Target(tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), None, str(folder))


def _norm() -> Tensor:
    return 0.5 + torch.rand(SIZE)


def _write(kind: str, tensors: dict[str, Tensor], layer: int, number: int, outer: list[Tensor]) -> None:
    """Rename a layer's tensors to a module's names, and add the tensors around it."""
    of_layer = f"model.layers.{layer}."
    match kind:
        case "qwen3_next" | "qwen3_5":
            below, head = "mtp.layers.0.", "mtp."
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        case "mimo":
            below = head = f"model.mtp_layers.{number}."
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        case _:
            below = head = of_layer
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            tensors[f"{of_layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
            tensors[f"{of_layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    if below != of_layer:
        for name in [name for name in tensors if name.startswith(of_layer)]:
            tensors[below + name.removeprefix(of_layer)] = tensors.pop(name)
    tensors |= {f"{head}{name}.weight": part.contiguous() for name, part in zip(names, outer, strict=True)}
