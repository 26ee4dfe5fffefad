"""How forwards of ours run through a transformers model beside the model's own.

Its parts ask, in every call, which forward runs in their thread (`attention.running`): forwards of ours in several
threads, and the model's own `generate` in another, do not see each other.

- Configs are replaced by a `Config` that names our attention to forwards of ours.
- Hooks on aux layers give the states to the forward that asks for them.
- Rotary embeddings whose frequencies depend on the length of the text choose them for each token.
- Linear attention keeps a copy of its state before the chain that is verified, see `chains`.
- Linear layers multiply with prepacked weights where that is faster (see `products`).
- The LM head reads the tokens alone whose logits are wanted.

Shape suffixes: B rows, T tokens of one forward, d components of a head.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.target.attention import NAME, running
from headstart.target.chains import is_linear, read_in_turn
from headstart.target.prepacked import drop, fits, refresh
from headstart.target.products import Matrix, can_prepack, is_matrix

FINAL = -1
"""The layer number of the last hidden state, after the final norm: what the LM head reads."""
_CHOOSER = "LM head"
"""Names the hook that is on no layer."""


class Config:
    """A model's config for one of its modules: the same, but for the attention of forwards of ours."""

    def __init__(self, config: PreTrainedConfig) -> None:
        object.__setattr__(self, "_config", config)

    @property
    def _attn_implementation(self) -> str | None:
        name: str | None = NAME if running() is not None else self._config._attn_implementation
        return name

    @property  # type: ignore[misc]  # typed as an attribute of every object
    def __class__(self) -> Any:  # isinstance sees the model's own kind of config
        return type(self._config)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __reduce__(self) -> tuple[type[Config], tuple[PreTrainedConfig]]:
        return Config, (self._config,)


class Fitting:
    """What one `Target` adds to its model. Rotary embeddings take other frequencies for texts of more tokens than
    `limit`, where it is not None."""

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, lm_head: nn.Module) -> None:
        self._decoder, self._layers, self._lm_head = decoder, layers, lm_head
        self._lock = threading.Lock()
        self._hooks: dict[int | str, Any] = {}
        self._undo: list[Callable[[], Any]] = []  # what gives modules back their configs and forwards
        self._fit()
        limits = [_limit(module, kind) for module in decoder.modules() for kind in _long_types(module)]
        self.limit = min(limits, default=None)

    def ensure(self, aux_layers: Iterable[int]) -> None:
        """Have everything in place for a forward with these aux layers."""
        if type(vars(self._decoder).get("config")) is not Config:
            self._fit()
        self._put_matrices()
        wanted: set[int | str] = {_CHOOSER, *aux_layers}
        missing = wanted - self._hooks.keys()
        if missing:
            with self._lock:
                for layer in missing - self._hooks.keys():
                    self._hooks[layer] = self._hook(layer)

    def refresh(self) -> None:
        """See whether prepacked weights are still those of their layers."""
        refresh(self._packed_weights())

    def release(self) -> None:
        """Take everything off again that this target has added; the next forward of ours puts it back."""
        self.forget()
        with self._lock:
            for undo in self._undo:
                undo()
            self._undo = []

    def forget(self) -> None:
        """Take the hooks off; configs, rotary embeddings and layers may serve other targets with the same model."""
        with self._lock:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks = {}

    def end(self) -> None:
        """The target is gone: take the hooks off, and free the memory of prepacked weights."""
        self.forget()
        drop(self._packed_weights())

    @cached_property
    def matrices(self) -> list[nn.Module]:
        """Every module that multiplies rows by weights, the LM head first."""
        modules = [*self._lm_head.modules(), *self._decoder.modules()]
        return [module for module in dict.fromkeys(modules) if is_matrix(module)]

    @cached_property
    def prepacked(self) -> list[nn.Module]:
        """Linear layers with a prepacked copy of their weights: none where memory has no room for all of them."""
        modules = [module for module in self.matrices if can_prepack(module)]
        return modules if fits(cast(Tensor, module.weight) for module in modules) else []

    def _packed_weights(self) -> Iterator[Tensor]:
        return (cast(Tensor, module.weight) for module in self.prepacked)

    def _put_matrices(self) -> None:
        ends = *self.prepacked[:1], *self.prepacked[-1:]
        if all(type(vars(module).get("forward")) is Matrix for module in ends):
            return  # another target of the same model may have fewer of its layers
        with self._lock:
            for module in self.prepacked:
                forward = vars(module).get("forward")
                if type(forward) is not Matrix:  # what somebody put there is part of it
                    self._replace(module, Matrix(module, forward))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.append(partial(_restore, module, vars(module).get("forward")))
        vars(module)["forward"] = forward

    def _fit(self) -> None:
        with self._lock:
            for module in self._decoder.modules():
                config = vars(module).get("config")
                if isinstance(config, PreTrainedConfig) and type(config) is not Config:
                    self._undo.append(partial(setattr, module, "config", config))
                    module.config = Config(config)  # type: ignore[assignment]  # stands in for it
                if _long_types(module) and "forward" not in vars(module):
                    self._replace(module, partial(_longrope_forward, module))
                elif is_linear(module) and "forward" not in vars(module):
                    self._replace(module, partial(read_in_turn, module))

    def _hook(self, layer: int | str) -> Any:
        if isinstance(layer, str):
            return self._lm_head.register_forward_pre_hook(_choose)
        if layer == FINAL:
            return self._decoder.register_forward_hook(partial(_keep_output, layer))
        if layer == 0:
            return self._layers[0].register_forward_pre_hook(_keep_input, with_kwargs=True)
        return self._layers[layer - 1].register_forward_hook(partial(_keep_output, layer))


def _restore(module: nn.Module, forward: Any) -> None:
    vars(module).pop("_headstart_twins", None)
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def _choose(_module: nn.Module, args: tuple[Any, ...]) -> Any:
    """The states of the tokens whose logits are wanted, [R, 1, E], in place of all, [B, T, E]."""
    forward = running()
    if forward is None or forward.wanted is None:
        return None
    rows, indices = (index.to(args[0].device) for index in forward.wanted)
    forward.wanted = None  # two targets may have the same model
    return (args[0][rows, indices][:, None], *args[1:])


def _keep_output(layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
    forward = running()
    if forward is not None and layer in forward.aux_layers:
        forward.captured[layer] = output if isinstance(output, Tensor) else output[0]


def _keep_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
    forward = running()
    if forward is not None and 0 in forward.aux_layers:
        forward.captured[0] = args[0] if args else kwargs["hidden_states"]


# -- rotary embeddings that depend on the length -----------------------------------------------------------------------


def _long_types(module: nn.Module) -> list[str | None]:
    """Types of layers (None: all) for which a rotary embedding is of the kind "longrope"."""
    kind = vars(module).get("rope_type")
    if isinstance(kind, dict):
        return [layer_type for layer_type, name in kind.items() if name == "longrope"]
    return [None] if kind == "longrope" else []


def _longrope_forward(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None, **more: Any) -> Any:
    """The forward of a "longrope" embedding, which has two sets of frequencies: for short texts and for long ones.

    transformers takes one set for all tokens of a forward, by the last position in it. Here each token gets the set of
    the text as it stood when it was read, as in a loop over single tokens.
    """
    forward = running()
    if layer_type is not None:
        more["layer_type"] = layer_type
    if forward is None or forward.ends_BT is None or layer_type not in _long_types(module):
        return type(module).forward(module, x, position_ids, **more)
    limit = _limit(module, layer_type)
    minimum, maximum = forward.ends
    if minimum > limit or maximum <= limit:
        return _fixed(module, layer_type, minimum > limit, x.device)(x, position_ids, **more)
    short, long = (_fixed(module, layer_type, which, x.device)(x, position_ids, **more) for which in (False, True))
    is_long_BT1 = (forward.ends_BT > limit)[:, :, None].to(x.device)
    return tuple(torch.where(is_long_BT1, b, a) for a, b in zip(short, long, strict=True))


def _limit(module: Any, layer_type: str | None) -> int:
    settings = module.config.rope_parameters
    return int((settings if layer_type is None else settings[layer_type])["original_max_position_embeddings"])


def _fixed(module: Any, layer_type: str | None, long: bool, device: torch.device) -> nn.Module:
    """A twin of a rotary embedding that has one set of frequencies, always."""
    twins = vars(module).setdefault("_headstart_twins", {})
    key = (layer_type, long, device)
    if key not in twins:
        prefix = "" if layer_type is None else f"{layer_type}_"
        which = {} if layer_type is None else {"layer_type": layer_type}
        frequencies = getattr(module, f"{prefix}original_inv_freq").to(device)
        if long:  # as transformers makes them
            length = _limit(module, layer_type) + 1
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=length, **which)
        twin = copy.copy(module)
        vars(twin).pop("forward", None)
        vars(twin).pop("_headstart_twins", None)
        twin.rope_type = "default" if layer_type is None else {**module.rope_type, layer_type: "default"}
        vars(twin)["_buffers"] = {**module._buffers, f"{prefix}inv_freq": frequencies}
        twins[key] = twin
    fixed: nn.Module = twins[key]
    return fixed
