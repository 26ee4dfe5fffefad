"""Published heads from a Hugging Face folder, whoever wrote it: SafeAILab, SpecForge, speculators, z-lab, or us."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, EMBEDDINGS, LM_HEAD, LayerSizes, Layout, Published
from headstart.hub.engines.base import NOTE, TargetFacts, Written
from headstart.hub.engines.block_reading import block_layout, block_settings
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint, absolute_ids, small, whole

_STEPS = 5
"""Drafts in a row, where a checkpoint does not say how many it was trained for."""
_PREFIXES = ("model.", "medusa_head.", "medusa_heads.")
_RENAMED = {"midlayer.": "layers.0.", "fusion_fc.": "fc.", "embed_in.": "embed_tokens."}
_OLD_MEDUSA = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_WITHOUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that say nothing that others do not."""


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    """Which arrangement a folder holds; None for none of them."""
    names = set(canonical_names(checkpoint).values())
    if any(name.startswith("blocks.0.") for name in names):
        return Layout.MEDUSA
    if (layout := block_layout(checkpoint.config, names)) is not None:
        return layout
    if "layers.0.hidden_norm.weight" in names or "d2t" in names or "draft_vocab_size" in checkpoint.config:
        return Layout.EAGLE3
    return Layout.EAGLE if "fc.weight" in names else None


def is_speculators(checkpoint: Checkpoint) -> bool:
    """Whether the config is one of the speculators library."""
    return "speculators_model_type" in checkpoint.config


def canonical_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors' names in `published`, by those in the files."""
    config = checkpoint.config
    blocks = next((config[key] for key in ("medusa_num_layers", "num_hidden_layers") if key in config), 1)
    return {name: _canonical(name, blocks) for name in checkpoint.tensors}


def read_published(checkpoint: Checkpoint, facts: TargetFacts | None = None) -> Published:
    """The heads of a folder.

    Args:
        checkpoint: opened; its headers are checked.
        facts: of the target, for what a config leaves to it.

    Raises:
        UserError: no published arrangement, settings that are out of bounds or not said, tensors that are missing,
            unknown or of other shapes.
    """
    layout = layout_of(checkpoint)
    if layout is None:
        raise UserError(
            f"{checkpoint.folder} holds no EAGLE, EAGLE-3, DFlash, DSpark or Medusa heads.",
            "Give the folder of draft heads, not that of a model.",
        )
    settings = settings_of(checkpoint, layout, facts)
    ids_D = draft_ids(checkpoint, settings.vocab_size)
    settings = replace(settings, draft_ids_D=ids_D)
    return settings.with_tensors(_tensors(checkpoint, settings))


def settings_of(checkpoint: Checkpoint, layout: Layout, facts: TargetFacts | None) -> Published:
    """Everything of the heads but their tensors.

    Raises:
        UserError: as `read_published`.
    """
    if layout is Layout.MEDUSA:
        return medusa_settings(checkpoint)
    if layout in BLOCKS:
        config, names = flat(checkpoint.config), set(canonical_names(checkpoint).values())
        return block_settings(checkpoint, config, layout, layer_of(config), names, facts)
    return eagle_settings(checkpoint, layout, facts)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what speculators nests at the top."""
    nested = config.get("transformer_layer_config")
    return {**nested, **config} if isinstance(nested, Mapping) else dict(config)


def eagle_settings(checkpoint: Checkpoint, layout: Layout, facts: TargetFacts | None) -> Published:
    """Everything of EAGLE and EAGLE-3 heads but their tensors."""
    config = flat(checkpoint.config)
    size = whole(config.get("hidden_size"), "hidden_size")
    if config.get("target_hidden_size") not in (None, size):
        raise UserError(
            f"The checkpoint's heads are {size} wide and their target {config['target_hidden_size']}.",
            "headstart has heads of their target's width alone; take another checkpoint.",
        )
    fused = layout is Layout.EAGLE3
    written = Written.of(checkpoint.config.get(NOTE))
    return Published(
        layout=layout,
        hidden_size=size,
        vocab_size=whole(config.get("vocab_size"), "vocab_size"),
        steps=written.steps if written and written.steps else proposed_steps(checkpoint.config),
        tensors={},
        layer=layer_of(config),
        num_layers=whole(config.get("num_hidden_layers", 1), "num_hidden_layers", maximum=8),
        aux_layers=aux_layers_of(checkpoint, facts) if fused else (),
        norm_before_residual=fused and norm_before_residual(checkpoint),
        norm_output=fused and bool(config.get("norm_output", False)),
        aux_norms=fused and bool(config.get("fc_norm", False)),
        norm_before_fc=fused and bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False))),
    )


def layer_of(config: Mapping[str, Any]) -> LayerSizes:
    """Sizes of the decoder layers.

    Raises:
        UserError: they are out of bounds, or not said.
    """
    size = whole(config.get("hidden_size"), "hidden_size")
    heads = whole(config.get("num_attention_heads"), "num_attention_heads", maximum=1 << 12)
    head_dim = config.get("head_dim") or size // heads
    return LayerSizes(
        intermediate_size=whole(config.get("intermediate_size"), "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=whole(config.get("num_key_value_heads", heads), "num_key_value_heads", maximum=1 << 12),
        head_dim=whole(head_dim, "head_dim", maximum=1 << 14),
        hidden_act=str(config.get("hidden_act", "silu")),
        rms_norm_eps=small(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        rope_parameters=rope_of(config),
        max_position_embeddings=whole(config.get("max_position_embeddings", 2048), "max_position_embeddings"),
    )


def medusa_settings(checkpoint: Checkpoint) -> Published:
    """Everything of Medusa heads but their tensors."""
    config = checkpoint.config
    names = canonical_names(checkpoint).values()
    of_tensors = {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
    by_own = {own: name for name, own in canonical_names(checkpoint).items()}
    size = next((checkpoint.tensors[name].shape[0] for own, name in by_own.items() if _is_block(own)), 0)
    lm_head = next((name for own, name in by_own.items() if own.startswith("lm_head")), None)
    if lm_head is None:
        raise UserError(
            f"{checkpoint.folder} has no LM heads, which Medusa heads draft with.", "Fetch the checkpoint again."
        )
    rows = (checkpoint.shape(lm_head) or (0,))[0]
    heads = next((config[key] for key in ("num_heads", "medusa_num_heads") if key in config), len(of_tensors))
    blocks = next((config[key] for key in ("num_hidden_layers", "medusa_num_layers") if key in config), 1)
    return Published(
        layout=Layout.MEDUSA,
        hidden_size=whole(config.get("hidden_size", size), "hidden_size"),
        vocab_size=whole(config.get("vocab_size", rows), "vocab_size"),
        steps=whole(min(heads, len(of_tensors)) if isinstance(heads, int) else heads, "num_heads", maximum=16),
        tensors={"lm_head.weight": torch.empty(0)} if "lm_head.weight" in names else {},
        num_layers=whole(blocks, "num_hidden_layers", maximum=8),
    )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions from either spelling.

    Raises:
        UserError: both are there and differ, or are no numbers.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    new = {**new} if isinstance(new, Mapping) else {}
    base = new.get("rope_theta", config.get("rope_theta", 10000.0))
    if config.get("rope_theta", base) != base:
        raise UserError(
            f"The config says rope_theta {config['rope_theta']} at the top and {base} in rope_parameters.",
            f"Correct the wrong one in {CONFIG}; engines read the one or the other.",
        )
    found = new or ({**old} if isinstance(old, Mapping) else {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    if not isinstance(base, int | float) or isinstance(base, bool) or not base > 0:
        raise UserError(f"The config's rope_theta is {base!r}.", f"Correct it in {CONFIG}.")
    return {**found, "rope_type": found.get("rope_type", "default"), "rope_theta": float(base)}


def aux_layers_of(checkpoint: Checkpoint, facts: TargetFacts | None) -> tuple[int, ...]:
    """Indices of transformers' hidden states that are fused.

    Raises:
        UserError: they are not said, and the target's depth is not known.
    """
    config = checkpoint.config
    top = config.get("eagle_aux_hidden_state_layer_ids")
    below = nested(config).get("eagle_aux_hidden_state_layer_ids")
    ids = top or ([layer + 1 for layer in _numbers(below)] if below else None)
    if ids is None:
        if facts is None:
            raise UserError(
                f"{checkpoint.folder / CONFIG} does not say which layers are read (eagle_aux_hidden_state_layer_ids).",
                "Name the target with --target: engines then take (2, L // 2, L - 3) of its L layers.",
            )
        ids = [2, facts.num_layers // 2, facts.num_layers - 3]
    aux_layers = tuple(_numbers(ids))
    if facts is not None and any(not 0 < layer <= facts.num_layers for layer in aux_layers):
        raise UserError(
            f"The heads read the layers {list(aux_layers)}, and {facts.name} has {facts.num_layers}.",
            "Name the target that they were trained on.",
        )
    return aux_layers


def norm_before_residual(checkpoint: Checkpoint) -> bool:
    """Whether the first layer adds to the normed state.

    Raises:
        UserError: a speculators config that does not say so, since its readers differ in what they then assume.
    """
    config = checkpoint.config
    if "norm_before_residual" not in config and is_speculators(checkpoint):
        raise UserError(
            f"{checkpoint.folder / CONFIG} does not say norm_before_residual: vLLM then takes true, speculators false.",
            "Add the one that the heads were trained with.",
        )
    return bool(config.get("norm_before_residual", False))


def proposed_steps(config: Mapping[str, Any]) -> int:
    """Drafts in a row that a config speaks of."""
    section = config.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    found = first.get("speculative_tokens", _STEPS) if isinstance(first, Mapping) else _STEPS
    return whole(found, "speculative_tokens", maximum=16)


def draft_ids(checkpoint: Checkpoint, vocab_size: int) -> Tensor | None:
    """Absolute ids of the drafted tokens, from offsets or ids; None without a reduced vocabulary.

    Raises:
        UserError: neither reading makes distinct tokens of the target.
    """
    names = {own: name for name, own in canonical_names(checkpoint).items()}
    if "token_map" in names:
        ids_D = checkpoint.read(names["token_map"]).to(torch.int64)
        if not _tokens(ids_D, vocab_size):
            raise UserError("token_map does not name distinct tokens of the target.", "Fetch the checkpoint again.")
        return ids_D if len(ids_D) < vocab_size else None
    if "d2t" not in names:
        return None
    given_D = checkpoint.read(names["d2t"])
    t2d_V = checkpoint.read(names["t2d"]) if "t2d" in names else None
    kind = kind_of_map(given_D, t2d_V, vocab_size)
    if kind is None:
        raise UserError(
            "d2t names neither as offsets nor as ids distinct tokens of the target"
            + (" that t2d marks." if t2d_V is not None else "."),
            "Fetch the checkpoint again.",
        )
    ids_D = absolute_ids(given_D) if kind == "offsets" else given_D.to(torch.int64)
    return ids_D if len(ids_D) < vocab_size else None


def kind_of_map(given_D: Tensor, t2d_V: Tensor | None, vocab_size: int) -> str | None:
    """Whether a `d2t` holds "offsets" or "ids"; None where it can be neither.

    `t2d` decides where it is there. Without it a rising `d2t` whose every step is at least 1 holds ids: as offsets it
    would leave out a token after each that is drafted.

    >>> kind_of_map(torch.tensor([0, 0, 4]), None, 8), kind_of_map(torch.tensor([0, 1, 6]), None, 8)
    ('offsets', 'ids')
    """
    given_D = given_D.to(torch.int64)
    readings = {"offsets": absolute_ids(given_D), "ids": given_D}
    possible = {kind: ids_D for kind, ids_D in readings.items() if _tokens(ids_D, vocab_size)}
    if t2d_V is not None and len(t2d_V) == vocab_size:
        marked = t2d_V.bool()
        fits = [kind for kind, ids_D in possible.items() if marked[ids_D].all() and int(marked.sum()) == len(ids_D)]
        return fits[0] if fits else None
    if len(possible) < 2:
        return next(iter(possible), None)
    rising = len(given_D) > 1 and bool((given_D.diff() >= 1).all())
    return "ids" if rising else "offsets"


def _tokens(ids_D: Tensor, vocab_size: int) -> bool:
    inside = bool(((ids_D >= 0) & (ids_D < vocab_size)).all())
    return inside and len(torch.unique(ids_D)) == len(ids_D)


def _canonical(name: str, blocks: Any) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _RENAMED.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    if old_name := _OLD_MEDUSA.fullmatch(name):
        head, block, linear, kind = old_name.groups()
        return f"blocks.{head}.layers.{block}.{kind}" if linear else f"lm_heads.{head}.{kind}"
    return name


def _is_block(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight")


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of a config that SGLang reads."""
    found = config.get("eagle_config")
    return found if isinstance(found, Mapping) else {}


def _numbers(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple) or not all(isinstance(one, int) and -1 <= one < 4096 for one in ids):
        raise UserError(f"eagle_aux_hidden_state_layer_ids is {ids!r}.", f"Write a list of numbers in {CONFIG}.")
    return list(ids)


def _tensors(checkpoint: Checkpoint, settings: Published) -> dict[str, Tensor]:
    """The tensors by their published names, once names and shapes are those of the settings."""
    by_own = {own: name for name, own in canonical_names(checkpoint).items() if own not in _WITHOUT}
    by_own.pop("d2t", None)
    by_own.pop("token_map", None)
    shared = settings.layout is Layout.MEDUSA and checkpoint.config.get("original_lm_head") is True
    if shared and "lm_head.weight" not in by_own and "lm_heads.0.weight" in by_own:
        by_own["lm_head.weight"] = by_own.pop("lm_heads.0.weight")
        settings = settings.with_tensors({"lm_head.weight": torch.empty(0)})
    wanted = settings.expected()
    if settings.layout is Layout.EAGLE3 and "lm_head.weight" not in by_own:
        raise UserError(
            f"{checkpoint.folder} has no lm_head.weight.",
            "Heads that draft with the target's own LM head cannot be read; take a checkpoint that has one.",
        )
    missing = sorted(set(wanted) - set(by_own))
    if missing:
        raise UserError(
            f"{checkpoint.folder} lacks the tensor {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ", which its config asks for.",
            "Fetch the checkpoint again, or correct its config.json.",
        )
    optional = _optional(settings, by_own)
    if unknown := sorted(set(by_own) - set(wanted) - set(optional)):
        raise UserError(
            f"{checkpoint.folder} has the tensor {unknown[0]!r}, which headstart has no place for.",
            "Its heads would not be what was trained; take another checkpoint.",
        )
    found = {}
    for own, shape in {**wanted, **optional}.items():
        kept = checkpoint.tensors[by_own[own]]
        if kept.shape != shape or not kept.is_float:
            raise UserError(
                f"{by_own[own]} in {checkpoint.folder} is {kept.dtype} {list(kept.shape)}, and its config asks for "
                f"floating-point numbers {list(shape)}.",
                "Fetch the checkpoint again, or correct its config.json.",
            )
        found[own] = checkpoint.read(by_own[own])
    return found


def _optional(settings: Published, by_own: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that may be left out, of those that are there."""
    size = settings.hidden_size
    known: dict[str, tuple[int, ...]] = {EMBEDDINGS: (settings.vocab_size, size)}
    if settings.layout in BLOCKS:
        known[LM_HEAD] = (settings.vocab_size, size)
    if settings.layout is Layout.EAGLE:
        known["fc.bias"] = (size,)
    for name in by_own:
        if settings.layout is Layout.MEDUSA and name.startswith("blocks.") and name.endswith(".bias"):
            known[name] = (size,)
    if settings.layout is Layout.MEDUSA:
        known |= {name: (settings.draft_width, size) for name in by_own if name.startswith("lm_heads.")}
        # A checkpoint may hold more heads than it is used with.
        known |= {name: (size, size) for name in by_own if _is_block(name)}
    return {name: known[name] for name in by_own if name in known and name not in settings.expected()}
