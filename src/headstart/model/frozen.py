"""Properties of a frozen model: sizes, end tokens, identity, embeddings and LM head.

Shape suffixes: V vocabulary, E hidden size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.model.identity import (
    Adapter,
    Identity,
    Origin,
    differs,
    dtype_name,
    fingerprint,
    settings_hash,
    sketch,
    vocabulary_hash,
)
from headstart.model.lm_head import LogitTransform, dequantized, plain_weight
from headstart.replay.chains import LINEAR_ATTENTION
from headstart.support.detokenizer import AnswerMarkup, answer_text

_TREE_LAYERS = {"full_attention", "sliding_attention", LINEAR_ATTENTION}
_RESERVED = re.compile(r"reserved|unused|extra_id|placeholder|<\|?mask|dummy|<pad\d", re.IGNORECASE)
"""Names of reserved tokens."""


class FrozenModel:
    """A transformers causal language model and its tokenizer, both unchanged.

    Attributes:
        model: the transformers model; its own forwards and `generate` work as before.
        tokenizer: None if no text is read or written.
        spec: argument of `load_target` that loads it again.
        origin: the model before loading changed its weights; None if they are unchanged.
        max_length: context length in tokens.
        rounded: whether the weights were dequantised, as those of a GGUF file.
        sharded: whether weights are sharded over ranks, all of which then run every forward.
        window: sliding window; None if no layer has one.
        device: device of input tokens, logits and aux hidden states.
        dtype: of hidden states.

    Raises:
        UserError: not a decoder-only model.
    """

    def __init__(self, model: Any, tokenizer: Any = None, spec: str = "", origin: Origin | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self.origin = origin
        self.rounded = False
        self.sharded = False
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.layers = _layers(self.decoder, self.config.num_hidden_layers)
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        lm_head = model.get_output_embeddings()
        self.vocab_size = int(getattr(lm_head, "out_features", None) or lm_head.weight.shape[0])  # quantised or not
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.window = _sliding_window(self.config)
        self.device: torch.device = self.embedding_weight.device
        self.dtype = torch.float32
        self._lender: FrozenModel | None = None

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return this model with another tokenizer of the same vocabulary."""
        if tokenizer is self.tokenizer:
            return self
        other = copy(self)
        other.tokenizer = tokenizer
        other.__dict__.pop("markup", None)
        other._lender = self  # keeps the patches, which are undone once `self` is collected
        return other

    @property
    def name(self) -> str:
        """A short name for messages and reports."""
        return self.named(self.model_name)

    @property
    def model_name(self) -> str:
        """The name without adapter and quantization."""
        return self.spec or str(getattr(self.config, "_name_or_path", "")) or type(self.model).__name__

    def named(self, name: str) -> str:
        """Append adapter and quantization to a name."""
        adapter = "" if self.adapter is None else f" with the adapter {self.adapter.name}"
        return f"{name}{adapter}" + ("" if self.quantization == "none" else f" in {self.quantization}")

    @property
    def quantization(self) -> str:
        """Quantization applied at loading: "int8", "int4" or "none"."""
        return "none" if self.origin is None else self.origin.quantization

    @property
    def adapter(self) -> Adapter | None:
        return None if self.origin is None else self.origin.adapter

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Per layer ((key heads, key head size), (value heads, value head size)); defined by subclasses."""
        raise NotImplementedError

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn: from the generation config, else the config, plus the tokenizer's."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            configured = getattr(self.config, "eos_token_id", None)
        ends = configured if isinstance(configured, list) else [configured]
        return frozenset(end for end in (*ends, getattr(self.tokenizer, "eos_token_id", None)) if isinstance(end, int))

    @cached_property
    def markup(self) -> AnswerMarkup:
        return AnswerMarkup() if self.tokenizer is None else AnswerMarkup.of(self.tokenizer)

    def text_of(self, answer: Sequence[int]) -> str:
        """Decode an answer without special tokens and other channels' messages."""
        return answer_text(answer, self.tokenizer, self.end_tokens, self.markup)

    @cached_property
    def spare_token(self) -> int | None:
        return spare_token(self.tokenizer, self.vocab_size, self.blank)

    def blank(self, token_id: int) -> bool:
        """Whether a token's embedding is zero or not finite."""
        if self.embedding_weight.is_meta or token_id >= len(self.embedding_weight):  # nothing to inspect
            return False
        size = float(self.embedding_weight[token_id].float().abs().sum())
        return not 0 < size < math.inf

    def identity(self) -> Identity:
        origin = self.origin
        known = fingerprint(self.model, self.architecture) if origin is None else origin.changed_fingerprint
        return Identity(self.spec, self.name, known)

    @property
    def whole_identity(self) -> str:
        """Cache key of its outputs: weights, settings and dtype."""
        return f"{self.identity().fingerprint} {self.settings} {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def sketch(self) -> dict[str, Any]:
        """Identify the model in any rounding, as JSON; see `differs_from`."""
        sketched = sketch(self.model, self.tokenizer, self.architecture, self.origin)
        return {**sketched, "rounded": True} if self.rounded else sketched

    def differs_from(self, sketched: Mapping[str, Any]) -> str | None:
        """Describe how this model differs from a sketched one, beyond rounding; None if it does not."""
        return differs(
            sketched, self.model, self.tokenizer, self.architecture, origin=self.origin, rounded=self.rounded
        )

    @property
    def architecture(self) -> str:
        """Kind and sizes, as one line."""
        return f"{self.config.model_type} {self.num_layers} {self.hidden_size} {self.vocab_size}"

    @cached_property
    def vocabulary(self) -> str | None:
        return vocabulary_hash(self.tokenizer)

    @cached_property
    def settings(self) -> str:
        """Hash of config fields that affect outputs: rotary scaling, windows, scales."""
        return settings_hash(self.config)

    def lm_head(self, final_state: Tensor) -> Tensor:
        """Compute logits [..., V] from FINAL states, on the states' device."""
        logits: Tensor = self.model.get_output_embeddings()(final_state)
        return self.logit_transform(logits.to(final_state.device))

    @cached_property
    def logit_transform(self) -> LogitTransform:
        return LogitTransform.of(self.config)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, E]; dequantised once if quantised."""
        weight = plain_weight(self.model.get_output_embeddings(), self.vocab_size, self.hidden_size)
        return self._dequantized_lm_head if weight is None else weight

    @cached_property
    def _dequantized_lm_head(self) -> Tensor:
        return dequantized(self.model.get_output_embeddings(), self.hidden_size, self.dtype, self.device)

    @property
    def lm_head_bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def save(self, folder: str | Path) -> None:
        """Save model (adapter merged) and tokenizer in transformers' format."""
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def refuse_layers(name: str, config: Any) -> None:
    """Refuse a model with layers that support neither trees nor chains."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - _TREE_LAYERS if kinds - {LINEAR_ATTENTION} else kinds)
    if unknown:
        raise cannot_tree(name, f"its layers of type {', '.join(unknown)} keep a running state or fixed chunks")


def cannot_tree(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot verify a token tree: {reason}.",
        "Use a target whose attention takes a mask (Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, most MoE models).",
    )


def _layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(decoder).__name__} has no list of {count} layers to read.", "Use a decoder-only language model."
    )


def _sliding_window(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return int(window) if window else None


def spare_token(tokenizer: Any, vocab_size: int, blank: Callable[[int], bool] = lambda token_id: False) -> int | None:
    """Choose an unused token as a mask token for heads: the first of these with a non-blank embedding, or None.

    1. the first row past the tokenizer's vocabulary, if embeddings are padded;
    2. the tokenizer's mask token;
    3. a reserved token, by name;
    4. the last added token without a role in tokenizer or chat template;
    5. the padding token, if it has no other role.
    """
    if tokenizer is None:
        return None
    return next((token for token in _candidates(tokenizer) if token < vocab_size and not blank(token)), None)


def _candidates(tokenizer: Any) -> Iterator[int]:
    known: dict[str, int] = tokenizer.get_vocab()
    yield 1 + max(known.values(), default=-1)
    mask: int | None = getattr(tokenizer, "mask_token_id", None)
    if mask is not None:
        yield mask
    pad: int | None = getattr(tokenizer, "pad_token_id", None)
    used = used_tokens(tokenizer)
    free = {
        token_id: str(token)
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if getattr(token, "special", True) and token_id not in used | {pad}
    }
    yield from (token_id for token_id, text in free.items() if _RESERVED.search(text))
    yield from sorted(free, reverse=True)
    if pad is not None and pad not in used:
        yield pad


def used_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens with a role in the tokenizer, padding aside, and added tokens in its chat template."""
    template = getattr(tokenizer, "chat_template", None)
    rendered = template if isinstance(template, str) else " ".join((template or {}).values())
    roles = (getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "unk", "sep", "cls"))
    used = {token_id for token_id in roles if token_id is not None}
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return used | {token_id for token_id, token in added if str(token) in rendered}
