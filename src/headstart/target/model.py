"""The frozen model that everything else is about: prefill, forward over a token tree, commit, tapped hidden states.

Shape suffixes: B rows, T tokens of one forward, V vocabulary, E hidden size, S cache slots in sight, N tree nodes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from headstart.errors import UserError
from headstart.target.attention import NAME as ATTENTION
from headstart.target.attention import TreeMask, attach
from headstart.target.cache import TreeCache
from headstart.target.tree import DraftTree, TreeShape

FINAL = -1
"""Tap of the last hidden state, after the final norm: what the LM head reads."""

_TREE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass
class TargetOutput:
    """What one forward gives.

    Attributes:
        logits_BTV: next-token logits; T is 1 after a prefill (the last token of each row).
        taps: hidden states [B, T, E] by tap; tap k > 0 is the output of layer k (transformers' `hidden_states[k]`),
            0 the embeddings, FINAL the state after the final norm.
    """

    logits_BTV: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """Which model this is.

    Attributes:
        spec: what to pass to `load_target` to get it again (a short name, a hub id or a folder).
        name: what people call it.
        fingerprint: hash of the architecture and of sampled weights rounded to bfloat16; equal for the same weights
            in float32 and bfloat16.
    """

    spec: str
    name: str
    fingerprint: str


class Target:
    """A frozen causal language model, ready for tree decoding.

    Args:
        model: a transformers causal language model; it is put in eval mode and its parameters are frozen.
        tokenizer: its tokenizer; may be None where no text is read or written.
        spec: what to pass to `load_target` to get it again.

    Raises:
        UserError: when the model's attention cannot take a token tree; the message gives the reason.
    """

    def __init__(self, model: Any, tokenizer: Any = None, spec: str = "") -> None:
        self.model = model.eval()
        self.model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.spec = spec
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.layers = _layers(self.decoder, self.config.num_hidden_layers)
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.window = _sliding_window(self.config)
        self._captured: dict[int, Tensor] = {}
        self._tapped: tuple[int, ...] = ()
        self._hooking = threading.Lock()
        self._hooks: list[Any] = []
        self._stock_attention = self.config._attn_implementation
        _refuse_layers(self.name, self.config)
        self.config._attn_implementation = ATTENTION
        self.kv_shapes = self._probe_kv_shapes()
        self._check_tree()

    @property
    def name(self) -> str:
        """A short name for messages and reports."""
        return self.spec or str(getattr(self.config, "_name_or_path", "")) or type(self.model).__name__

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.lm_head_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.lm_head_weight.device

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn: those of the generation config, else of the config, and the tokenizer's own."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            configured = getattr(self.config, "eos_token_id", None)
        ends = {*(configured if isinstance(configured, list) else [configured])}
        ends.add(getattr(self.tokenizer, "eos_token_id", None))
        return frozenset(end for end in ends if isinstance(end, int))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of one row takes."""
        numbers = sum(heads * size for pair in self.kv_shapes for heads, size in pair)
        return numbers * torch.finfo(self.dtype).bits // 8

    def identity(self) -> Identity:
        """Name and fingerprint; loading heads against another model is refused by it."""
        digest = hashlib.sha256()
        digest.update(f"{self.config.model_type} {self.num_layers} {self.hidden_size} {self.vocab_size}".encode())
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.bfloat16)
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(sample.view(torch.int16).numpy().tobytes())
        return Identity(self.spec, self.name, digest.hexdigest()[:32])

    # -- forwards ------------------------------------------------------------------------------------------------

    def new_cache(self, rows: int, capacity: int) -> TreeCache:
        """An empty KV cache for `rows` sequences of up to `capacity` tokens each, tree nodes included."""
        return TreeCache(self.kv_shapes, rows, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, cache: TreeCache, rows: Sequence[Sequence[int]], taps: Sequence[int] = ()) -> TargetOutput:
        """Read each row's tokens behind what the cache holds, and commit them.

        Rows of different length are padded on the right; what is tapped behind a row's own length is garbage.

        Returns:
            logits [B, 1, V] after each row's last token; taps [B, longest row, E].
        """
        lengths = [len(row) for row in rows]
        assert min(lengths) > 0, "a row to prefill has at least one token"
        width = max(lengths)
        tokens_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        visible_1TT = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()[None]
        depths_1T = torch.arange(width, device=self.device)[None]
        last = sorted({length - 1 for length in lengths})
        keep = torch.tensor(last, device=self.device)
        out = self._forward(cache, tokens_BT, visible_1TT, depths_1T, taps, keep)
        place_B = torch.tensor([last.index(length - 1) for length in lengths], device=self.device)
        out.logits_BTV = out.logits_BTV[torch.arange(len(rows), device=self.device), place_B][:, None]
        cache.commit([range(length) for length in lengths])
        return out

    @torch.inference_mode()
    def forward_tree(self, cache: TreeCache, tree: DraftTree, taps: Sequence[int] = ()) -> TargetOutput:
        """Read a token tree behind what the cache holds; commit the accepted path with `cache.commit`.

        Returns:
            logits [B, N, V] after each node; taps [B, N, E].
        """
        return self._forward(cache, tree.tokens_BN, tree.visible_BNN, tree.depths_BN, taps, 0)

    @torch.no_grad()  # not inference mode: heads train on these
    def hidden_states(self, rows: Sequence[Sequence[int]], taps: Sequence[int]) -> list[dict[int, Tensor]]:
        """Tapped states of whole sequences, each {tap: [its length, E]}; no logits are computed."""
        cache = self.new_cache(len(rows), max(len(row) for row in rows))
        width = max(len(row) for row in rows)
        tokens_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        visible_1TT = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()[None]
        keep = torch.zeros(1, dtype=torch.long, device=self.device)
        out = self._forward(cache, tokens_BT, visible_1TT, torch.arange(width, device=self.device)[None], taps, keep)
        return [{tap: out.taps[tap][b, : len(row)].clone() for tap in taps} for b, row in enumerate(rows)]

    def lm_head(self, final_state: Tensor) -> Tensor:
        """Logits [..., V] from states tapped at FINAL, as the model itself computes them."""
        logits: Tensor = self.model.get_output_embeddings()(final_state)
        return self.scale_logits(logits)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What the model does to its LM head's output: caps and scales of Gemma, Cohere and Granite."""
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scale := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / scale
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    @property
    def lm_head_weight(self) -> Tensor:
        """The frozen LM head, [V, E]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def embedding_weight(self) -> Tensor:
        """The frozen token embeddings, [V, E]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """The untouched transformers model, for `transformers.generate` as a baseline."""
        self._tap(())
        self.config._attn_implementation = self._stock_attention
        try:
            yield self.model
        finally:
            self.config._attn_implementation = ATTENTION

    def _forward(
        self,
        cache: TreeCache,
        tokens_BT: Tensor,
        visible_BTT: Tensor,
        depths_BT: Tensor,
        taps: Sequence[int],
        keep: int | Tensor,
    ) -> TargetOutput:
        self._tap(tuple(taps))
        width = tokens_BT.shape[1]
        seen = cache.begin(width)
        if len(set(cache.lengths)) == 1:
            lengths_B1 = torch.full((1, 1), cache.lengths[0], device=self.device)
        else:
            lengths_B1 = torch.tensor(cache.lengths, device=self.device)[:, None]
        # Near the end of the context a tree reaches past it. Those nodes are never emitted, but learned position tables
        # have no row for them, and some rotary scalings change for all tokens of a forward that passes the limit.
        positions_BT = (lengths_B1 + depths_BT).clamp(max=self.max_length - 1).expand(tokens_BT.shape)
        mask = self._mask(lengths_B1, visible_BTT, positions_BT, width, seen)
        out = self.model(
            input_ids=tokens_BT,
            attention_mask=mask,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        taken = {tap: self._captured[tap] for tap in taps}
        self._captured.clear()
        return TargetOutput(out.logits, taken)

    def _mask(
        self, lengths_B1: Tensor, visible_BTT: Tensor, positions_BT: Tensor, width: int, seen: int
    ) -> Tensor | None:
        """Additive mask [B or 1, 1, T, S]: the committed prefix, then the tree's own visibility."""
        one_length = lengths_B1.shape[0] == 1
        windowed = self.window is not None and seen > self.window
        if width == 1 and one_length and not windowed:
            return None  # the only token sees everything
        rows = max(lengths_B1.shape[0], visible_BTT.shape[0])
        slots_S = torch.arange(seen, device=self.device)
        allowed_BTS = (slots_S < lengths_B1)[:, None].expand(rows, width, seen).clone()
        if one_length:
            allowed_BTS[:, :, seen - width :] = visible_BTT
        else:
            places_BTT = (lengths_B1[:, None] + torch.arange(width, device=self.device)).expand(rows, width, width)
            allowed_BTS.scatter_(2, places_BTT, visible_BTT.expand(rows, width, width))
        sliding = None
        if self.window is not None and windowed:
            slot_positions_BS = slots_S.expand(positions_BT.shape[0], seen).clone()
            places_BT = (lengths_B1 + torch.arange(width, device=self.device)).expand(positions_BT.shape)
            slot_positions_BS.scatter_(1, places_BT, positions_BT)
            near_BTS = positions_BT[:, :, None] - slot_positions_BS[:, None] < self.window
            sliding = self._additive(allowed_BTS & near_BTS)
        return attach(TreeMask(self._additive(allowed_BTS), sliding))

    def _additive(self, allowed_BTS: Tensor) -> Tensor:
        mask = torch.zeros(allowed_BTS.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed_BTS, float("-inf"))[:, None]

    # -- taps ----------------------------------------------------------------------------------------------------

    def _tap(self, taps: tuple[int, ...]) -> None:
        """Hook the layers whose states are asked for; does nothing when they are hooked already.

        Forwards with the same taps may run in several threads when nothing is tapped.
        """
        with self._hooking:
            if taps != self._tapped:
                self._hook_all(taps)

    def _hook_all(self, taps: tuple[int, ...]) -> None:
        for tap in taps:
            if tap != FINAL and not 0 <= tap <= self.num_layers:
                raise UserError(
                    f"Tap {tap} does not exist: {self.name} has {self.num_layers} layers.",
                    f"Choose taps from 0 (embeddings) to {self.num_layers}, or {FINAL} for the final state.",
                )
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._hook(tap) for tap in taps]
        self._tapped = taps

    def _hook(self, tap: int) -> Any:
        def store(_module: nn.Module, _args: Any, output: Any) -> None:
            state = output if isinstance(output, Tensor) else output[0]
            self._captured[tap] = state

        def store_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._captured[tap] = args[0] if args else kwargs["hidden_states"]

        if tap == FINAL:
            return self.decoder.register_forward_hook(store)
        if tap == 0:
            return self.layers[0].register_forward_pre_hook(store_input, with_kwargs=True)
        return self.layers[tap - 1].register_forward_hook(store)

    # -- checks --------------------------------------------------------------------------------------------------

    def _probe_kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Key and value shapes of every layer, read from a one-token forward rather than guessed from the config."""
        cache = DynamicCache()
        with torch.inference_mode():
            self.model(torch.zeros(1, 1, dtype=torch.long, device=self.device), past_key_values=cache, use_cache=True)
        if len(cache.layers) != self.num_layers:
            raise _cannot_tree(self.name, f"only {len(cache.layers)} of its {self.num_layers} layers keep a KV cache")
        return [
            ((layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3]))
            for layer in cache.layers
        ]

    def _check_tree(self) -> None:
        """A tree forward must agree with the same tokens read one path at a time; a wrong mask is off by far more."""
        shape = TreeShape.from_paths([(0, 0), (1, 0)])
        prefix = [1 + i % (self.vocab_size - 1) for i in range(3)]
        tokens = [(7 * i + 2) % self.vocab_size for i in range(shape.size)]
        try:
            cache = self.new_cache(1, len(prefix) + shape.size)
            self.prefill(cache, [prefix])
            tree_NV = self.forward_tree(
                cache, DraftTree.from_shape(torch.tensor([tokens], device=self.device), shape)
            ).logits_BTV[0]
            path = [0, 2, 4]  # root, second child, its child
            alone = self.new_cache(1, len(prefix) + len(path))
            self.prefill(alone, [prefix])
            path_tree = DraftTree.from_shape(
                torch.tensor([[tokens[node] for node in path]], device=self.device), TreeShape.chain(2)
            )
            path_KV = self.forward_tree(alone, path_tree).logits_BTV[0]
        except (RuntimeError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise _cannot_tree(self.name, f"{type(error).__name__}: {error}") from error
        difference = (tree_NV[path].float() - path_KV.float()).abs().max().item()
        scale = path_KV.float().std().item()
        # bfloat16 rounds logits by about 1 % of their spread; a mask that leaks or hides a token moves them by ~100 %.
        if not difference <= 0.25 * scale + 1e-6:
            raise _cannot_tree(self.name, f"logits of a tree differ from those of its path by {difference:.3g}")


def _layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's list of layers, whatever the architecture calls it."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(decoder).__name__} has no list of {count} layers to tap.", "Use a decoder-only language model."
    )


def _sliding_window(config: Any) -> int | None:
    """Window of the sliding layers, or None when every layer sees everything."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return int(window) if window else None


def _refuse_layers(name: str, config: Any) -> None:
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _TREE_LAYERS)
    if unknown:
        raise _cannot_tree(name, f"its layers of type {', '.join(unknown)} keep a running state or fixed chunks")


def _cannot_tree(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot verify a token tree: {reason}.",
        "Use a target whose attention takes a mask (Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, most MoE models).",
    )
