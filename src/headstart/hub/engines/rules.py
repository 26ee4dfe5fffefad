"""What vLLM, SGLang and speculators make of a folder: which keys and tensors they read, ignore, or fill with noise.

Read in vLLM 0.32, SGLang 0.5 and speculators 0.9. vLLM stops at unknown tensors and leaves missing ones random without
a word; SGLang passes over both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Layout, Published, digest
from headstart.hub.engines.base import NOTE, Finding, TargetFacts, Written
from headstart.hub.engines.block_rules import check_config, check_tensors
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint
from headstart.hub.engines.reading import (
    canonical_names,
    draft_ids,
    eagle_settings,
    flat,
    is_speculators,
    kind_of_map,
    layout_of,
    medusa_settings,
    nested,
    read_published,
    settings_of,
)

_SILENT = {"vllm": "leaves it random without a word", "sglang": "leaves it random without a word"}
_AGAIN = "Export the heads again, or take another checkpoint."
_ROTARY = ("default", "linear", "llama3", "yarn", "dynamic")


def check_checkpoint(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> list[Finding]:
    """Everything that an engine would get wrong with a folder of heads."""
    layout = layout_of(checkpoint)
    if layout is None:
        return [Finding(engine, f"{checkpoint.folder} holds no draft heads.", "Give the folder of draft heads.")]
    rules = {Layout.EAGLE3: _fused, Layout.EAGLE: _joined, Layout.MEDUSA: _parallel}.get(layout, _in_blocks)
    found: list[Finding] = []
    try:
        for said in rules(checkpoint, engine, facts):
            found.append(Finding(engine, *said))  # one by one: what comes later may raise
        if not found:
            found += [Finding(engine, *said) for said in _unchanged(checkpoint, facts)]
    except UserError as error:
        found.append(Finding(engine, error.problem, error.remedy))
    return found


Said = Iterator[tuple[str, str]]


def _fused(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Said:
    config, top = flat(checkpoint.config), checkpoint.config
    yield from _architecture(checkpoint, Layout.EAGLE3, engine)
    yield from _rotary(config)
    yield from _ids(checkpoint, engine, facts)
    if engine == "sglang":
        if config.get("tie_word_embeddings", True) is not False:
            yield (
                "SGLang takes the embeddings for the LM head unless tie_word_embeddings is false.",
                f"Write it into {CONFIG}.",
            )
        if "draft_vocab_size" not in top:
            yield "SGLang needs draft_vocab_size, also for the whole vocabulary.", f"Write it into {CONFIG}."
        for key, value in (("norm_before_residual", top.get("norm_before_residual")), ("fc_norm", top.get("fc_norm"))):
            if value:
                yield f"SGLang ignores {key}, and drafts with other numbers than were trained.", "Serve it with vLLM."
        if top.get("norm_output"):
            yield "SGLang feeds back the state before the norm, whatever norm_output says.", "Serve it with vLLM."
        if config.get("num_hidden_layers", 1) != 1:
            yield "SGLang's further layers read another norm than vLLM's.", "Serve it with vLLM."
    if config.get("attention_bias") and engine == "sglang":
        yield "SGLang leaves out the biases of the attention.", "Serve it with vLLM."
    if config.get("hidden_act", "silu") != "silu" and engine != "speculators":
        yield f"{engine} computes silu alone, and the MLP uses {config['hidden_act']}.", _AGAIN
    settings = eagle_settings(checkpoint, Layout.EAGLE3, facts)
    yield from _map(checkpoint, settings)
    settings = replace(settings, draft_ids_D=draft_ids(checkpoint, settings.vocab_size))
    wanted = dict(settings.expected())
    own = {name: checkpoint.tensors[given].shape for given, name in canonical_names(checkpoint).items()}
    if "lm_head.weight" not in own and settings.draft_ids_D is None and engine != "speculators":
        wanted.pop("lm_head.weight")  # the target's own
    known = {
        "embed_tokens.weight": (settings.vocab_size, settings.hidden_size),
        "t2d": (settings.vocab_size,),
        "d2t": (settings.draft_width,),
    }
    if engine == "speculators" and "embed_tokens.weight" not in own:
        yield "The classes of speculators fill embeddings that a file lacks with zeros.", _AGAIN
    if config.get("attention_bias") and engine != "sglang":
        known |= {name: own[name] for name in own if name.endswith("_proj.bias")}
        if engine == "vllm" and not any(name.endswith("o_proj.bias") for name in own):
            yield "vLLM reads a bias of o_proj with attention_bias, and there is none: it stays random.", _AGAIN
    yield from _tensors(wanted, known, own, engine)


def _joined(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Said:
    config = checkpoint.config
    yield from _architecture(checkpoint, Layout.EAGLE, engine)
    yield from _rotary(config)
    settings = eagle_settings(checkpoint, Layout.EAGLE, facts)
    own = {name: checkpoint.tensors[given].shape for given, name in canonical_names(checkpoint).items()}
    size = settings.hidden_size
    known: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (settings.vocab_size, size)}
    wanted = dict(settings.expected())
    if engine == "sglang":
        wanted["fc.bias"] = (size,)
        if "embed_tokens.weight" in own and Written.of(config.get(NOTE)) is not None:
            yield "SGLang takes the target's embeddings in place of the heads' own.", "Serve it with vLLM."
    if engine == "vllm":
        for name in ("fc.bias", "layers.0.input_layernorm.weight"):
            if name in own:
                yield f"vLLM has no {name} in EAGLE-1 heads, and stops.", _AGAIN
                known[name] = own[name]
    yield from _tensors(wanted, known, own, engine)


def _in_blocks(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Said:
    layout = layout_of(checkpoint)
    assert layout in BLOCKS, "the other arrangements have rules of their own"
    layers = facts.num_layers if facts is not None else _noted(checkpoint.config).get("num_layers")
    yield from _rotary(flat(checkpoint.config), "one of their own (vLLM 1000000)")
    yield from check_config(checkpoint, layout, engine, layers if isinstance(layers, int) else None)
    settings = settings_of(checkpoint, layout, facts)
    yield from check_tensors(checkpoint, settings, engine, _tensors)


def _parallel(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Said:
    config = checkpoint.config
    if engine != "vllm":
        yield f"{engine} has no Medusa heads.", "Serve them with vLLM up to 0.32, or with headstart."
        return
    if config.get("model_type") != "medusa":
        yield f"vLLM knows Medusa heads by model_type medusa, and it is {config.get('model_type')!r}.", _AGAIN
    for key in config:
        if "num" in key and key not in ("num_heads", "num_hidden_layers") and ("heads" in key or "layers" in key):
            meant = "num_heads" if "heads" in key else "num_hidden_layers"
            if meant in config and config[meant] != config[key]:
                yield f"vLLM takes {key} for {meant}, and they differ.", f"Leave {key} out of {CONFIG}."
    settings = medusa_settings(checkpoint)
    asked = config.get("num_heads", config.get("medusa_num_heads"))
    names = canonical_names(checkpoint)
    own = {name: checkpoint.tensors[given].shape for given, name in names.items()}
    if isinstance(asked, int) and asked > settings.steps:
        yield f"The config has {asked} heads and the file {settings.steps}: vLLM leaves the others random.", _AGAIN
    if any(name.endswith(".bias") for name in own) and config.get("medusa_fc_bias") is not True:
        yield "vLLM drops the blocks' biases unless medusa_fc_bias is true.", f"Write it into {CONFIG}."
    if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
        yield (
            "vLLM 0.32 stops at Medusa heads with a reduced vocabulary: it reads token_map and then misses it.",
            "Train with the whole vocabulary.",
        )
    if facts is not None and settings.vocab_size != facts.vocab_size:
        yield f"The heads draft from {settings.vocab_size} tokens, and {facts.name} has {facts.vocab_size}.", _AGAIN
    read_published(checkpoint, facts)


def _architecture(checkpoint: Checkpoint, layout: Layout, engine: str) -> Said:
    given = checkpoint.config.get("architectures")
    names = given if isinstance(given, list) else []
    if engine == "speculators" or (engine == "vllm" and is_speculators(checkpoint)):
        if not is_speculators(checkpoint):
            yield f"{CONFIG} has no speculators_model_type.", "Export with --format speculators."
        return
    known = {
        ("vllm", Layout.EAGLE3): ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
        ("sglang", Layout.EAGLE3): ("LlamaForCausalLMEagle3",),
        ("vllm", Layout.EAGLE): ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        ("sglang", Layout.EAGLE): ("LlamaForCausalLMEagle",),
    }[engine, layout]
    if not set(names) & set(known):
        yield f"{engine} knows such heads as {known[0]}, and architectures is {given!r}.", f"Correct it in {CONFIG}."


def _rotary(config: Mapping[str, Any], usual: str = "10000") -> Said:
    new, old = config.get("rope_parameters"), config.get("rope_theta")
    base = new.get("rope_theta") if isinstance(new, Mapping) else None
    if base is None and old is None:
        yield (
            f"The config says no rope_theta, and engines then take {usual}.",
            f"Write the base that the heads were trained with into {CONFIG}.",
        )
    elif base is not None and old is not None and base != old:
        yield (
            f"rope_theta is {old} at the top and {base} in rope_parameters: engines read the one or the other.",
            f"Correct the wrong one in {CONFIG}.",
        )
    kind = (new if isinstance(new, Mapping) else config.get("rope_scaling") or {}).get("rope_type", "default")
    older = config.get("rope_scaling")
    if isinstance(new, Mapping) and (kind != "default") != bool(older):
        yield (
            f"rope_parameters are of the kind {kind}, and rope_scaling says otherwise.",
            f"Write the same into both in {CONFIG}; engines read the one or the other.",
        )
    if kind not in _ROTARY:
        yield f"No engine is known to turn heads by {kind} positions.", _AGAIN


def _ids(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Said:
    config = checkpoint.config
    top = config.get("eagle_aux_hidden_state_layer_ids")
    below = nested(config).get("eagle_aux_hidden_state_layer_ids")
    if top and below and [one + 1 for one in below] != list(top):
        yield (
            f"The layer ids disagree: {list(top)} at the top (vLLM, llama.cpp) and {list(below)} in eagle_config "
            "(SGLang), which should be one less each.",
            f"Correct the wrong ones in {CONFIG}.",
        )
    if engine == "sglang" and top and not below:
        yield (
            f"SGLang reads the layer ids in eagle_config alone, and takes the usual ones instead of {list(top)}.",
            f"Write eagle_config.eagle_aux_hidden_state_layer_ids = {[one - 1 for one in top]} into {CONFIG}.",
        )
    if engine == "vllm" and below and not top:
        yield (
            f"vLLM takes the nested layer ids {list(below)} as they are, one layer before those that SGLang reads.",
            f"Write eagle_aux_hidden_state_layer_ids = {[one + 1 for one in below]} at the top of {CONFIG}.",
        )
    ids = top or below
    count = config.get("num_aux_hidden_states") or len(below or [0] * 3)
    if ids and engine == "vllm" and len(ids) != count and not is_speculators(checkpoint):
        yield (
            f"vLLM fuses {count} layers, and there are {len(ids)} layer ids.",
            f"Write num_aux_hidden_states = {len(ids)} into {CONFIG}.",
        )
    if ids and engine == "vllm" and is_speculators(checkpoint) and len(ids) != 3:
        yield (
            f"vLLM fuses 3 layers of heads in the speculators format, and these read {len(ids)}.",
            "Export with --format vllm.",
        )
    if ids and engine == "sglang" and len(ids) != 3:
        yield f"SGLang fuses 3 layers, and there are {len(ids)} layer ids.", "Serve it with vLLM."
    layers = facts.num_layers if facts is not None else _noted(config).get("num_layers")
    aux_layers = list(top) if top else [one + 1 for one in below or []]
    if isinstance(layers, int) and aux_layers:
        deepest = layers if engine in ("vllm", "speculators") else layers - 1
        if max(aux_layers) > deepest or min(aux_layers) < 1:
            yield (
                f"{engine} cannot read the layers {aux_layers} of a target with {layers}: {deepest} is the deepest.",
                "Train with other heads.aux_layers.",
            )


def _map(checkpoint: Checkpoint, settings: Published) -> Said:
    """`d2t` is there, and holds offsets."""
    names = {own: name for name, own in canonical_names(checkpoint).items()}
    width = flat(checkpoint.config).get("draft_vocab_size") or settings.vocab_size
    lm_head = checkpoint.shape(names["lm_head.weight"]) if "lm_head.weight" in names else None
    if "d2t" not in names:
        if width != settings.vocab_size or (lm_head is not None and lm_head[0] != settings.vocab_size):
            yield (
                f"The heads draft from {width} tokens and there is no d2t: engines take draft token i for token i.",
                "Export the heads again with their d2t.",
            )
        return
    given_D = checkpoint.read(names["d2t"])
    if len(given_D) == settings.vocab_size:
        yield (
            "There is a d2t and the whole vocabulary is drafted; vLLM has no place for it and stops.",
            "Leave d2t and t2d out.",
        )
    t2d_V = checkpoint.read(names["t2d"]) if "t2d" in names else None
    kind = kind_of_map(given_D, t2d_V, settings.vocab_size)
    if kind != "offsets":
        held = "token ids" if kind == "ids" else "no tokens of the target"
        yield (
            f"d2t holds {held}, and engines read it as offsets (token = i + d2t[i]).",
            "Subtract each entry's place from it.",
        )
    if len(given_D) != width:
        yield f"d2t has {len(given_D)} entries, and draft_vocab_size is {width}.", f"Correct {CONFIG}."
    if "lm_head.weight" not in names and len(given_D) != settings.vocab_size:
        yield "There is a d2t and no lm_head.weight of the reduced vocabulary.", _AGAIN


def _tensors(
    wanted: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]], own: Mapping[str, Any], engine: str
) -> Said:
    for name, shape in wanted.items():
        if name not in own:
            yield f"The tensor {name} is missing, and {engine} {_SILENT.get(engine, 'only warns')}.", _AGAIN
        elif tuple(own[name]) != shape:
            yield f"The tensor {name} is {list(own[name])}, and its config asks for {list(shape)}.", _AGAIN
    for name in sorted(set(own) - set(wanted) - set(known)):
        does = "stops at it" if engine == "vllm" else "ignores it"
        yield f"{engine} has no tensor {name} in such heads, and {does}.", _AGAIN
    for name in sorted(set(known) & set(own)):
        if tuple(own[name]) != tuple(known[name]):
            yield f"The tensor {name} is {list(own[name])}, and {list(known[name])} is expected.", _AGAIN


def _unchanged(checkpoint: Checkpoint, facts: TargetFacts | None) -> Said:
    """Whether a folder of ours still holds the heads that it was written from."""
    written = Written.of(checkpoint.config.get(NOTE))
    if written is None:
        return
    yield from unchanged(read_published(checkpoint, facts), written, facts)


def unchanged(published: Published, written: Written, facts: TargetFacts | None) -> Said:
    """Whether a file of ours still holds the heads that it was written from, and is for this target."""
    if digest(published) != written.digest:
        yield (
            "Numbers or settings are not those that headstart wrote: layer ids, rotary base, norms, d2t or weights "
            "were changed.",
            "Export the heads again.",
        )
    theirs = written.target.get("fingerprint")
    if facts is not None and facts.fingerprint and theirs and theirs != facts.fingerprint:
        yield (
            f"The heads are for {written.target.get('name')}, and {facts.name} is another model.",
            "Serve them with the target that they were trained on.",
        )


def _noted(config: Mapping[str, Any]) -> Mapping[str, Any]:
    written = Written.of(config.get(NOTE))
    return {} if written is None else written.target
