"""What vLLM, SGLang and speculators make of a folder of a block drafter.

Read in vLLM 0.32, SGLang of mid-2026 and speculators 0.9. vLLM reads neither `block_size` nor the order of the layer
ids: blocks are as long as it is asked to draft, and the layers' outputs come in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headstart.heads.exchange.published import EMBEDDINGS, LM_HEAD, Layout, Published
from headstart.hub.engines.block_files import DFLASH, DSPARK
from headstart.hub.engines.block_reading import samples_from_anchor, setting
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint
from headstart.hub.engines.reading import canonical_names, flat, is_speculators, proposed_steps

Said = Iterator[tuple[str, str]]
_AGAIN = "Export the heads again, or take another checkpoint."


def check_config(checkpoint: Checkpoint, layout: Layout, engine: str, layers: int | None) -> Said:
    """What is wrong with a config, whatever the tensors are.

    Args:
        checkpoint: opened.
        layout: DFlash or DSpark.
        engine: that is to read it.
        layers: of the target, where that is known.
    """
    config = flat(checkpoint.config)
    yield from _architecture(checkpoint, layout, engine)
    yield from _ids(config, engine, layers)
    yield from _mask(config)
    yield from _block(config, checkpoint, layout, engine)
    yield from _attention(config, checkpoint, engine)
    if config.get("hidden_act", "silu") != "silu" and engine != "speculators":
        yield f"{engine} computes silu alone, and the MLP uses {config['hidden_act']}.", _AGAIN


def check_tensors(
    checkpoint: Checkpoint, settings: Published, engine: str, compare: Callable[[Any, Any, Any, str], Said]
) -> Said:
    """What is wrong with the tensors: `compare` takes those wanted, those known beside them, and the folder's own."""
    own = {name: checkpoint.tensors[given].shape for given, name in canonical_names(checkpoint).items()}
    for name, who in (("d2t", "vLLM"), ("t2d", "llama.cpp's converter")):
        if own.pop(name, None) is not None:
            yield f"There is a {name}, and the whole vocabulary is drafted: {who} stops at it.", "Leave both maps out."
    whole = (settings.vocab_size, settings.hidden_size)
    known: dict[str, tuple[int, ...]] = {EMBEDDINGS: whole, LM_HEAD: whole}
    if engine == "speculators":
        known |= {"verifier_lm_head.weight": whole, "verifier_norm.weight": (settings.hidden_size,)}
    yield from compare(settings.expected(), known, own, engine)


def _architecture(checkpoint: Checkpoint, layout: Layout, engine: str) -> Said:
    given = checkpoint.config.get("architectures")
    if engine == "speculators" or (engine == "vllm" and is_speculators(checkpoint)):
        if not is_speculators(checkpoint):
            yield f"{CONFIG} has no speculators_model_type.", "Export with --format speculators."
        return
    if engine == "sglang" and layout is Layout.DSPARK:
        yield "headstart knows of no SGLang that serves DSpark heads as it writes them.", "Serve them with llama.cpp."
        return
    known = {Layout.DFLASH: (DFLASH,), Layout.DSPARK: (DSPARK, "DSparkDraftModel")}[layout]
    if not set(map(str, given if isinstance(given, list) else [])) & set(known):
        yield f"{engine} knows such heads as {known[0]}, and architectures is {given!r}.", f"Correct it in {CONFIG}."
    if checkpoint.config.get("model_type") != "qwen3":
        yield (
            f"The layers of a block drafter are Qwen3's, whatever the target is, and model_type is "
            f"{checkpoint.config.get('model_type')!r}.",
            f"Correct it in {CONFIG}.",
        )


def _ids(config: Mapping[str, Any], engine: str, layers: int | None) -> Said:
    """`target_layer_ids` count layers' outputs from 0; EAGLE's ids and those of speculators count hidden states."""
    ids, counted = config.get("aux_hidden_state_layer_ids"), config.get("eagle_aux_hidden_state_layer_ids")
    given = setting(config, "target_layer_ids")
    if given is not None and not _numbers(given):
        yield f"target_layer_ids is {given!r}.", f"Write a list of numbers into {CONFIG}."
        return
    for name, others in (("aux_hidden_state_layer_ids", ids), ("eagle_aux_hidden_state_layer_ids", counted)):
        if others is not None and not _numbers(others):
            yield f"{name} is {others!r}.", f"Write a list of numbers into {CONFIG}, or leave it out."
            return
        if given and others and list(others) != [one + 1 for one in given]:
            yield (
                f"The layer ids disagree: {list(given)} in target_layer_ids and {list(others)} in {name}, which should "
                "be one more each.",
                f"Correct the wrong ones in {CONFIG}.",
            )
    aux_layers = [one + 1 for one in given] if given else list(ids or counted or [])
    if not aux_layers:
        yield (
            f"The config names no layers (target_layer_ids), and {engine} takes layers of its own choice.",
            f"Write those that the heads read into {CONFIG}, counted as outputs from 0.",
        )
        return
    named = config.get("num_target_layers")
    if layers is not None and isinstance(named, int) and named != layers:
        yield f"num_target_layers is {named}, and the target has {layers} layers.", f"Correct it in {CONFIG}."
    layers = layers or (named if isinstance(named, int) else None)
    if layers and (max(aux_layers) > layers or min(aux_layers) < 1):
        yield (
            f"target_layer_ids would be {[one - 1 for one in aux_layers]}, and a target with {layers} layers has the "
            f"outputs 0 to {layers - 1}: they look counted as EAGLE's ids, which are one more.",
            f"Subtract one from each in {CONFIG}.",
        )
    if sorted(set(aux_layers)) != aux_layers:
        yield (
            f"The layers {aux_layers} do not rise, and {engine} joins their outputs in the order of the layers.",
            "Train with rising heads.aux_layers.",
        )


def _mask(config: Mapping[str, Any]) -> Said:
    mask, vocab = setting(config, "mask_token_id"), config.get("vocab_size")
    if mask is None:
        yield (
            "The config names no mask_token_id, and engines stop, or fill blocks with another token.",
            f"Write the token that the heads were trained with into {CONFIG}.",
        )
    elif not isinstance(mask, int) or isinstance(mask, bool) or not isinstance(vocab, int) or not 0 <= mask < vocab:
        yield (
            f"mask_token_id is {mask!r}, which is no token of a vocabulary of {vocab}: engines read past the "
            "embeddings.",
            f"Correct it in {CONFIG}, or train with a heads.mask_token_id of the target's vocabulary.",
        )


def _block(config: Mapping[str, Any], checkpoint: Checkpoint, layout: Layout, engine: str) -> Said:
    size = setting(config, "block_size")
    if size is None:
        yield (
            "The config says no block_size: SGLang and llama.cpp then take 16, and draft past what was trained.",
            f"Write the size that the heads were trained with into {CONFIG}.",
        )
    anchor = samples_from_anchor(config, layout)
    if anchor is None:
        yield (
            "The config does not say sample_from_anchor: speculators then takes true for DSpark, vLLM and llama.cpp "
            "false, and every draft is off by one place.",
            f"Write the one that the heads were trained with into {CONFIG}.",
        )
    if anchor and layout is Layout.DFLASH:
        yield (
            "sample_from_anchor is true, and engines take a DFlash slot to draft its own place: every draft is off by "
            "one.",
            "Train such heads as dspark.",
        )
    if isinstance(size, int) and is_speculators(checkpoint):
        drafts = size - (0 if anchor else 1)
        if (asked := proposed_steps(checkpoint.config)) > drafts:
            yield (
                f"The config proposes {asked} draft tokens, and a block of {size} has {drafts}: {engine} drafts past "
                "what was trained.",
                f"Write speculative_tokens = {drafts} into {CONFIG}.",
            )


def _attention(config: Mapping[str, Any], checkpoint: Checkpoint, engine: str) -> Said:
    kinds, layers = config.get("layer_types") or [], config.get("num_hidden_layers")
    causal = setting(config, "causal") if config.get("is_causal") is None else config.get("is_causal")
    if not isinstance(kinds, list):
        yield f"layer_types is {kinds!r}.", f"Write a list with a kind for each layer into {CONFIG}."
        return
    sliding = [kind for kind in kinds if kind == "sliding_attention"]
    if kinds and isinstance(layers, int) and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for {layers} layers.", f"Correct it in {CONFIG}."
    if sliding and engine == "vllm" and not is_speculators(checkpoint):
        if len(sliding) < len(kinds):
            yield (
                "vLLM mixes sliding and full layers on GPUs alone (V2 model runner).",
                "Serve it there, or take heads with full attention.",
            )
        if causal is None:
            yield (
                "Sliding layers are causal in vLLM unless the config says otherwise: slots do not see those after "
                "them.",
                f"Write dflash_config.causal into {CONFIG} as the heads were trained.",
            )
        if setting(config, "swa_window_size") is None and config.get("sliding_window") is None:
            yield "There are sliding layers and no window, and vLLM stops.", f"Write sliding_window into {CONFIG}."
    if causal and not sliding:
        yield (
            "The config says that blocks are causal: slots do not see those after them, as they do in training.",
            f"Leave causal and is_causal out of {CONFIG}.",
        )
    if engine == "vllm" and is_speculators(checkpoint) and config.get("sliding_window_non_causal") is False:
        yield (
            "sliding_window_non_causal is false, and vLLM 0.32 takes that for all layers: slots of a block do not see "
            "those after them.",
            f"Write sliding_window_non_causal = true into {CONFIG}; without sliding layers it says nothing else.",
        )


def _numbers(ids: Any) -> bool:
    return isinstance(ids, list | tuple) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
