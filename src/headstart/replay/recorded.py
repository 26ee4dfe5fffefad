"""Record the target's decoder once and replay it for forwards of a few tokens.

Takes a transformers decoder; gives a `Replay`, a function from token ids and positions to hidden states that calls the
decoder's operators without its modules. On a CPU most of them run as C steps (see `steps`), on a GPU trees run as CUDA
graphs of the replay (see `cuda_graphs`).

The recording (see `recorder`) covers one text. A batch is replayed as a single row, since only attention mixes tokens;
attention restores the batch shape and writes to the cache. Operators are rewritten where that pays (see `rewrites`).

A model runs through its modules if it cannot be recorded, or its replay gives other logits; `Target.eager` gives the
reason. Forwards of
more than `MAX_ROWS` tokens also run through the modules, unless they are int8 or batch-invariant (`Replay.serves`).

Shape suffixes: B rows, T tokens of a row, M = B * T, Q query heads, H key-value heads, D head size, E hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import is_not
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from transformers.cache_utils import Cache

from headstart.kernels.prepacked import MAX_ROWS, drop
from headstart.replay.attention import ForwardContext, ScoreOptions, activate, causal_attention, current_forward
from headstart.replay.patch import FINAL
from headstart.replay.products import PrepackedForward, has_matrix
from headstart.replay.recorder import NotRecordable, compile_graph, record, remove_unused, select
from headstart.replay.rewrites import AttentionCall, rewrite
from headstart.replay.steps import Steps, Weights, group_steps

PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Types of plain weights, neither packed nor sharded."""
_COUNTS = (11, 13)
"""Token counts of the two recordings."""


class RecordingCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Stand-in for cache and attention during recording: stores nothing, and returns the new keys and values."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(layers=[])
        self._recorder = recorder
        self._layer_of: dict[int, tuple[int, Tensor]] = {}  # by id of the key tensor, kept alive for it

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreOptions, sliding: bool) -> Tensor:
        """Attend causally over a text without a prefix, [1, T, Q, D_v]; recorded as an `AttentionCall`."""
        if id(key) not in self._layer_of:
            raise NotRecordable("a layer attends over keys of another one")
        with self._recorder.pause():
            out = causal_attention(query, key, value, scores).transpose(1, 2).contiguous()
        attention = AttentionCall(self._layer_of[id(key)][0], replace(scores, sink=None), sliding)
        self._recorder.add(attention, (query, key, value, scores.sink), {}, out)
        return out

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self._layer_of[id(key_states)] = layer_idx, key_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return int(query_length), 0


@dataclass(frozen=True)
class _Compiled:
    """The replay for one set of `layers`, compiled twice: with one call per operator, and with grouped `steps`."""

    layers: Sequence[int]
    by_operator: Callable[..., Sequence[Tensor]]
    in_steps: Callable[..., Sequence[Tensor]]
    steps: Sequence[Steps]


class Replay:
    """A decoder's recorded forward, callable in a `ForwardContext` with a cache.

    Args:
        model: in eval mode, with the hooks of `layers` in place; only its decoder is kept.
        layers: layers to return states of, see `TargetOutput`.
        packs: whether weights may be prepacked.
        int8: whether to prepack them in 8 bits.

    Raises:
        NotRecordable: with the reason.

    Attributes:
        cuda_graphs: CUDA graphs of the replay, on a GPU (see `cuda_graphs`).
        not_invariant: why a replay on a CPU is not batch-invariant; None if it is.
    """

    def __init__(self, model: Any, layers: Sequence[int], device: torch.device, packs: bool, int8: bool) -> None:
        decoder = model.get_decoder()
        self._decoder, self.layers, self._int8 = decoder, list(layers), int8
        self.cuda_graphs: Any = None
        _refuse_foreign_code(model, decoder)
        vocab_size = decoder.get_input_embeddings().num_embeddings
        self._modules = list(decoder.modules())

        def code(recorder: Any, tokens_1T: Tensor, positions_1T: Tensor, mask_11TT: Tensor) -> list[Tensor]:
            forward = ForwardContext(aux_layers=frozenset(layers), recording=RecordingCache(recorder))
            with activate(forward):
                decoder(
                    input_ids=tokens_1T,
                    attention_mask=mask_11TT,
                    position_ids=positions_1T,
                    past_key_values=forward.recording,
                    use_cache=True,
                )
            return [forward.states[layer] for layer in layers]

        def inputs(count: int) -> list[Tensor]:
            positions_1T = torch.arange(count, device=device)[None]
            mask_TT = torch.full((count, count), float("-inf"), device=device).triu_(1)
            return [(positions_1T + count % 3) % vocab_size, positions_1T, mask_TT[None, None]]

        self._graph = graph = record(code, ("tokens_1M", "positions_1M", "mask"), inputs, _COUNTS)
        self._recorded_tensors = list(_attributes_of(decoder, graph))
        remove_unused(graph)
        self.products = rewrite(graph, device, packs, int8)
        drop(weight for product in self.products for weight in product.weights)
        self._weights, self._replays = Weights(graph), dict[frozenset[int], _Compiled]()
        self.not_invariant = self._why_not_invariant()

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor) -> dict[int, Tensor]:
        """Return states [B, T, E] by layer; needs a current forward with a cache."""
        shape, count, forward = tokens_BT.shape, tokens_BT.numel(), current_forward()
        assert forward is not None, "activated by the caller"
        compiled = self._replays.get(forward.aux_layers) or self._compile(forward.aux_layers)
        function = compiled.by_operator
        if compiled.steps and all(steps.serves(forward) for steps in compiled.steps):
            function, forward.weights = compiled.in_steps, self._weights.now()
        states = function(tokens_BT.reshape(1, -1), positions_BT.reshape(1, -1), None, count)
        return {layer: state.view(*shape, -1) for layer, state in zip(compiled.layers, states, strict=True)}

    def _compile(self, aux_layers: frozenset[int]) -> _Compiled:
        layers = [FINAL, *sorted(aux_layers - {FINAL})]
        graph = select(self._graph, [self.layers.index(layer) for layer in layers])
        by_operator, steps = compile_graph(graph), group_steps(graph)
        in_steps = compile_graph(graph) if steps else by_operator
        self._replays[aux_layers] = compiled = _Compiled(layers, by_operator, in_steps, steps)
        return compiled

    def serves(self, tokens: int, batch_invariant: bool) -> bool:
        """Whether to replay a forward of `tokens` in total."""
        # Modules are not batch-invariant. Targets in 8 bits always replay, so that only the 8-bit copy is kept.
        return batch_invariant or self._int8 or tokens <= MAX_ROWS

    def _why_not_invariant(self) -> str | None:
        matrices = sum(map(has_matrix, self._decoder.modules()))
        if sum(len(product.sizes) for product in self.products) < matrices:
            return "torch computes some of its products"
        layers = [node for node in self._graph.nodes if isinstance(node.target, AttentionCall)]
        if any(not node.target.scores.fits_sdpa or node.args[3] is not None for node in layers):
            return "torch computes its attention, which has soft caps or sinks"
        return None

    def is_current(self, model: nn.Module) -> bool:
        """Whether modules and weights are the recorded ones, and the model has no foreign hooks; refreshes weights."""
        modules = list(self._decoder.modules())
        if len(modules) != len(self._modules) or any(map(is_not, modules, self._modules)):
            return False
        if any(getattr(module, name, None) is not tensor for module, name, tensor in self._recorded_tensors):
            return False
        if _foreign_hook(model):
            return False
        self._weights.refresh()
        return True


@dataclass
class Recorded:
    """Outcome of recording a target's forward, shared by copies of the target: the replay (None before the first
    recording), or why recording is impossible. The lock is held during recording."""

    replay: Replay | None = None
    refused: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _refuse_foreign_code(model: nn.Module, decoder: nn.Module) -> None:
    """Refuse a model with foreign hooks or weights, which may change unnoticed."""
    if hooked := _foreign_hook(model):
        raise NotRecordable(f"{hooked} has hooks or a forward from other code")
    if not isinstance(cast(Any, decoder).get_input_embeddings(), nn.Embedding):
        raise NotRecordable("its embeddings are not an nn.Embedding")
    for name, module in decoder.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise NotRecordable(f"{name} belongs to an adapter, which may be switched off")
        if any(type(weight) not in PLAIN for weight in module.parameters(False)):
            raise NotRecordable(f"{name} has weights that are packed, or sharded over processes")


def _foreign_hook(model: nn.Module) -> str | None:
    """Return the name of the first module with a hook, or an overridden forward, from other code; None if none has."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        forward = vars(module).get("forward")
        if any(not _is_trusted(hook) for hook in hooks) or not (forward is None or _is_trusted(forward)):
            return name or type(module).__name__
    return None


def _is_trusted(function: Any) -> bool:
    if isinstance(function, PrepackedForward):
        return bool(function.is_stock)
    function = getattr(function, "func", function)  # of a partial
    module: str = function.__module__
    return module.startswith(("headstart.", "transformers."))


def _attributes_of(decoder: nn.Module, graph: fx.Graph) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Find the constants of a graph in the decoder: (module, attribute name, tensor)."""
    constants = {id(node.meta["constant"]) for node in graph.nodes if node.op == "get_attr"}
    for module in decoder.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in constants:
                yield module, name, tensor
