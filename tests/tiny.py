"""Tiny random models of many architectures, and a small real tokenizer: enough for every test that needs a target."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

KINDS = ("llama", "qwen3", "gemma3", "gemma2", "gpt_neox", "mixtral", "mistral", "gpt2", "phi3")
"""Architectures that `tiny_model` knows: sliding windows, mixture of experts, learned positions, fused projections."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2 of the tiny tokenizer; the last ends a turn."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LONG = ("phi3_long", "llama_long")
"""With other rotary frequencies from 24 tokens on; Phi-3 then reads the whole text again, and Llama does not."""

_WORDS = ("the", "user", "assistant", "system", "ing", "er", "on", "re", "Ġa", "Ġto", "Ġof", "Ġthe", "Ġis", "Ġin")


def tiny_model(kind: str, seed: int = 0, vocab_size: int = 101, max_length: int = 256, layers: int = 3) -> Any:
    """A random float32 model of hidden size 64; the same seed gives the same weights.

    Args:
        kind: one of `KINDS` or `LONG`.
        seed: of the weights.
        vocab_size: rows of the embedding.
        max_length: longest context, in tokens.
        layers: of the model; 3 where they differ in kind.
    """
    base: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": max_length,
    }
    grouped = {**base, "num_key_value_heads": 2}
    longrope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 8, "long_factor": [1.5 + 0.5 * pair for pair in range(8)],
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        match kind:
            case "llama":
                model = tf.LlamaForCausalLM(tf.LlamaConfig(**grouped))
            case "qwen3":
                model = tf.Qwen3ForCausalLM(tf.Qwen3Config(head_dim=16, **grouped))
            case "gemma3":
                gemma3 = tf.Gemma3TextConfig(
                    head_dim=16, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16, **grouped
                )
                model = tf.Gemma3ForCausalLM(gemma3)
            case "gemma2":
                model = tf.Gemma2ForCausalLM(tf.Gemma2Config(head_dim=16, sliding_window=8, **grouped))
            case "gpt_neox":
                model = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**base))
            case "mixtral":
                model = tf.MixtralForCausalLM(tf.MixtralConfig(num_local_experts=4, **grouped))
            case "mistral":
                model = tf.MistralForCausalLM(tf.MistralConfig(sliding_window=8, **grouped))
            case "gpt2":
                gpt2 = tf.GPT2Config(vocab_size=vocab_size, n_embd=64, n_layer=3, n_head=4, n_positions=max_length)
                model = tf.GPT2LMHeadModel(gpt2)
            case "phi3":
                model = tf.Phi3ForCausalLM(tf.Phi3Config(pad_token_id=0, **grouped))
            case "phi3_long":
                phi3 = tf.Phi3Config(
                    pad_token_id=0, original_max_position_embeddings=24, rope_parameters=longrope, **grouped
                )
                model = tf.Phi3ForCausalLM(phi3)
            case "llama_long":
                model = tf.LlamaForCausalLM(tf.LlamaConfig(rope_parameters=longrope, **grouped))
            case _:
                raise ValueError(f"no tiny model {kind!r}; known: {', '.join(KINDS)}")
    return model.float().eval()


class PackedLinear(torch.nn.Module):
    """A linear layer as quantisers leave it: its weight has another dtype and shape than the matrix."""

    def __init__(self, linear: torch.nn.Linear, bits: int = 8) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = torch.nn.Buffer(weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1))
        self.weight = torch.nn.Parameter((weight / self.scale).round().to(torch.int8).view(-1, 1), requires_grad=False)

    def whole(self) -> torch.Tensor:
        """Return the matrix that the layer multiplies with."""
        return self.weight.view(self.out_features, self.in_features) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.whole().to(x.dtype), self.bias)


def packed_model(model: Any, bits: int) -> Any:
    """Pack the linear maps of a model's layers in place, and return it."""
    for layer in model.get_decoder().layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, PackedLinear(child, bits))
    return model


def tiny_tokenizer(
    chat_template: str | None = CHATML, special: tuple[str, ...] = SPECIAL
) -> tf.PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 300 tokens: any text round-trips.

    Args:
        chat_template: ChatML without a default system prompt; None for a tokenizer without a template.
        special: special tokens, ids from 0; the first pads, the last ends a turn.
    """
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for left, right in pairwise(_prefixes(word)):
            merges.append((left, right[len(left) :]))
            vocab.setdefault(right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[-1],
        additional_special_tokens=list(special[1:-1]),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def save_tiny_target(folder: Path) -> None:
    """Save a tiny Llama and its tokenizer so that `load_target(str(folder))` reads them."""
    tokenizer = tiny_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_tiny_adapter(folder: Path, target_folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Save a random LoRA adapter of a tiny target that moves its logits well beyond rounding; returns its folder."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings}))
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.05)
        adapted.save_pretrained(folder)
    return folder


def _prefixes(word: str) -> list[str]:
    return [word[:count] for count in range(1, len(word) + 1)]
