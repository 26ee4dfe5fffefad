"""What is particular to an engine that reads heads: one `EngineTraits` each, see `known_engines.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headstart.heads.exchange.published import Layout, Published
from headstart.hub.engines.base import AGAIN, Faults
from headstart.hub.engines.checkpoint import Checkpoint
from headstart.hub.target_facts import TargetFacts


@dataclass(frozen=True)
class EngineTraits:
    """What an engine makes of heads.

    Attributes:
        name: that users type.
        architectures: by arrangement, what a config.json may call the heads, the usual name first.
        when_missing, when_unknown: what the engine does without a tensor, and with one that it does not know.
        misses_last_layer: arrangements to which it cannot give the output of the target's last layer.
        divides_heads: whether the hidden size must be a multiple of the number of attention heads, as in transformers'
            LlamaConfig.
        needs_markov: whether it knows DSpark heads by their Markov head.
        mixes_causal: whether slots of a block may see later ones in some layers alone.
        causal_full: whether they may see none in layers without a sliding window.
        passes_over: settings of EAGLE-3 heads that it does not know; where there are some, it runs one layer of such
            heads, which reads three of the target's.
        has_medusa: whether it drafts with Medusa heads.
        reads_speculators, reads_others: whether it reads the configs of the speculators library, and others.
        lends_lm_head: whether EAGLE-3 heads without an LM head draft through the target's.
        adds_bias: whether it adds the bias of an EAGLE-1 head's joining map; it has no such tensor otherwise.
        holds_verifier: whether it knows tensors of the target in folders of block drafters.
        faults: by arrangement, what it alone gets wrong with a folder that holds such heads.
        command: the words that serve target and heads, from the heads' folder, both, and how many tokens are drafted,
            from so many requests at a time on; None where it is no server.
        remarks: what the user should know of heads that it reads as they are, and does not serve everywhere.
    """

    name: str
    architectures: Mapping[Layout, tuple[str, ...]] = field(default_factory=dict)
    when_missing: str = "leaves it random without a word"
    when_unknown: str = "stops at it"
    rotary: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
    only_silu: bool = True
    misses_last_layer: frozenset[Layout] = frozenset()
    divides_heads: bool = True
    needs_markov: bool = False
    mixes_causal: bool = True
    causal_full: bool = True
    passes_over: tuple[str, ...] = ()
    has_medusa: bool = False
    reads_speculators: bool = False
    reads_others: bool = True
    lends_lm_head: bool = True
    adds_bias: bool = False
    holds_verifier: bool = False
    faults: Mapping[Layout, Callable[[Checkpoint, Published], Faults]] = field(default_factory=dict)
    command: Callable[[str, Published, TargetFacts, Mapping[int, int]], list[str]] | None = None
    remarks: Callable[[Published], list[str]] = lambda _: []


OURS = EngineTraits("headstart", when_missing="needs it")


def tensor_faults(
    wanted: Mapping[str, tuple[int, ...]],
    beside: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    traits: EngineTraits,
) -> Faults:
    """What is wrong with tensors of these shapes: an engine needs those `wanted`, others may lie `beside` them."""
    for name in wanted:
        if name not in shapes:
            yield f"The tensor {name} is missing, and {traits.name} {traits.when_missing}.", AGAIN
    expected = {**beside, **wanted}
    for name, shape in sorted(shapes.items()):
        if name not in expected:
            yield f"{traits.name} has no tensor {name} in such heads, and {traits.when_unknown}.", AGAIN
        elif shape != expected[name]:
            yield f"The tensor {name} is {list(shape)}, and its config asks for {list(expected[name])}.", AGAIN
