"""Record the target's decoder once and replay it for forwards of a few tokens.

The recording (see `tape`) covers one text. A batch is replayed as a single row, since only attention mixes tokens; it
restores the batch shape and writes to the cache. Operators are rewritten where that pays (see `rewrites`).

A model that cannot be recorded, or whose replay gives different logits, runs through its modules; `Target.eager` gives
the reason. So do long texts, except in 8 bits. On a GPU, trees run as CUDA graphs of the replay (see `graphs`).

Shape suffixes: B rows, T tokens of a row, M = B * T, Q query heads, H key-value heads, D head size, E hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import is_not
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from headstart.kernels.prepacked import MAX_ROWS, drop
from headstart.replay.attention import ForwardContext, Scores, causal_attention, current_forward, run
from headstart.replay.patch import FINAL
from headstart.replay.products import PackedLinear, has_matrix
from headstart.replay.rewrites import AttentionCall, rewrite
from headstart.replay.steps import Steps, Weights, join_steps
from headstart.replay.tape import NotRecordable, clean, record

PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Types of plain weights, neither packed nor sharded."""
_COUNTS = (11, 13)
"""Token counts of the two recordings."""


class RecordingCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Stand-in for cache and attention during recording: stores nothing, and returns the new keys and values."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(layers=[])
        self._recorder = recorder
        self._layer_of: dict[int, tuple[int, Tensor]] = {}  # by id of the keys, which are kept so that it stays unique

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sliding: bool) -> Tensor:
        """Causal attention of a text without a prefix, [1, T, Q, D_v]; recorded as a `AttentionCall`."""
        if id(key) not in self._layer_of:
            raise NotRecordable("a layer attends over keys of another one")
        with self._recorder.deaf():
            out = causal_attention(query, key, value, scores).transpose(1, 2).contiguous()
        site = AttentionCall(self._layer_of[id(key)][0], replace(scores, sink=None), sliding)
        self._recorder.note(site, ((query, key, value, scores.sink), {}), out)
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
    """A replay that returns the states of `layers`: operator by operator, and with joined `steps`."""

    layers: Sequence[int]
    by_operator: Callable[..., Sequence[Tensor]]
    in_steps: Callable[..., Sequence[Tensor]]
    steps: Sequence[Steps]


class Replay:
    """A decoder's recorded forward.

    Args:
        model: in eval mode, with the hooks of `layers` in place; not kept.
        layers: layers to return states of, see `TargetOutput`.
        packs: whether weights may be prepacked.
        int8: whether to prepack them in 8 bits.

    Raises:
        NotRecordable: with the reason.

    Attributes:
        graphs: CUDA graphs of the replay, on a GPU (see `headstart.replay.graphs`).
        rounds: why a replay on a CPU is not batch-invariant; None if it is.
    """

    def __init__(self, model: Any, layers: Sequence[int], device: torch.device, packs: bool, int8: bool) -> None:
        decoder = model.get_decoder()
        self._decoder, self.layers, self._int8 = decoder, list(layers), int8
        self.graphs: Any = None
        refuse_others(model, decoder)
        vocab_size = decoder.get_input_embeddings().num_embeddings
        self._modules = list(decoder.modules())

        def code(recorder: Any, tokens_1T: Tensor, positions_1T: Tensor, mask_11TT: Tensor) -> list[Tensor]:
            forward = ForwardContext(aux_layers=frozenset(layers), recording=RecordingCache(recorder))
            with run(forward):
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

        tape = record(code, ("tokens_1M", "positions_1M", "mask"), inputs, _COUNTS)
        self._known = list(_places(decoder, tape.constants))
        clean(tape.graph)
        self.products = rewrite(tape.graph, device, packs, int8)
        drop(weight for product in self.products for weight in product.weights)
        self._tape, self._weights, self._replays = tape, Weights(tape.graph), dict[frozenset[int], _Compiled]()
        self.rounds = self._why_it_rounds()

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor) -> dict[int, Tensor]:
        """Return states [B, T, E] by layer; needs a current forward with a cache."""
        shape, count, forward = tokens_BT.shape, tokens_BT.numel(), current_forward()
        assert forward is not None, "a forward of ours"
        compiled = self._replays.get(forward.aux_layers) or self._compile(forward.aux_layers)
        function = compiled.by_operator
        if compiled.steps and all(steps.serves(forward) for steps in compiled.steps):
            function, forward.weights = compiled.in_steps, self._weights.now()
        states = function(tokens_BT.reshape(1, -1), positions_BT.reshape(1, -1), None, count)
        return {layer: state.view(*shape, -1) for layer, state in zip(compiled.layers, states, strict=True)}

    def _compile(self, aux_layers: frozenset[int]) -> _Compiled:
        layers = [FINAL, *sorted(aux_layers - {FINAL})]
        tape = self._tape.giving([self.layers.index(layer) for layer in layers])
        by_operator, steps = tape.compile(), join_steps(tape.graph)
        in_steps = tape.compile() if steps else by_operator
        self._replays[aux_layers] = compiled = _Compiled(layers, by_operator, in_steps, steps)
        return compiled

    def serves(self, tokens: int, bits: bool) -> bool:
        """Whether to replay a forward of `tokens` in total."""
        # Modules are not bit-exact. Targets in 8 bits always replay, so that only the 8-bit copy is kept.
        return bits or self._int8 or tokens <= MAX_ROWS

    def _why_it_rounds(self) -> str | None:
        matrices = sum(map(has_matrix, self._decoder.modules()))
        if sum(len(product.sizes) for product in self.products) < matrices:
            return "torch computes some of its products"
        sites = [node for node in self._tape.graph.nodes if isinstance(node.target, AttentionCall)]
        if any(not node.target.scores.plain or node.args[3] is not None for node in sites):
            return "torch computes its attention, which has soft caps or sinks"
        return None

    def holds(self, model: nn.Module) -> bool:
        """Whether modules and weights are the recorded ones, and the model has no foreign hooks."""
        modules = list(self._decoder.modules())
        if len(modules) != len(self._modules) or any(map(is_not, modules, self._modules)):
            return False
        if not all(getattr(module, name, None) is tensor for module, name, tensor in self._known) or _hooked(model):
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


def refuse_others(model: nn.Module, decoder: nn.Module) -> None:
    """Refuse a model with foreign hooks or weights, which may change unnoticed."""
    if hooked := _hooked(model):
        raise NotRecordable(f"{hooked} has hooks or a forward from other code")
    if not isinstance(cast(Any, decoder).get_input_embeddings(), nn.Embedding):
        raise NotRecordable("its embeddings are not an nn.Embedding")
    for name, module in decoder.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise NotRecordable(f"{name} belongs to an adapter, which may be switched off")
        if any(type(weight) not in PLAIN for weight in module.parameters(False)):
            raise NotRecordable(f"{name} has weights that are packed, or sharded over processes")


def _hooked(model: nn.Module) -> str | None:
    """Name a module with a foreign hook or forward: not its class's, transformers' or ours."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        forward = vars(module).get("forward")
        if any(not _is_ours(hook) for hook in hooks) or not (forward is None or _is_ours(forward)):
            return name or type(module).__name__
    return None


def _is_ours(function: Any) -> bool:
    if isinstance(function, PackedLinear):
        return bool(function.is_stock)
    function = getattr(function, "func", function)  # of a partial
    module: str = function.__module__
    return module.startswith(("headstart.", "transformers."))


def _places(decoder: nn.Module, constants: Sequence[Tensor]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Find these tensors in the decoder: (module, name, tensor)."""
    wanted = {id(tensor): tensor for tensor in constants}
    for module in decoder.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in wanted:
                yield module, name, wanted[id(tensor)]
