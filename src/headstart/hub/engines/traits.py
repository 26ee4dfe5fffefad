"""Traits of engines that read heads; the instances are in `known_engines.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headstart.heads.exchange.published import Layout, Published
from headstart.hub.engines.base import AGAIN, Faults
from headstart.hub.engines.checkpoint import Checkpoint
from headstart.hub.target_facts import TargetFacts


@dataclass(frozen=True)
class EngineTraits:
    """How an engine treats heads.

    Attributes:
        name: the name users type.
        architectures: names of the heads in config.json by layout, the usual one first.
        when_missing, when_unknown: behaviour for a missing and an unknown tensor.
        rotary: supported RoPE types.
        misses_last_layer: layouts that cannot read the output of the target's last layer.
        divides_heads: whether the hidden size must be a multiple of the number of attention heads (as in transformers'
            LlamaConfig).
        needs_markov: whether it identifies DSpark heads by their Markov head.
        mixes_causal: whether only some layers of a block drafter may be causal.
        causal_full: whether layers without a sliding window may be causal.
        passes_over: unsupported settings of EAGLE-3 heads; if there are any, it runs one layer that reads three of the
            target's.
        reads_speculators, reads_others: whether it reads configs of the speculators library, and others.
        lends_lm_head: whether EAGLE-3 heads without an LM head use the target's.
        adds_bias: whether it supports a bias of `fc` in EAGLE-1 heads.
        holds_verifier: whether it knows tensors of the target in folders of block drafters.
        faults: checks of a folder for this engine alone, by layout.
        command: builds the serve command from the heads' folder, heads, target, and drafts by concurrent requests; None
            if it is not a server.
        remarks: notes on heads that it reads but does not serve everywhere.
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
    """Report missing, unknown and misshapen tensors: `wanted` are required, `beside` optional."""
    for name in wanted:
        if name not in shapes:
            yield f"The tensor {name} is missing, and {traits.name} {traits.when_missing}.", AGAIN
    expected = {**beside, **wanted}
    for name, shape in sorted(shapes.items()):
        if name not in expected:
            yield f"{traits.name} has no tensor {name} in such heads, and {traits.when_unknown}.", AGAIN
        elif shape != expected[name]:
            yield f"The tensor {name} is {list(shape)}, and its config asks for {list(expected[name])}.", AGAIN
