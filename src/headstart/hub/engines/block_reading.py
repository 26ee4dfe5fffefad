"""Settings of block drafters from a config, native or of the speculators library, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import UserError
from headstart.heads.exchange.published import LayerSizes, Layout, Published
from headstart.hub.engines.base import TargetFacts
from headstart.hub.engines.block_files import DFLASH, DSPARK, SPECULATORS
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint, whole

_KINDS = {
    Layout.DFLASH: {DFLASH, SPECULATORS[Layout.DFLASH]},
    Layout.DSPARK: {DSPARK, "DSparkDraftModel", SPECULATORS[Layout.DSPARK]},
}
_MASK = "mask_embedding.pt"
_ANOTHER = "Take another checkpoint."


def block_layout(config: Mapping[str, Any], names: set[str]) -> Layout | None:
    """Which kind of block drafter a folder holds, by its config and its tensors' names; None for neither."""
    given = config.get("architectures")
    said = {str(one) for one in (*(given if isinstance(given, list) else []), config.get("speculators_model_type"))}
    if said & {*_KINDS[Layout.DSPARK], "dspark"} or any(name.startswith("markov_head.") for name in names):
        return Layout.DSPARK
    if said & {*_KINDS[Layout.DFLASH], "dflash"} or "dflash_config" in config:
        return Layout.DFLASH
    return Layout.DFLASH if {"hidden_norm.weight", "fc.weight"} <= names else None


def block_settings(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    layout: Layout,
    layer: LayerSizes,
    names: set[str],
    facts: TargetFacts | None,
) -> Published:
    """Everything of a block drafter but its tensors.

    Args:
        checkpoint: opened.
        config: its config, with what speculators nests at the top.
        layout: from `block_layout`.
        layer: sizes of the decoder layers.
        names: of the tensors.
        facts: of the target.

    Raises:
        UserError: settings out of bounds or not said, or a variant that headstart does not have.
    """
    size, vocab = whole(config.get("hidden_size"), "hidden_size"), whole(config.get("vocab_size"), "vocab_size")
    block_size = whole(setting(config, "block_size"), "block_size", 2 if layout is Layout.DFLASH else 1, 64)
    mask = whole(setting(config, "mask_token_id"), "mask_token_id", 0, vocab - 1)
    rank = whole(setting(config, "markov_rank") or 0, "markov_rank", 0, 1 << 14) if layout is Layout.DSPARK else 0
    found = Published(
        layout=layout,
        hidden_size=size,
        vocab_size=vocab,
        steps=block_size - (layout is Layout.DFLASH),
        tensors={},
        layer=layer,
        num_layers=whole(config.get("num_hidden_layers", 1), "num_hidden_layers", maximum=64),
        aux_layers=block_aux_layers(config, facts),
        block_size=block_size,
        mask_token_id=mask,
        markov_rank=rank,
        confidence="confidence_head.proj.weight" in names,
    )
    for is_so, problem, remedy in _variants(checkpoint, config, layout, vocab):
        if is_so:
            raise UserError(problem, remedy)
    return found


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting of a block drafter: nested in `dflash_config`, where SpecForge has DSpark's too, or at the top."""
    nested = config.get("dflash_config")
    found = nested.get(name) if isinstance(nested, Mapping) else None
    return config.get(name) if found is None else found


def block_aux_layers(config: Mapping[str, Any], facts: TargetFacts | None) -> tuple[int, ...]:
    """Indices of transformers' hidden states that are read.

    Raises:
        UserError: they are not said, or not layers of the target.
    """
    ids, said = config.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids"
    if ids is None:
        ids, said = setting(config, "target_layer_ids"), "target_layer_ids"
    if not isinstance(ids, list | tuple) or not ids or not all(_is_id(one) for one in ids):
        raise UserError(
            f"{said} is {ids!r}, and a block drafter names the layers of the target that it reads.",
            f"Write them into {CONFIG}: target_layer_ids count layers' outputs from 0.",
        )
    aux_layers = tuple(one + (said == "target_layer_ids") for one in ids)
    if facts is not None and not all(0 < layer <= facts.num_layers for layer in aux_layers):
        raise UserError(
            f"The heads read the outputs of layers {[layer - 1 for layer in aux_layers]} (from 0), and {facts.name} "
            f"has {facts.num_layers} layers.",
            "Name the target that they were trained on.",
        )
    return aux_layers


def samples_from_anchor(config: Mapping[str, Any], layout: Layout) -> bool | None:
    """Whether the newest token's own slot drafts; None where a speculators config of DSpark leaves it open."""
    given = setting(config, "sample_from_anchor")
    if given is not None or layout is Layout.DFLASH:
        return bool(given)
    return None if "speculators_model_type" in config else True


def _variants(
    checkpoint: Checkpoint, config: Mapping[str, Any], layout: Layout, vocab: int
) -> list[tuple[bool, str, str]]:
    """(whether it is so, what headstart does not have, what to do)."""
    anchor = samples_from_anchor(config, layout)
    kinds, causal = config.get("layer_types") or [], setting(config, "causal")
    sliding = (isinstance(kinds, list) and "sliding_attention" in kinds) or bool(setting(config, "use_swa"))
    markov = setting(config, "markov_head_type") or "vanilla"
    theta = isinstance(config.get("rope_parameters"), Mapping) and "rope_theta" in config["rope_parameters"]
    return [
        (
            not theta and "rope_theta" not in config,
            "The config says no rope_theta; of block drafters engines then take different ones.",
            f"Write the base that the heads were trained with into {CONFIG}.",
        ),
        (
            config.get("draft_vocab_size") not in (None, vocab),
            f"The checkpoint drafts from {config.get('draft_vocab_size')} of {vocab} tokens through an LM head of its "
            "own; block drafters of headstart draft through the target's.",
            _ANOTHER,
        ),
        (
            anchor is None,
            f"{checkpoint.folder / CONFIG} does not say sample_from_anchor: speculators then takes true, vLLM and "
            "llama.cpp false.",
            "Add the one that the heads were trained with.",
        ),
        (
            anchor is False and layout is Layout.DSPARK,
            "The checkpoint's slots draft their own place (sample_from_anchor: false), and those of headstart's DSpark "
            "the next one.",
            "Take a checkpoint with sample_from_anchor: true.",
        ),
        (
            anchor is True and layout is Layout.DFLASH,
            "The checkpoint's slots draft the place after their own (sample_from_anchor: true); DFlash's draft their "
            "own, here and in engines.",
            _ANOTHER,
        ),
        (
            not isinstance(kinds, list),
            f"layer_types is {kinds!r}, and a list with a kind for each layer is expected.",
            f"Correct layer_types in {CONFIG}, or fetch it again.",
        ),
        (sliding, "The checkpoint has sliding layers, and block drafters of headstart have full attention.", _ANOTHER),
        (
            bool(causal) or bool(config.get("is_causal")),
            "Slots of the checkpoint do not see those after them (causal), and slots of headstart's blocks do.",
            _ANOTHER,
        ),
        (
            markov != "vanilla",
            f"The checkpoint's Markov head is {markov!r}, and headstart has the vanilla one.",
            _ANOTHER,
        ),
        (
            bool(setting(config, "enable_confidence_head")) and setting(config, "confidence_head_with_markov") is False,
            "The checkpoint's confidence head does not read the token before, and headstart's does.",
            _ANOTHER,
        ),
        (
            (checkpoint.folder / _MASK).exists(),
            f"The checkpoint has an embedding of its own for the mask token ({_MASK}), and headstart's block drafters "
            "take the target's.",
            _ANOTHER,
        ),
    ]


def _is_id(one: Any) -> bool:
    return isinstance(one, int) and not isinstance(one, bool) and -1 <= one < 4096
