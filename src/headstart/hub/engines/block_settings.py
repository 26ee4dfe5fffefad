"""What the config of a block drafter says of what its slots see and draft, wherever engines look for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import UserError
from headstart.heads.exchange.published import Layout
from headstart.hub.engines.checkpoint import ANOTHER, CONFIG, FETCH, Checkpoint, whole


def block_setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting of a block drafter: nested in `dflash_config`, where SpecForge has DSpark's too, or at the top."""
    nested = config.get("dflash_config")
    inner = nested.get(name) if isinstance(nested, Mapping) else None
    return config.get(name) if inner is None else inner


def samples_from_anchor(config: Mapping[str, Any], layout: Layout) -> bool | None:
    """Whether the newest token's own slot drafts; None where a speculators config of DSpark leaves it open."""
    given = block_setting(config, "sample_from_anchor")
    if given is not None or layout is Layout.DFLASH:
        return bool(given)
    return None if "speculators_model_type" in config else True


def sights(checkpoint: Checkpoint, block_size: int) -> dict[str, Any]:
    """What slots see, as settings of `Published`: engines read windows and causality of layers in several places."""
    config, layers = checkpoint.settings, whole(checkpoint.settings.get("num_hidden_layers", 1), "layers", maximum=64)
    kinds = config.get("layer_types") or ["full_attention"] * layers
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= known:
        raise UserError(
            f"layer_types is {kinds!r}, and each of the {layers} layers is one of {', '.join(sorted(known))}.", FETCH
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if block_setting(config, "use_swa") and not any(sliding):
        sliding = [True] * layers
    causal = _causal(checkpoint, sliding)
    if not any(sliding):
        return {"causal": causal[0]}
    window = block_setting(config, "swa_window_size") or config.get("sliding_window")
    if not isinstance(window, int) or window <= block_size:
        raise UserError(
            f"The checkpoint has sliding layers, and its sliding_window is {window!r}, which is not more than the "
            f"{block_size} slots of a block.",
            FETCH,
        )
    slots = dict(zip(sliding, causal, strict=True))
    if slots.get(False, False):
        raise UserError(
            "Slots of the checkpoint's full layers do not see those after them (causal), beside sliding layers; "
            "headstart has that of sliding layers.",
            ANOTHER,
        )
    full_layers = tuple(number for number, slides in enumerate(sliding) if not slides)
    return {"sliding_window": window, "full_layers": full_layers, "causal": slots[True]}


def _causal(checkpoint: Checkpoint, sliding: list[bool]) -> list[bool]:
    """By layer, whether slots of a block do not see those after them."""
    config = checkpoint.settings
    causal = config.get("is_causal")
    if causal is None:
        causal = None if checkpoint.is_speculators else block_setting(config, "causal")
    if causal is not None:
        return [bool(causal)] * len(sliding)
    if not checkpoint.is_speculators or not any(sliding):
        return sliding
    if "sliding_window_non_causal" not in config:
        raise UserError(
            f"{checkpoint.folder / CONFIG} does not say sliding_window_non_causal: vLLM then takes true, speculators "
            "false.",
            "Add the one that the heads were trained with.",
        )
    return [slides and not config["sliding_window_non_causal"] for slides in sliding]
