"""Reader of heads in Hugging Face folders of SafeAILab, SpecForge, speculators, z-lab and headstart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import (
    BLOCKS,
    DFLASH2_LOGITS,
    DFLASH2_SIZES,
    EMBEDDINGS,
    FUSED,
    LM_HEAD,
    MASK_HIDDEN,
    LayerSizes,
    Layout,
    Published,
)
from headstart.hub.engines.base import DFLASH, DFLASH2, DSPARK
from headstart.hub.engines.checkpoint import (
    ANOTHER,
    AUX_IDS,
    CONFIG,
    CORRECT,
    FETCH,
    Checkpoint,
    absolute_ids,
    number,
    whole,
)
from headstart.hub.engines.known_engines import OURS, tensor_faults
from headstart.hub.target_facts import TargetFacts

SPECULATORS = {
    Layout.EAGLE3: "Eagle3Speculator",
    Layout.PEAGLE: "PEagleSpeculator",
    Layout.DFLASH: "DFlashSpeculator",
    Layout.DFLASH2: DFLASH2,
    Layout.DSPARK: "DSparkSpeculator",
}
"""Architecture names of the speculators library."""
_DFLASH = {DFLASH, SPECULATORS[Layout.DFLASH], "dflash"}
_DFLASH2 = {DFLASH2, "dflash2"}
_DSPARK = {DSPARK, "DSparkDraftModel", SPECULATORS[Layout.DSPARK], "dspark"}
_PEAGLE = {SPECULATORS[Layout.PEAGLE], "PEagleDraftModel", "peagle"}
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of P-EAGLE's mask token, in vLLM's order."""
_BLOCKS = _DFLASH | _DFLASH2 | _DSPARK
_STEPS = 5
"""Default draft steps of checkpoints that do not specify them."""
_WITHOUT = ("d2t", "t2d", "token_map", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that are not weights of the heads."""
_MASK = "mask_embedding.pt"
_OTHER_LAYERS = ("gemma", "cohere", "granite", "glm", "phi", "olmo", "minicpm", "stablelm", "nemotron")
"""Prefixes of model types with norms, scaling or RoPE unlike Llama's."""
_USUAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rope_interleave", "parallel_drafting"), (False,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"), ()),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("attention_multiplier", "scale_emb", "scale_depth", "attention_chunk_size"), ()),
    "input_embedding_scale": (1,),
    "rope_is_neox_style": (True,),
    "hidden_activation": ("silu",),
}
"""Settings that change the computation, with the supported values."""
_PART_OF: dict[Layout, tuple[str, ...]] = {Layout.PEAGLE: ("parallel_drafting",), Layout.DFLASH2: DFLASH2_LOGITS}
"""Settings of `_USUAL` that a layout supports with all values."""
_SECTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "eagle_config": {
        **dict.fromkeys(("norm_before_fc", AUX_IDS), ()),
        **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), (True,)),
        **dict.fromkeys(("use_last_layernorm", "next_layer_regular"), (True,)),
        "use_mtp_layernorm": (False,),
        "parallel_draft_step": (1,),
    },
    "dflash_config": dict.fromkeys(
        (
            *("mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size"),
            *("sample_from_anchor", "markov_rank", "markov_head_type"),
            *("enable_confidence_head", "confidence_head_with_markov"),
        ),
        (),
    ),
}
"""Known settings of drafter sections, with the supported values; empty for any."""
_OF_DFLASH2 = {**dict.fromkeys((*DFLASH2_SIZES, *DFLASH2_LOGITS), ()), "input_embedding_scale": (1,)}
"""Further settings of a section for DFlash 2."""


def _layout(checkpoint: Checkpoint) -> Layout:
    """Detect the layout of a folder's heads; a UserError if it has none."""
    config, names = checkpoint.config, checkpoint.names
    kinds = {*checkpoint.architectures, str(config.get("speculators_model_type"))}
    if any(name.startswith("blocks.0.") for name in names):
        return Layout.MEDUSA
    if kinds & _DSPARK or any(name.startswith("markov_head.") for name in names):
        return Layout.DSPARK
    selects = any(name.startswith("candidate_selector.") or "_conv." in name for name in names)
    if kinds & _DFLASH2 or selects or any(block_setting(config, name) is not None for name in DFLASH2_SIZES):
        return Layout.DFLASH2
    if kinds & _DFLASH or "dflash_config" in config or {"hidden_norm.weight", "fc.weight"} <= names.keys():
        return Layout.DFLASH
    if kinds & _PEAGLE or MASK_HIDDEN in names or _mask_token(config) is not None:
        return Layout.PEAGLE
    if "layers.0.hidden_norm.weight" in names or "d2t" in names or "draft_vocab_size" in config:
        return Layout.EAGLE3
    if "fc.weight" in names:
        return Layout.EAGLE
    raise UserError(f"{checkpoint.folder} holds no draft heads.", "Give a folder of heads, not of a model.")


def _mask_token(config: Mapping[str, Any]) -> Any:
    return next((config[name] for name in _MASK_TOKENS if config.get(name) is not None), None)


def read_published(checkpoint: Checkpoint, facts: TargetFacts | None = None) -> Published:
    """Read the heads of a folder, or raise UserError; `facts` supply defaults that depend on the target."""
    settings = settings_of(checkpoint, facts)
    settings = replace(settings, draft_ids_D=draft_ids(checkpoint, settings.vocab_size))
    return settings.with_tensors(_tensors(checkpoint, settings))


def settings_of(checkpoint: Checkpoint, facts: TargetFacts | None) -> Published:
    """Read the heads without their tensors; errors as in `read_published`."""
    layout = _layout(checkpoint)
    if layout is Layout.MEDUSA:
        return _medusa_settings(checkpoint)
    _refuse_unknown(checkpoint, layout)
    return (_block_settings if layout in BLOCKS else _eagle_settings)(checkpoint, layout, facts)


def _refuse_unknown(checkpoint: Checkpoint, layout: Layout) -> None:
    config, names = checkpoint.settings, checkpoint.architectures
    others = names if layout in BLOCKS else {name for name in names if name.startswith(("DFlash", "DSpark"))}
    if others and not others & _BLOCKS:
        supported = ", ".join(sorted(_BLOCKS))
        raise UserError(f"architectures is {sorted(names)}; supported block drafters are {supported}.", ANOTHER)
    if (kind := str(config.get("model_type", ""))).startswith(_OTHER_LAYERS):
        raise UserError(f"The checkpoint has {kind} layers, and headstart supports Llama layers.", ANOTHER)
    for name, usual in _USUAL.items():
        if name not in _PART_OF.get(layout, ()) and config.get(name) not in (None, *usual):
            raise UserError(
                f"The checkpoint has {name} = {config[name]!r}, which headstart does not support.",
                f"Take another checkpoint, or delete {name} from its {CONFIG} if it was copied from the target's.",
            )
    for section, known in _SECTIONS.items():
        settings, known = config.get(section), known | (_OF_DFLASH2 if layout is Layout.DFLASH2 else {})
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            if name not in known or (known[name] and value not in known[name]):
                raise UserError(
                    f"The checkpoint has {section}.{name} = {value!r}, which headstart does not know.",
                    "Take another checkpoint, or upgrade headstart.",
                )


def _eagle_settings(checkpoint: Checkpoint, layout: Layout, facts: TargetFacts | None) -> Published:
    config, note = checkpoint.settings, checkpoint.note
    size = whole(config.get("hidden_size"), "hidden_size")
    if config.get("target_hidden_size") not in (None, size):
        raise UserError(f"The heads are {size} wide and their target {config['target_hidden_size']}.", ANOTHER)
    if layout is Layout.PEAGLE and MASK_HIDDEN not in checkpoint.names:
        raise UserError("The checkpoint lacks mask_hidden, the state of entries without a drafted token.", FETCH)
    slides = config.get("use_sliding_window") and not config.get("max_window_layers")
    if "sliding_attention" in (config.get("layer_types") or ()) or slides:
        raise UserError("The layers have a sliding window, which headstart does not support here.", ANOTHER)
    fused, vocab = layout in FUSED, whole(config.get("vocab_size"), "vocab_size")
    # For P-EAGLE both engines default to false.
    if layout is Layout.EAGLE3 and checkpoint.is_speculators and "norm_before_residual" not in checkpoint.config:
        raise _missing(checkpoint, "norm_before_residual", "true in vLLM, false in speculators")
    return Published(
        layout=layout,
        hidden_size=size,
        vocab_size=vocab,
        steps=note.steps if note and note.steps else proposed_steps(config),
        tensors={},
        layer=_layer_sizes(config),
        num_layers=whole(config.get("num_hidden_layers", 1), "num_hidden_layers", maximum=8),
        aux_layers=_aux_layers(checkpoint, facts) if fused else (),
        norm_before_residual=fused and bool(checkpoint.config.get("norm_before_residual", False)),
        norm_output=layout is Layout.EAGLE3 and bool(config.get("norm_output", False)),
        qk_norm=fused and "layers.0.self_attn.q_norm.weight" in checkpoint.names,
        aux_norms=fused and bool(config.get("fc_norm", False)),
        norm_before_fc=fused
        and bool(checkpoint.eagle_config.get("norm_before_fc", config.get("norm_before_fc", False))),
        mask_token_id=whole(_mask_token(config), "mask_token_id", 0, vocab - 1) if layout is Layout.PEAGLE else -1,
    )


def _medusa_settings(checkpoint: Checkpoint) -> Published:
    config, shapes = checkpoint.config, checkpoint.shapes
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.")}
    lm_head = next((shape for name, shape in shapes.items() if name.startswith("lm_head")), None)
    if lm_head is None:
        raise UserError(f"{checkpoint.folder} has no LM heads, which Medusa heads draft with.", FETCH)
    size = next((shape[0] for name, shape in blocks.items() if name.endswith(".weight")), 0)
    in_files = len({int(name.split(".")[1]) for name in blocks})
    heads = next((config[key] for key in ("num_heads", "medusa_num_heads") if key in config), in_files)
    layers = next((config[key] for key in ("num_hidden_layers", "medusa_num_layers") if key in config), 1)
    return Published(
        layout=Layout.MEDUSA,
        hidden_size=whole(config.get("hidden_size", size), "hidden_size"),
        vocab_size=whole(config.get("vocab_size", lm_head[0]), "vocab_size"),
        steps=whole(min(heads, in_files) if isinstance(heads, int) else heads, "num_heads", maximum=16),
        tensors={LM_HEAD: torch.empty(0)} if LM_HEAD in shapes else {},
        num_layers=whole(layers, "num_hidden_layers", maximum=8),
    )


def _block_settings(checkpoint: Checkpoint, layout: Layout, facts: TargetFacts | None) -> Published:
    config = checkpoint.settings
    layers = whole(config.get("num_hidden_layers", 1), "num_hidden_layers", maximum=64)
    vocab = whole(config.get("vocab_size"), "vocab_size")
    first = int(layout is not Layout.DSPARK)
    block_size = whole(block_setting(config, "block_size"), "block_size", 1 + first, 64)
    rank = block_setting(config, "markov_rank") or 0
    _refuse_block_variants(checkpoint, layout, vocab)
    return Published(
        layout=layout,
        hidden_size=whole(config.get("hidden_size"), "hidden_size"),
        vocab_size=vocab,
        steps=block_size - first,
        tensors={},
        layer=_layer_sizes(config),
        num_layers=layers,
        aux_layers=_block_aux_layers(config, facts),
        block_size=block_size,
        mask_token_id=whole(block_setting(config, "mask_token_id"), "mask_token_id", 0, vocab - 1),
        **_windows(checkpoint, layers, block_size),
        markov_rank=whole(rank, "markov_rank", 0, 1 << 14) if layout is Layout.DSPARK else 0,
        confidence="confidence_head.proj.weight" in checkpoint.names,
        **(_dflash2_settings(config) if layout is Layout.DFLASH2 else {}),
    )


def _dflash2_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: whole(block_setting(config, name), name, maximum=1 << 14) for name in DFLASH2_SIZES}
    if config["hidden_size"] % (group := sizes["conv_group_size"]):
        raise UserError(f"conv_group_size is {group}, which does not divide {config['hidden_size']} channels.", FETCH)
    usual = {name: int(name == "output_multiplier") for name in DFLASH2_LOGITS}
    return sizes | {name: number(block_setting(config, name) or usual[name], name, 1000) for name in DFLASH2_LOGITS}


def _refuse_block_variants(checkpoint: Checkpoint, layout: Layout, vocab: int) -> None:
    config = checkpoint.settings
    count, anchor = config.get("draft_vocab_size", vocab), samples_from_anchor(config, layout)
    if count not in (None, vocab):
        raise UserError(f"The checkpoint drafts from {count} of {vocab} tokens with its own LM head.", ANOTHER)
    if anchor is None:
        raise _missing(checkpoint, "sample_from_anchor", "true in speculators, false in vLLM and llama.cpp")
    if anchor != (layout is Layout.DSPARK):
        slots = (
            "the position after their own (DFlash: their own)" if anchor else "their own position (DSpark: the next)"
        )
        raise UserError(f"The checkpoint's slots draft {slots}: drafts are off by one (sample_from_anchor).", ANOTHER)
    if (markov := block_setting(config, "markov_head_type") or "vanilla") != "vanilla":
        raise UserError(f"The checkpoint's Markov head is {markov!r}; headstart supports vanilla.", ANOTHER)
    with_markov = block_setting(config, "confidence_head_with_markov")
    if block_setting(config, "enable_confidence_head") and with_markov is False:
        raise UserError("The checkpoint's confidence head ignores the previous token (headstart's reads it).", ANOTHER)
    if (checkpoint.folder / _MASK).exists():
        raise UserError(f"The checkpoint has a separate embedding for the mask token ({_MASK}).", ANOTHER)


def _missing(checkpoint: Checkpoint, name: str, defaults: str) -> UserError:
    """Build the error for a setting that is required because defaults differ between engines."""
    problem = f"{checkpoint.folder / CONFIG} does not say {name}; the default is {defaults}."
    return UserError(problem, "Add the value that the heads were trained with.")


def _block_aux_layers(config: Mapping[str, Any], facts: TargetFacts | None) -> tuple[int, ...]:
    """Return the aux layers as indices of transformers' hidden states."""
    ids, name, added = config.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids", 0
    if ids is None:
        ids, name, added = block_setting(config, "target_layer_ids"), "target_layer_ids", 1
    if not ids or not are_layers(ids):
        raise UserError(
            f"{name} is {ids!r}, not a list of the target's layers that the block drafter reads.",
            f"Write them into {CONFIG}: target_layer_ids index layer outputs from 0.",
        )
    return _in_target(tuple(layer + added for layer in ids), facts)


def _in_target(aux_layers: tuple[int, ...], facts: TargetFacts | None) -> tuple[int, ...]:
    if facts is not None and not all(0 < layer <= facts.num_layers for layer in aux_layers):
        problem = f"The heads read the layers {list(aux_layers)}, and {facts.name} has {facts.num_layers} layers."
        raise UserError(problem, "Name the target they were trained on.")
    return aux_layers


def _layer_sizes(config: Mapping[str, Any]) -> LayerSizes:
    size = whole(config.get("hidden_size"), "hidden_size")
    heads = whole(config.get("num_attention_heads"), "num_attention_heads", maximum=1 << 12)
    head_dim = config.get("head_dim") or size // heads
    return LayerSizes(
        intermediate_size=whole(config.get("intermediate_size"), "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=whole(config.get("num_key_value_heads", heads), "num_key_value_heads", maximum=1 << 12),
        head_dim=whole(head_dim, "head_dim", maximum=1 << 14),
        hidden_act=str(config.get("hidden_act", "silu")),
        rms_norm_eps=number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        rope_parameters=_rope(config),
        max_position_embeddings=whole(config.get("max_position_embeddings", 2048), "max_position_embeddings"),
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge RoPE settings from all places in a config. Raises UserError if they disagree."""
    at_top: Mapping[Any, Any] = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    places = [("at the top", at_top)]
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name) or {}
        if not isinstance(section, Mapping):
            raise UserError(f"The config's {name} is {section!r}.", CORRECT)
        by_kind = {kind: inner for kind, inner in section.items() if isinstance(inner, Mapping)}
        kinds = config.get("layer_types")
        used = dict.fromkeys(map(str, kinds if isinstance(kinds, list) and kinds else ["full_attention"]))
        places += [(f"in {name}.{kind}", by_kind[kind]) for kind in used if kind in by_kind]
        places.append((f"in {name}", {key: value for key, value in section.items() if key not in by_kind}))
    rope: dict[str, Any] = {}
    found: dict[str, str] = {}
    for place, settings in places:
        for name, value in settings.items():
            if value is None:
                continue
            key = "rope_type" if name == "type" else name
            found.setdefault(key, place)
            if rope.setdefault(key, value) != value:
                problem = f"The config has {key} {rope[key]} {found[key]} and {value} {place}; engines read either."
                raise UserError(problem, CORRECT)
    if "rope_theta" not in rope:
        raise UserError(
            "The config has no rope_theta, and its default differs between engines.",
            f"Write the base that the heads were trained with into {CONFIG}; often it is the target's.",
        )
    base = rope["rope_theta"]
    if not isinstance(base, int | float) or isinstance(base, bool) or not base > 0:
        raise UserError(f"The config's rope_theta is {base!r}.", CORRECT)
    return {"rope_type": "default", **rope, "rope_theta": float(base)}


def _aux_layers(checkpoint: Checkpoint, facts: TargetFacts | None) -> tuple[int, ...]:
    """Return EAGLE-3's aux layers as indices of transformers' hidden states."""
    top, nested = checkpoint.aux_ids
    if (ids := top or nested) and not are_layers(ids):
        raise UserError(f"{AUX_IDS} is {ids!r}.", f"Write a list of numbers in {CONFIG}.")
    if ids:
        aux_layers = tuple(top or [layer + 1 for layer in ids])
    elif facts is not None:
        aux_layers = (2, facts.num_layers // 2, facts.num_layers - 3)
    else:
        raise UserError(
            f"{checkpoint.folder / CONFIG} does not list the layers to read ({AUX_IDS}).",
            "Name the target with --target: the default is (2, L // 2, L - 3) of its L layers.",
        )
    return _in_target(aux_layers, facts)


def proposed_steps(config: Mapping[str, Any]) -> int:
    """Return the draft steps of a config of speculators or NeMo Automodel, or the default."""
    section = config.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    steps = first.get("speculative_tokens", _STEPS) if isinstance(first, Mapping) else config.get("num_depths", _STEPS)
    return whole(steps, "speculative_tokens", maximum=16)


def are_layers(ids: Any) -> bool:
    return isinstance(ids, list | tuple) and all(
        isinstance(layer, int) and not isinstance(layer, bool) and -1 <= layer < 4096 for layer in ids
    )


# -- the draft vocabulary ----------------------------------------------------------------------------------------------


def draft_ids(checkpoint: Checkpoint, vocab_size: int) -> Tensor | None:
    """Read the target ids of drafted tokens, from offsets or ids; None for the full vocabulary."""
    names = checkpoint.names
    if "token_map" in names:
        ids_D = checkpoint.read("token_map").to(torch.int64)
        if not are_tokens(ids_D, vocab_size):
            raise UserError("token_map does not name distinct tokens of the target.", FETCH)
        return ids_D if len(ids_D) < vocab_size else None
    if "d2t" not in names:
        return None
    given_D = checkpoint.read("d2t")
    kind = kind_of_map(given_D, checkpoint.read("t2d") if "t2d" in names else None, vocab_size)
    if kind is None:
        raise UserError("d2t holds neither offsets nor ids of distinct tokens of the target.", FETCH)
    ids_D = absolute_ids(given_D) if kind == "offsets" else given_D.to(torch.int64)
    return ids_D if len(ids_D) < vocab_size else None


def kind_of_map(given_D: Tensor, t2d_V: Tensor | None, vocab_size: int) -> str | None:
    """Detect whether a `d2t` holds "offsets" or "ids"; return None if neither is valid.

    `t2d` decides if present. Otherwise a strictly increasing `d2t` holds ids: as offsets it would skip a token after
    each drafted one.

    >>> kind_of_map(torch.tensor([0, 0, 4]), None, 8), kind_of_map(torch.tensor([0, 1, 6]), None, 8)
    ('offsets', 'ids')
    """
    given_D = given_D.to(torch.int64)
    readings = {"offsets": absolute_ids(given_D), "ids": given_D}
    possible = {kind: ids_D for kind, ids_D in readings.items() if are_tokens(ids_D, vocab_size)}
    if t2d_V is not None and len(t2d_V) == vocab_size:
        marked = t2d_V.bool()
        fits = [kind for kind, ids_D in possible.items() if marked[ids_D].all() and int(marked.sum()) == len(ids_D)]
        return fits[0] if fits else None
    if len(possible) < 2:
        return next(iter(possible), None)
    rising = len(given_D) > 1 and bool((given_D.diff() >= 1).all())
    return "ids" if rising else "offsets"


def are_tokens(ids_D: Tensor, vocab_size: int) -> bool:
    inside = bool(((ids_D >= 0) & (ids_D < vocab_size)).all())
    return inside and len(torch.unique(ids_D)) == len(ids_D)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _tensors(checkpoint: Checkpoint, settings: Published) -> dict[str, Tensor]:
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in _WITHOUT}
    for problem, remedy in tensor_faults(settings.expected(), optional_tensors(settings, shapes), shapes, OURS):
        raise UserError(f"{checkpoint.folder}: {problem}", remedy)
    tensors = {}
    for name in shapes:
        stored = checkpoint.tensors[checkpoint.names[name]]
        if stored.dtype not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{name} in {checkpoint.folder} has the packed dtype {stored.dtype}.", ANOTHER)
        tensors[name] = checkpoint.read(name)
    return tensors


def optional_tensors(settings: Published, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of optional tensors."""
    size, whole_vocabulary = settings.hidden_size, (settings.vocab_size, settings.hidden_size)
    optional: dict[str, tuple[int, ...]] = {EMBEDDINGS: whole_vocabulary}
    if settings.layout in BLOCKS:
        optional[LM_HEAD] = whole_vocabulary
    if settings.layout is Layout.EAGLE:
        optional["fc.bias"] = (size,)
    if settings.layout is Layout.MEDUSA:
        optional |= {name: (settings.draft_width, size) for name in names if name.startswith("lm_heads.")}
        blocks = [name for name in names if name.startswith("blocks.")]
        # A checkpoint may hold more heads than its config uses.
        optional |= {name: (size,) if name.endswith(".bias") else (size, size) for name in blocks}
    return optional


# -- masks of block drafters -------------------------------------------------------------------------------------------


def block_setting(config: Mapping[str, Any], name: str) -> Any:
    """Read a setting of a block drafter from `dflash_config` (SpecForge uses it for DSpark too) or from the top.
    Raises UserError if they disagree."""
    nested, outer = config.get("dflash_config"), config.get(name)
    inner = nested.get(name) if isinstance(nested, Mapping) else None
    if None not in (inner, outer) and inner != outer:
        raise UserError(f"The config has {name} {inner} in dflash_config and {outer} at the top.", CORRECT)
    return outer if inner is None else inner


def samples_from_anchor(config: Mapping[str, Any], layout: Layout) -> bool | None:
    """Whether the anchor's slot drafts; None if a speculators config of DSpark leaves it open."""
    given = block_setting(config, "sample_from_anchor")
    if given is not None or layout is not Layout.DSPARK:
        return bool(given)
    return None if "speculators_model_type" in config else True


def _windows(checkpoint: Checkpoint, layers: int, block_size: int) -> dict[str, Any]:
    """Read windows and causality, which engines read from several places, as settings of `Published`."""
    config = checkpoint.settings
    kinds = config.get("layer_types") or ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= set(known):
        raise UserError(f"layer_types is {kinds!r}: each of the {layers} layers is {' or '.join(known)}.", FETCH)
    sliding = [kind == "sliding_attention" for kind in kinds]
    if block_setting(config, "use_swa") and not any(sliding):
        sliding = [True] * layers
    window = block_setting(config, "swa_window_size") or config.get("sliding_window")
    if any(sliding) and (not isinstance(window, int) or window <= block_size):
        raise UserError(f"sliding_window is {window!r}, not more than the {block_size} slots of a block.", FETCH)
    return window_settings(sliding, _causal(checkpoint, sliding), window)


def window_settings(sliding: list[bool], causal: list[bool], window: Any) -> dict[str, Any]:
    """Return windows and causality as settings of `Published`. Raises UserError for unsupported combinations."""
    by_kind = dict(zip(sliding, causal, strict=True))
    if True not in by_kind:
        return {"causal": by_kind[False]}
    if by_kind.get(False):
        problem = "The heads have causal full layers beside sliding layers; headstart supports causal sliding layers."
        raise UserError(problem, ANOTHER)
    full_layers = tuple(number for number, slides in enumerate(sliding) if not slides)
    return {"sliding_window": window, "full_layers": full_layers, "causal": by_kind[True]}


def _causal(checkpoint: Checkpoint, sliding: list[bool]) -> list[bool]:
    """Return, for each layer, whether slots of a block attend causally."""
    config = checkpoint.settings
    causal = config.get("is_causal")
    if causal is None:
        causal = None if checkpoint.is_speculators else block_setting(config, "causal")
    if causal is not None:
        return [bool(causal)] * len(sliding)
    if not checkpoint.is_speculators or not any(sliding):
        return sliding
    if "sliding_window_non_causal" not in config:
        raise _missing(checkpoint, "sliding_window_non_causal", "true in vLLM, false in speculators")
    return [slides and not config["sliding_window_non_causal"] for slides in sliding]
