"""Patch a transformers model so that headstart's forwards run in it, and its own forwards stay as they are.

Takes a decoder, its layers and its LM head. The patches look up the forward of their thread
(`attention.current_forward`), so neither forwards in several threads nor the model's own `generate` interfere.

- Configs become a `Config` that selects our attention in our forwards.
- Hooks on aux layers capture their states.
- "longrope" rotary embeddings choose short or long frequencies per token.
- Linear attention snapshots its state before a chain (see `chains`).
- Linear layers (`nn.Linear`) use prepacked weights where that is faster (see `products`).
- The LM head computes only the requested logits.

Shape suffixes: B rows, T tokens of one forward, d components of a head.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.kernels.prepacked import drop, fits, refresh
from headstart.replay.attention import NAME, current_forward
from headstart.replay.chains import is_linear_attention, linear_attention_forward
from headstart.replay.products import PrepackedForward, can_prepack, has_matrix

FINAL = -1
"""Layer number of the state after the final norm, the LM head's input."""
_LM_HEAD = "LM head"
"""Key of the hook on the LM head."""


class Config:
    """Proxy of a module's config that selects our attention in our forwards."""

    def __init__(self, config: PreTrainedConfig) -> None:
        object.__setattr__(self, "_config", config)

    @property
    def _attn_implementation(self) -> str | None:
        name: str | None = NAME if current_forward() is not None else self._config._attn_implementation
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


class ModelPatch:
    """Patches of one `Target`. Texts of more than `limit` tokens have other rotary frequencies; None for no limit."""

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, lm_head: nn.Module) -> None:
        self._decoder, self._layers, self._lm_head = decoder, layers, lm_head
        self._lock = threading.Lock()
        self._hooks: dict[int | str, Any] = {}
        self._undo: list[Callable[[], Any]] = []  # restore configs and forwards
        self._patch_configs()
        limits = [_limit(module, kind) for module in decoder.modules() for kind in _longrope_layer_types(module)]
        self.limit = min(limits, default=None)

    def ensure(self, aux_layers: Iterable[int]) -> None:
        """Apply the patches that a forward with these aux layers needs."""
        if type(vars(self._decoder).get("config")) is not Config:
            self._patch_configs()
        # Another target's `release` may have restored the original forwards. It restores whole models, so the first and
        # last layer suffice.
        ends = *self.prepacked[:1], *self.prepacked[-1:]
        if not all(type(vars(module).get("forward")) is PrepackedForward for module in ends):
            self._patch_linear_layers()
        hooked: set[int | str] = {_LM_HEAD, *aux_layers}
        if missing := hooked - self._hooks.keys():
            with self._lock:
                for layer in missing - self._hooks.keys():
                    self._hooks[layer] = self._hook(layer)

    def refresh(self) -> None:
        """Drop stale prepacked weights."""
        refresh(cast(Tensor, module.weight) for module in self.prepacked)

    def release(self) -> None:
        """Undo all patches; the next forward applies them again."""
        self._remove_hooks()
        with self._lock:
            for undo in self._undo:
                undo()
            self._undo = []

    def finalize(self) -> None:
        """Remove the hooks and free prepacked weights; the other patches may serve other targets of the same model."""
        self._remove_hooks()
        drop(cast(Tensor, module.weight) for module in self.prepacked)

    @cached_property
    def matrices(self) -> list[nn.Module]:
        """Every module with a matrix product, the LM head first."""
        modules = [*self._lm_head.modules(), *self._decoder.modules()]
        return [module for module in dict.fromkeys(modules) if has_matrix(module)]

    @cached_property
    def prepacked(self) -> list[nn.Module]:
        """Linear layers to prepack; none if memory has no room for all of them."""
        modules = [module for module in self.matrices if can_prepack(module)]
        return modules if fits(cast(Tensor, module.weight) for module in modules) else []

    def _remove_hooks(self) -> None:
        with self._lock:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks = {}

    def _patch_linear_layers(self) -> None:
        with self._lock:
            for module in self.prepacked:
                forward = vars(module).get("forward")
                if type(forward) is not PrepackedForward:  # wraps a foreign forward, if any
                    self._replace(module, PrepackedForward(module, forward))

    def _patch_configs(self) -> None:
        """Patch configs, rotary embeddings and linear attention."""
        with self._lock:
            for module in self._decoder.modules():
                config = vars(module).get("config")
                if isinstance(config, PreTrainedConfig) and type(config) is not Config:
                    self._undo.append(partial(setattr, module, "config", config))
                    module.config = Config(config)  # type: ignore[assignment]  # a proxy
                if _longrope_layer_types(module) and "forward" not in vars(module):
                    self._replace(module, partial(_longrope_forward, module))
                elif is_linear_attention(module) and "forward" not in vars(module):
                    self._replace(module, partial(linear_attention_forward, module))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = vars(module).get("forward")

        def restore() -> None:
            vars(module).pop("_headstart_fixed", None)
            vars(module).pop("forward", None)
            if before is not None:
                vars(module)["forward"] = before

        self._undo.append(restore)
        vars(module)["forward"] = forward

    def _hook(self, layer: int | str) -> Any:
        if isinstance(layer, str):
            return self._lm_head.register_forward_pre_hook(_select_states)
        if layer == FINAL:
            return self._decoder.register_forward_hook(partial(_keep_output, layer))
        if layer == 0:
            return self._layers[0].register_forward_pre_hook(_keep_input, with_kwargs=True)
        return self._layers[layer - 1].register_forward_hook(partial(_keep_output, layer))


def _select_states(_module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Select the states [R, 1, E] of [B, T, E] that need logits."""
    forward = current_forward()
    if forward is None or forward.logits_at is None:
        return None
    rows, indices = forward.logits_at.to(args[0].device)
    forward.logits_at = None  # a second target of the same model may hook it too
    return (args[0][rows, indices][:, None], *args[1:])


def _keep_output(layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
    forward = current_forward()
    if forward is not None and layer in forward.aux_layers:
        forward.states[layer] = output if isinstance(output, Tensor) else output[0]


def _keep_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
    forward = current_forward()
    if forward is not None and 0 in forward.aux_layers:
        forward.states[0] = args[0] if args else kwargs["hidden_states"]


# -- rotary embeddings that depend on the length -----------------------------------------------------------------------


def _longrope_layer_types(module: nn.Module) -> list[str | None]:
    """Return the layer types (None: all) with "longrope" rotary embeddings."""
    kind = vars(module).get("rope_type")
    if isinstance(kind, dict):
        return [layer_type for layer_type, name in kind.items() if name == "longrope"]
    return [None] if kind == "longrope" else []


def _longrope_forward(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None, **more: Any) -> Any:
    """Run a "longrope" embedding, choosing short or long frequencies per token, as plain decoding does.

    transformers chooses one set for all tokens of a forward, by its last position.
    """
    forward = current_forward()
    if layer_type is not None:
        more["layer_type"] = layer_type
    if forward is None or forward.text_lengths_BT is None or layer_type not in _longrope_layer_types(module):
        return type(module).forward(module, x, position_ids, **more)
    limit = _limit(module, layer_type)
    minimum, maximum = forward.text_length_range
    if minimum > limit or maximum <= limit:
        return _with_frequencies(module, layer_type, minimum > limit, x.device)(x, position_ids, **more)
    short, long = (_with_frequencies(module, layer_type, k, x.device)(x, position_ids, **more) for k in (False, True))
    is_long_BT1 = (forward.text_lengths_BT > limit)[:, :, None].to(x.device)
    return tuple(torch.where(is_long_BT1, b, a) for a, b in zip(short, long, strict=True))


def _limit(module: Any, layer_type: str | None) -> int:
    settings = module.config.rope_parameters
    return int((settings if layer_type is None else settings[layer_type])["original_max_position_embeddings"])


def _with_frequencies(module: Any, layer_type: str | None, long: bool, device: torch.device) -> nn.Module:
    """Return a cached copy of a rotary embedding with its short or long frequencies only."""
    copies: dict[Any, nn.Module] = vars(module).setdefault("_headstart_fixed", {})
    key = (layer_type, long, device)
    if key not in copies:
        prefix = "" if layer_type is None else f"{layer_type}_"
        which = {} if layer_type is None else {"layer_type": layer_type}
        frequencies = getattr(module, f"{prefix}original_inv_freq").to(device)
        if long:  # as transformers computes them
            length = _limit(module, layer_type) + 1
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=length, **which)
        fixed = copy.copy(module)
        vars(fixed).pop("forward", None)
        vars(fixed).pop("_headstart_fixed", None)
        fixed.rope_type = "default" if layer_type is None else {**module.rope_type, layer_type: "default"}
        vars(fixed)["_buffers"] = {**module._buffers, f"{prefix}inv_freq": frequencies}
        copies[key] = fixed
    return copies[key]
