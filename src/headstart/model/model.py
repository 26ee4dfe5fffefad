"""The target model: prefill, tree forwards, aux hidden states.

Shape suffixes: B rows, T tokens of one forward, V vocabulary, E hidden size, S cache visible slots, N tree nodes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from headstart.errors import UserError, nearest
from headstart.kernels import cpu_attention
from headstart.kernels.prepacked import MAX_ROWS, can_pack, drop, stored_as_bfloat16
from headstart.model.checking import FAILS, check_tree, require_batch_invariance
from headstart.model.frozen import FrozenModel, cannot_tree, refuse_layers
from headstart.model.identity import Origin
from headstart.replay.attention import CHUNK, ForwardContext, activate, disable_cudnn_attention, tree_mask
from headstart.replay.cache import KVLayout, TreeCache
from headstart.replay.chains import ChainCache, has_linear_attention, read_chains
from headstart.replay.cuda_graphs import Inputs, Outputs, TargetGraphs
from headstart.replay.patch import FINAL, ModelPatch
from headstart.replay.recorded import Recorded, Replay
from headstart.replay.recorder import NotRecordable
from headstart.support.uploads import upload
from headstart.tree.tree import TreeBatch

Exact = Literal["auto", "bits", "tokens"]
"""Guarantee of tree verification, see `Target.exact`."""

_STATE_TOKENS = 8192
"""Maximum tokens per forward of `hidden_states`, unless a single row has more."""
_MAX_PADDING = 64
"""Padding tokens always allowed in a group of rows: a separate forward takes as long."""


@dataclass
class TargetOutput:
    """Next-token logits (T is 1 after a prefill) and aux hidden states [B, T, E] by layer: k > 0 is the output of layer
    k, 0 the embeddings, FINAL the state after the final norm. As transformers' `hidden_states`, except that its last
    entry is FINAL."""

    logits_BTV: Tensor
    aux_hidden_states: dict[int, Tensor] = field(default_factory=dict)


class Target(FrozenModel):
    """A frozen causal language model in eval mode, ready for tree decoding; see `FrozenModel`. On a GPU, disables cuDNN
    attention for the rest of the process (see `disable_cudnn_attention`).

    Args:
        exact: see the attribute; "auto" means "tokens".

    Attributes:
        kv_layers: KV layout of each layer.
        chains_only: whether it verifies only chains, because some layers keep a running state (see `chains`).

    Raises:
        UserError: the model does not support token trees; it stays frozen, without our hooks.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, spec: str = "", exact: Exact = "auto", origin: Origin | None = None
    ) -> None:
        super().__init__(model, tokenizer, spec, origin)
        refuse_layers(self.name, self.config)
        if self.device.type == "cuda":
            disable_cudnn_attention()
        model.eval().requires_grad_(False)
        self._exact: Literal["bits", "tokens"] = "tokens"  # until it is checked
        self._int8 = False
        self._recorded = Recorded()
        self.chains_only = has_linear_attention(self.config)
        self._patch = ModelPatch(self.decoder, self.layers, model.get_output_embeddings())
        self._recompute_limit = self._patch.limit if _recomputes_cache(model, self.config) else None
        try:
            self.kv_layers, self.dtype = self._probe()
            check_tree(self)
            self.exact = exact
        except BaseException:
            self._patch.release()
            raise
        weakref.finalize(self, self._patch.finalize)

    @property
    def exact(self) -> Literal["bits", "tokens"]:
        """Guarantee of tree verification; may be set at any time.

        "bits": a node's logits, hidden states, keys and values are bit-exact with a single step after the same text, so
        greedy text in bfloat16 equals plain decoding's. Refused unless the whole target runs on the compiled,
        batch-invariant kernels. "tokens": equal up to rounding, so near-ties in short dtypes may differ.
        """
        return self._exact

    @exact.setter
    def exact(self, exact: Exact) -> None:
        if exact not in get_args(Exact):
            raise UserError(f"exact is {exact!r}.", nearest(exact, get_args(Exact)))
        if exact == "bits":
            require_batch_invariance(self)
        self._exact = "bits" if exact == "bits" else "tokens"

    @property
    def eager(self) -> str | None:
        """Why forwards run through the model's modules; None if small forwards are replayed."""
        return self.record().refused

    @property
    def replays(self) -> bool:
        """Whether small forwards are replayed, as of the newest cache; cheaper than `eager`."""
        recorded = self._recorded
        return (recorded if recorded.replay or recorded.refused else self.record()).refused is None

    @property
    def forwards(self) -> str:
        """Describe how tree forwards run, for reports."""
        if self.eager is not None:
            return f"through the model's modules: {self.eager}"
        if self._graphs is None:
            return "replayed"
        return "CUDA graphs" if self._graphs.refused is None else f"replayed, no CUDA graphs: {self._graphs.refused}"

    @property
    def spare_bytes(self) -> int:
        """Bytes of pooled cache memory, which is freed on demand."""
        return 0 if self._graphs is None else self._graphs.spare_bytes

    @property
    def _graphs(self) -> TargetGraphs | None:
        replay = self._recorded.replay
        return None if replay is None else replay.cuda_graphs

    @property
    def prepacked(self) -> bool:
        return bool(self._patch.prepacked)

    @property
    def stored_as_bfloat16(self) -> bool:
        """Whether the prepacked copies of float32 weights are in bfloat16 (see `prepacked`)."""
        modules: list[Any] = self._patch.prepacked
        return bool(modules) and all(stored_as_bfloat16(module.weight) for module in modules)

    @property
    def kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(layer.keys, layer.values) for layer in self.kv_layers]

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(self.kv_bytes_by_device.values())

    @property
    def kv_bytes_by_device(self) -> dict[torch.device, int]:
        count: Counter[torch.device] = Counter()
        for layer in self.kv_layers:
            count[layer.device] += layer.bytes_per_slot
        return dict(count)

    def forward_bytes(self, rows: int, slots: int) -> tuple[int, int]:
        """Estimate temporary bytes of a forward with `slots` visible: fixed, and per tree node."""
        heads = max(layer.keys[0] for layer in self.kv_layers)
        elements = max(sum(count * size for count, size in (layer.keys, layer.values)) for layer in self.kv_layers)
        query_heads = getattr(self.config, "num_attention_heads", None) or heads
        item = self.dtype.itemsize
        reading = min(CHUNK, slots) * slots * item + rows * slots * elements * (query_heads // heads) * item
        masks = (1 if self.window is None else 2) * (1 + query_heads // heads) * slots * item
        scores = 2 * query_heads * slots * item
        return reading, rows * (self.vocab_size * item + masks + scores)

    # -- forwards ------------------------------------------------------------------------------------------------

    def new_cache(self, rows: int, capacity: int) -> TreeCache:
        """Create an empty KV cache for `rows` sequences of up to `capacity` tokens each, tree nodes included."""
        self._patch.refresh()
        if self.exact == "bits":  # adapters or hooks may have been added since it was set
            require_batch_invariance(self)
        else:
            self.record()
        return self._empty_cache(rows, capacity)

    @torch.inference_mode()
    def prefill(self, cache: TreeCache, rows: Sequence[Sequence[int]], aux_layers: Sequence[int] = ()) -> TargetOutput:
        """Read and commit each row's tokens, long rows in chunks, and neighbours of similar length together.

        Returns:
            Logits [B, 1, V] after the last token; aux hidden states [B, longest row, E], garbage past a row's length.
        """
        lengths = [len(row) for row in rows]
        assert min(lengths) > 0, "a row to prefill has at least one token"
        if self.chains_only:
            return self._read_chains(cache, rows, aux_layers, last_only=True)
        tokens_BT = self._padded(rows)
        ends = [before + length for before, length in zip(cache.lengths, lengths, strict=True)]
        short = self._replays_texts(*tokens_BT.shape) and len(group_by_length(lengths)) == 1
        if short or len(set(cache.lengths)) > 1:
            last = {row: length - 1 for row, length in enumerate(lengths)}
            out = self._read_tree(cache, TreeBatch.text(tokens_BT), aux_layers, logits_at=last, ends=ends)
            cache.commit([range(length) for length in lengths])
            return out
        if self._recompute_limit is not None:
            self._recompute_rows(cache, ends, self._recompute_limit)
        longest, (before, *_) = max(lengths), cache.lengths
        states: dict[int, Tensor] = {}
        logits_of: dict[int, Tensor] = {}  # by row, [1, V]
        for start in range(0, longest, CHUNK):
            left = [min(max(length - start, 0), CHUNK) for length in lengths]
            for first, stop in group_by_length(left):
                part = cache.slice_rows(first, stop)
                part.lengths = [before + start] * (stop - first)
                end = min(start + CHUNK, max(lengths[first:stop]))
                last = {row - first: lengths[row] - 1 - start for row in range(first, stop) if lengths[row] <= end}
                chunk_BT = tokens_BT[first:stop, start:end]
                out = self._read_causal(part, chunk_BT, aux_layers, last or {0: 0}, ends[first:stop])
                logits_of |= zip((first + row for row in last), out.logits_BTV, strict=False)
                for layer, chunk_BTE in out.aux_hidden_states.items():
                    if chunk_BT.shape == tokens_BT.shape:
                        states[layer] = chunk_BTE
                        continue
                    if layer not in states:
                        states[layer] = chunk_BTE.new_zeros(*tokens_BT.shape, chunk_BTE.shape[-1])
                    states[layer][first:stop, start:end] = chunk_BTE
        cache.lengths = ends
        return TargetOutput(torch.stack([logits_of[row] for row in range(len(rows))]), states)

    @torch.inference_mode()
    def forward_tree(self, cache: TreeCache, batch: TreeBatch, aux_layers: Sequence[int] = ()) -> TargetOutput:
        """Read token trees: logits [B, N, V] and aux hidden states [B, N, E]; accept paths with `cache.commit`."""
        if self.chains_only:
            if any(tree.parents != list(range(-1, tree.size - 1)) for tree in batch.trees):
                raise cannot_tree(self.name, "some of its layers keep a running state, so it verifies chains alone")
            return self._read_chains(cache, [tree.tokens for tree in batch.trees], aux_layers)
        self._check_aux_layers(aux_layers)
        replay = self._recorded.replay
        if replay is not None and replay.cuda_graphs is not None:
            out = replay.cuda_graphs(partial(self._graphed, replay), cache, batch, aux_layers)
            if out is not None:
                return TargetOutput(*out)
        return self._read_tree(cache, batch, aux_layers, 0 if self._patch.limit is None else batch.depth)

    @torch.no_grad()  # not inference mode: heads train on these
    def hidden_states(self, rows: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> list[dict[int, Tensor]]:
        """Read aux hidden states of complete sequences, each {layer: [length, E]}, splitting large batches."""
        self._patch.refresh()
        batch_size = max(1, _STATE_TOKENS // max(map(len, rows)))
        states: list[dict[int, Tensor]] = []
        for first in range(0, len(rows), batch_size):
            group = rows[first : first + batch_size]
            out = self._read_causal(None, self._padded(group), aux_layers, {0: 0}, [len(row) for row in group])
            states += [
                {aux_layer: out.aux_hidden_states[aux_layer][b, : len(row)].clone() for aux_layer in aux_layers}
                for b, row in enumerate(group)
            ]
        return states

    def in_int8(self) -> Target:
        """Return this target with 8-bit products (weights and activations), for writing data.

        Returns itself if unsupported: on a GPU, without AVX2, with tiles (AMX, faster still), or if weights are not
        prepacked or forwards not replayed."""
        modules: list[Any] = self._patch.prepacked
        if not modules or not all(can_pack(module.weight, int8=True) for module in modules) or self.eager is not None:
            return self
        int8 = copy(self)
        int8._int8, int8._exact, int8._recorded, int8._lender = True, "tokens", Recorded(), self
        weakref.finalize(int8, drop, [module.weight for module in modules])
        return self if int8.eager is not None else int8

    def record(self) -> Recorded:
        """Record the model's forward (see `recorded`) if needed. `new_cache` calls this; call it ahead when timing."""
        recorded = self._recorded
        with recorded.lock:
            is_current = recorded.replay is not None and recorded.replay.is_current(self.model)
            if recorded.refused is None and not is_current:
                recorded.replay = None  # forwards that run meanwhile go through the modules
                recorded.replay, recorded.refused = self._record()
        return recorded

    def release(self) -> None:
        """Undo our patches of the model, which stays frozen; the next forward applies them again."""
        self._patch.release()

    def _empty_cache(self, rows: int, capacity: int) -> TreeCache:
        if self.chains_only:
            return cast(TreeCache, ChainCache(self.config, rows))  # same interface
        graphs = self._graphs
        if graphs is not None and graphs.refused is None:
            return graphs.new_cache(rows, capacity, (*self.model.parameters(), *self.model.buffers()))
        return TreeCache(self.kv_layers, rows, capacity, keep_tokens=self._recompute_limit is not None)

    def _read_causal(
        self,
        cache: TreeCache | None,
        tokens_BT: Tensor,
        aux_layers: Sequence[int],
        logits_at: Mapping[int, int],
        ends: Sequence[int],
    ) -> TargetOutput:
        """Read texts with causal attention. The cache is written, not committed; it may be None, and all its rows have
        the same length. `logits_at` maps rows to the token index to compute logits for; `ends` has each row's final
        text length, later chunks included."""
        rows, width = tokens_BT.shape
        before = cache.lengths[0] if cache is not None else 0
        positions_1T = torch.arange(before, before + width, device=self.device)[None].clamp(max=self.max_length - 1)
        forward = ForwardContext(None, frozenset(aux_layers), causal=True, window=self.window)
        self._set_text(forward, (rows, width), logits_at, ends)
        return self._run(forward, cache, tokens_BT, positions_1T.expand(rows, width))

    def _set_text(
        self, forward: ForwardContext, shape: Sequence[int], logits_at: Mapping[int, int], ends: Sequence[int]
    ) -> None:
        """Set the fields of a forward that reads texts, see `_read_causal`."""
        forward.logits_at = upload([list(logits_at), list(logits_at.values())], self.device)
        if self._patch.limit is not None:
            forward.text_lengths_BT = torch.tensor(ends, device=self.device)[:, None].expand(*shape)
            forward.text_length_range = min(ends), max(ends)

    def _replays_texts(self, rows: int, width: int) -> bool:
        """Whether to read a short text as a tree, with attention in C."""
        few = width <= CHUNK and rows * width <= MAX_ROWS and self._recorded.replay is not None
        return few and cpu_attention.serves(width, self.dtype, self.device)

    def _read_chains(
        self, cache: Any, rows: Sequence[Sequence[int]], aux_layers: Sequence[int], last_only: bool = False
    ) -> TargetOutput:
        self._check_aux_layers(aux_layers)
        self._patch.ensure(aux_layers)
        return TargetOutput(*read_chains(self.model, cache, rows, aux_layers, last_only, self.device, self.max_length))

    def _read_tree(
        self,
        cache: TreeCache,
        batch: TreeBatch,
        aux_layers: Sequence[int],
        depth: int = 0,
        logits_at: Mapping[int, int] | None = None,
        ends: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Read trees; the cache is written, not committed. See `_read_causal`.

        `depth` is the batch's, for length-dependent rotary frequencies. Only texts have `logits_at` and `ends`; trees
        count as read token by token.
        """
        if self._recompute_limit is not None:
            self._recompute_rows(cache, ends or [length + 1 for length in cache.lengths], self._recompute_limit)
        width = batch.size
        seen = max(cache.lengths) + width
        lengths_B1 = cache.lengths_B1(self.device)
        # Nodes past the context length are never emitted, but learned position tables have no row for them, and some
        # rotary scalings change for all tokens of a forward that passes the limit.
        shape = batch.tokens_BN.shape
        positions_BN = (lengths_B1 + batch.depths_BN).expand(shape)
        if seen > self.max_length:
            positions_BN = positions_BN.clamp(max=self.max_length - 1)
        mask = tree_mask(lengths_B1, batch.visible_BNN, positions_BN, self.window, self.dtype, seen)
        forward = ForwardContext(mask, frozenset(aux_layers), window=self.window)
        forward.batch_invariant = self.exact == "bits" and ends is None
        # Batch-invariant attention must run in C at every width, as for one token.
        if cpu_attention.serves(1 if forward.batch_invariant else width, self.dtype, self.device):
            if len(lengths_B1) == 1:
                forward.slots_B = torch.full((shape[0],), seen, device=self.device)
            else:
                forward.slots_B = (lengths_B1 + width).flatten()
        if logits_at is not None and ends is not None:
            self._set_text(forward, shape, logits_at, ends)
        elif self._patch.limit is not None:
            forward.text_lengths_BT = positions_BN + 1
            forward.text_length_range = min(cache.lengths) + 1, max(cache.lengths) + depth + 1
        return self._run(forward, cache, batch.tokens_BN, positions_BN)

    def _run(
        self, forward: ForwardContext, cache: TreeCache | None, tokens_BT: Tensor, positions_BT: Tensor
    ) -> TargetOutput:
        self._check_aux_layers(sorted(forward.aux_layers))
        self._patch.ensure(forward.aux_layers)
        forward.int8 = self._int8
        if cache is not None:
            cache.begin(tokens_BT.shape[1])
            if self._recompute_limit is not None:
                cache.write_tokens(tokens_BT)
        replay = self._recorded.replay
        if replay is not None and cache is not None and replay.serves(tokens_BT.numel(), forward.batch_invariant):
            return self._replay(replay, forward, cache, tokens_BT, positions_BT)
        with activate(forward):
            out = self.model(
                input_ids=tokens_BT,
                attention_mask=None if forward.mask is None else forward.mask.full_B1TS,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=0,
            )
        states = {layer: state.to(self.device) for layer, state in forward.states.items()}
        return TargetOutput(out.logits.to(self.device), states)

    def _replay(
        self, replay: Replay, forward: ForwardContext, cache: TreeCache, tokens_BT: Tensor, positions_BT: Tensor
    ) -> TargetOutput:
        forward.cache = cache
        with activate(forward):
            states = replay(tokens_BT, positions_BT)
            final = states[FINAL]
            if forward.logits_at is not None:
                rows, indices = forward.logits_at
                final, forward.logits_at = final[rows, indices][:, None], None
            return TargetOutput(self.lm_head(final), {layer: states[layer] for layer in forward.aux_layers})

    def _graphed(
        self, replay: Replay, inputs: Inputs, cache: TreeCache, seen: int, aux_layers: frozenset[int]
    ) -> Outputs:
        """`_read_tree` for a CUDA graph, independent of values on the host."""
        lengths_B1, visible_BNN = inputs.lengths_B1, inputs.visible_BNN
        positions_BN = (lengths_B1 + inputs.depths_BN).clamp(max=self.max_length - 1)
        mask = tree_mask(lengths_B1, visible_BNN, positions_BN, self.window, self.dtype, seen, padded_slots=True)
        forward = ForwardContext(mask, aux_layers, window=self.window)
        out = self._replay(replay, forward, cache, inputs.tokens_BN, positions_BN)
        return out.logits_BTV, out.aux_hidden_states

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, rows))
        return upload([[*row, *[0] * (width - len(row))] for row in rows], self.device)

    def can_read_in_parts(self, length: int) -> bool:
        """Whether a text of this length may be read in parts, as its rotary frequencies do not change on the way."""
        return self._patch.limit is None or length <= self._patch.limit

    def max_depth(self, cache: TreeCache) -> int | None:
        """Return the maximum depth of the next tree; None for no limit. Phi-3 recomputes its cache with other rotary
        frequencies once a text passes a limit, so nodes past the limit are valid only after that."""
        limit = self._recompute_limit
        if limit is None:
            return None
        return min((left for length in cache.lengths if (left := limit - length - 1) >= 0), default=None)

    def _recompute_rows(self, cache: TreeCache, ends: Sequence[int], limit: int) -> None:
        """Recompute the cache of rows that pass the limit of their rotary frequencies in this forward."""
        for row, (length, end) in enumerate(zip(cache.lengths, ends, strict=True)):
            if 0 < length <= limit < end:
                fresh = self._empty_cache(1, length)
                text_1T = cache.committed_tokens(row).to(self.device)
                for start in range(0, length, CHUNK):
                    self._read_causal(fresh, text_1T[:, start : start + CHUNK], (), {0: 0}, [end])
                    fresh.commit([range(min(CHUNK, length - start))])
                cache.load_row(row, fresh)

    @torch.inference_mode(False)  # the recording outlives the decoding that triggers it
    def _record(self) -> tuple[Replay | None, str | None]:
        """Record the forward and check its replay with `check_tree`; return it, or the reason on failure."""
        layers = [FINAL, *range(self.num_layers + 1)]
        if self.chains_only:
            return None, "its layers keep running states"
        if self._patch.limit is not None:
            return None, "its rotary frequencies depend on the length of the text"
        self._patch.ensure(layers)
        try:
            replay = Replay(self.model, layers, self.device, self.prepacked, self._int8)
            replaying = copy(self)  # other threads use the recording only after the check
            replaying._exact, replaying._recorded = "tokens", Recorded(replay)
            check_tree(replaying)
        except NotRecordable as reason:
            return None, str(reason)
        except (UserError, *FAILS) as error:
            return None, f"replaying it failed ({type(error).__name__}: {error})"
        if self.device.type == "cuda" and self.kv_bytes_by_device.keys() == {self.device}:
            replay.cuda_graphs = graphs = TargetGraphs(self.kv_layers)
            try:
                check_tree(replaying)
            except (UserError, *FAILS) as error:
                graphs.disable(f"replaying them failed ({type(error).__name__}: {error})")
        return replay, None

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_aux_layers(self, aux_layers: Sequence[int]) -> None:
        for aux_layer in aux_layers:
            if aux_layer != FINAL and not 0 <= aux_layer <= self.num_layers:
                raise UserError(
                    f"Layer {aux_layer} does not exist: {self.name} has {self.num_layers} layers.",
                    f"Choose layers from 0 (embeddings) to {self.num_layers}, or {FINAL} for the final state.",
                )

    def _probe(self) -> tuple[list[KVLayout], torch.dtype]:
        """Probe KV layouts and the dtype of hidden states with a forward: weights may be quantised or on several
        devices."""
        cache = DynamicCache(config=self.config) if self.chains_only else DynamicCache()
        self._patch.ensure([FINAL])
        with torch.inference_mode(), activate(ForwardContext(aux_layers=frozenset([FINAL]))) as forward:
            self.model(torch.zeros(1, 1, dtype=torch.long, device=self.device), past_key_values=cache, use_cache=True)
        if len(cache.layers) != self.num_layers:
            raise cannot_tree(self.name, f"only {len(cache.layers)} of its {self.num_layers} layers keep a KV cache")
        layers = [
            KVLayout.of(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None
        ]
        return layers, forward.states[FINAL].dtype


def group_by_length(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Group neighbouring rows of similar length, as (start, stop), to limit padding. Rows of length 0 are left out.

    >>> group_by_length([1, 1, 2, 100, 100, 120, 300]), group_by_length([2, 300, 0, 2, 2])
    ([(0, 3), (3, 6), (6, 7)], [(0, 1), (1, 2), (3, 5)])
    """
    groups: list[tuple[int, int]] = []
    start = 0
    for row in range(len(lengths) + 1):
        ends, part = row == len(lengths) or lengths[row] == 0, lengths[start : row + 1]
        if ends or len(part) * max(part) - sum(part) > max(_MAX_PADDING, 0.1 * sum(part)):
            if start < row:
                groups.append((start, row))
            start = row + ends
    return groups


def _recomputes_cache(model: Any, config: Any) -> bool:
    """Whether the model's `generate` drops its cache when a text passes the limit of its rotary frequencies."""
    overrides = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return overrides and hasattr(config, "original_max_position_embeddings")
