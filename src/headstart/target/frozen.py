"""What a frozen model is, whatever runs through it: sizes, ends of turns, identity, embeddings and LM head.

Shape suffixes: V vocabulary, E hidden size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.support.detokenizer import AnswerMarkup, answer_text
from headstart.target.chains import LINEAR
from headstart.target.identity import (
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
from headstart.target.lm_head import Finish, plain_weight, unpacked

_TREE_LAYERS = {"full_attention", "sliding_attention", LINEAR}
_RESERVED = re.compile(r"reserved|unused|extra_id|placeholder|<\|?mask|dummy|<pad\d", re.IGNORECASE)
"""How tokenizers call tokens that are kept for later."""


class FrozenModel:
    """A transformers causal language model and its tokenizer; changes nothing about it.

    Attributes:
        tokenizer: None where no text is read or written.
        spec: what to pass to `load_target` to get it again.
        origin: what it was before its weights were changed at loading; None where they are as they were read.
        max_length: tokens that it can read.
        rounded: whether its weights have been through few bits, as those of a GGUF file have.
        sharded: whether each process holds a part of its weights; all of them then run every forward.
        window: of the layers with a sliding window; None when every layer sees everything.
        device: where tokens go in, and logits and aux hidden states come out.
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
        self.vocab_size = int(getattr(lm_head, "out_features", None) or lm_head.weight.shape[0])  # packed or not
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.window = _sliding_window(self.config)
        self.device: torch.device = self.embedding_weight.device
        self.dtype = torch.float32
        self._lender: FrozenModel | None = None

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """The same model with another tokenizer of the same vocabulary; itself where that is its own."""
        if tokenizer is self.tokenizer:
            return self
        other = copy(self)
        other.tokenizer = tokenizer
        other.__dict__.pop("markup", None)
        other._lender = self  # its fitting is undone when it goes
        return other

    @property
    def name(self) -> str:
        """A short name for messages and reports."""
        return self.named(self.model_name)

    @property
    def model_name(self) -> str:
        """The same of the model as it was read."""
        return self.spec or str(getattr(self.config, "_name_or_path", "")) or type(self.model).__name__

    def named(self, name: str) -> str:
        """A name of the model as it was read, with what was done to it since."""
        adapter = "" if self.adapter is None else f" with the adapter {self.adapter.name}"
        return f"{name}{adapter}" + ("" if self.quantization == "none" else f" in {self.quantization}")

    @property
    def quantization(self) -> str:
        """What its linear layers were put into when it was loaded: "int8", "int4" or "none"."""
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
        """Per layer ((key heads, key head size), (value heads, value head size))."""
        raise NotImplementedError

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn: those of the generation config, else of the config, and the tokenizer's own."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            configured = getattr(self.config, "eos_token_id", None)
        ends = {*(configured if isinstance(configured, list) else [configured])}
        ends.add(getattr(self.tokenizer, "eos_token_id", None))
        return frozenset(end for end in ends if isinstance(end, int))

    @cached_property
    def markup(self) -> AnswerMarkup:
        return AnswerMarkup() if self.tokenizer is None else AnswerMarkup.of(self.tokenizer)

    def text_of(self, answer: Sequence[int]) -> str:
        """Decode an answer, without special tokens and without messages of other channels than that of answers."""
        return answer_text(answer, self.tokenizer, self.end_tokens, self.markup)

    @cached_property
    def spare_token(self) -> int | None:
        return spare_token(self.tokenizer, self.vocab_size, self.blank)

    def blank(self, token_id: int) -> bool:
        """Whether heads can read nothing of a token: its embedding is zeros, or not finite."""
        if self.embedding_weight.is_meta or token_id >= len(self.embedding_weight):  # there is nothing to look at
            return False
        size = float(self.embedding_weight[token_id].float().abs().sum())
        return not 0 < size < math.inf

    def identity(self) -> Identity:
        if self.origin is not None:
            return Identity(self.spec, self.name, self.origin.changed_fingerprint)
        return Identity(self.spec, self.name, fingerprint(self.model, self.architecture))

    @property
    def whole_identity(self) -> str:
        """What all that is computed with it depends on: its weights, its settings and the dtype it runs in."""
        return f"{self.identity().fingerprint} {self.settings} {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def sketch(self) -> dict[str, Any]:
        """What tells this model, in any rounding, from others; for JSON. See `differs_from`."""
        sketched = sketch(self.model, self.tokenizer, self.architecture, self.origin)
        return {**sketched, "rounded": True} if self.rounded else sketched

    def differs_from(self, sketched: Mapping[str, Any]) -> str | None:
        """In what this model differs from one that was sketched, but for rounding; None in nothing that shows."""
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
        """Hash of what changes the model's numbers besides its weights: rotary scaling, windows, scales."""
        return settings_hash(self.config)

    def lm_head(self, final_state: Tensor) -> Tensor:
        """Logits [..., V] from states read at FINAL, as the model itself computes them, and where the states are."""
        logits: Tensor = self.model.get_output_embeddings()(final_state)
        return self.finish(logits.to(final_state.device))

    @cached_property
    def finish(self) -> Finish:
        """What the model does to its LM head's output: caps and scales of Gemma, Cohere and Granite."""
        return Finish.of(self.config)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, E]; unpacked once when it is quantised."""
        weight = plain_weight(self.model.get_output_embeddings(), self.vocab_size, self.hidden_size)
        return self._unpacked_lm_head if weight is None else weight

    @cached_property
    def _unpacked_lm_head(self) -> Tensor:
        return unpacked(self.model.get_output_embeddings(), self.hidden_size, self.dtype, self.device)

    @property
    def lm_head_bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def save(self, folder: str | Path) -> None:
        """Write the model as it is, with its adapter merged, and its tokenizer, for transformers to read."""
        self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """The untouched transformers model, for `transformers.generate` as a baseline."""
        yield self.model


def refuse_layers(name: str, config: Any) -> None:
    """Refuse a model with layers that can take neither a token tree nor a chain."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - _TREE_LAYERS if kinds - {LINEAR} else kinds)
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
    """A token of a model that no text uses, for heads that read a placeholder where a token is not known yet: the first
    of these whose embedding is not blank; None where there is none.

    1. the first row after those of the tokenizer, where the embeddings were rounded up;
    2. the tokenizer's own mask token;
    3. a reserved token by its name;
    4. the last added token that neither the chat template nor the tokenizer gives a meaning;
    5. the padding token, where it ends nothing.
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
    roles = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "unk", "sep", "cls")}
    pad: int | None = getattr(tokenizer, "pad_token_id", None)
    template = getattr(tokenizer, "chat_template", None)
    rendered = template if isinstance(template, str) else " ".join((template or {}).values())
    free = {
        token_id: str(token)
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if getattr(token, "special", True) and token_id not in roles | {pad} and str(token) not in rendered
    }
    yield from (token_id for token_id, text in free.items() if _RESERVED.search(text))
    yield from sorted(free, reverse=True)
    if pad is not None and pad not in roles:
        yield pad
