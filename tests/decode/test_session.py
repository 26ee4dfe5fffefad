"""Failing drafters, batches that do not fit into memory, and the loop's experience."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.decode.costs import Costs
from headstart.decode.loop import DecodeLoop
from headstart.decode.memory import reserve
from headstart.decode.options import DecodeOptions
from headstart.decode.verify import GreedyVerifier, walk_on_device
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target, TargetOutput
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, TreeShape
from tests.decode.drafters import ReplayDrafter
from tests.heads.test_contract import build
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model

OPTIONS = DecodeOptions(max_new_tokens=24, ignore_end=True)
TEXTS = [[1, 2, 3], [4, 5, 6, 7]]


class FailingDrafter(ReplayDrafter):
    """Raises in one of its methods, in the third round."""

    def __init__(self, known: Sequence[Sequence[int]], where: str) -> None:
        super().__init__(known, 61, 0.9)
        self.where = where
        self.calls = 0

    def fail(self, where: str) -> None:
        self.calls += where == self.where
        if where == self.where and (self.calls == 3 or where == "prefill"):
            raise RuntimeError("out of ideas")

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        self.fail("prefill")
        return super().prefill(prompts, states)

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        self.fail("propose")
        return super().propose(session, roots, request)

    def commit(self, session: Any, committed: Committed) -> None:
        self.fail("commit")
        super().commit(session, committed)


@pytest.mark.drafter_fails
@pytest.mark.parametrize("where", ["prefill", "propose", "commit"])
def test_a_failing_drafter_leaves_plain_decoding_and_is_named(where: str, target: Target) -> None:
    plain = DecodeLoop(target).generate(TEXTS, OPTIONS)
    outputs = DecodeLoop(target, FailingDrafter([row.tokens for row in plain], where)).generate(TEXTS, OPTIONS)
    assert [row.tokens for row in outputs] == [row.tokens for row in plain]
    assert all(row.drafter_error == "RuntimeError: out of ideas" for row in outputs)
    assert all(round.emitted == 1 for row in outputs for round in row.rounds[4:])
    assert all(row.drafter_error is None for row in plain)


@pytest.mark.drafter_fails
def test_a_failure_is_named_even_where_the_first_token_ends_the_text(target: Target) -> None:
    (output,) = DecodeLoop(target, FailingDrafter([[1]], "prefill")).generate(TEXTS[:1], DecodeOptions(1))
    assert len(output.tokens) == 1 and not output.rounds
    assert output.drafter_error == "RuntimeError: out of ideas"


def test_no_drafter_is_called_if_only_the_root_fits(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    plain = [row.tokens for row in DecodeLoop(target).generate(TEXTS, OPTIONS)]
    monkeypatch.setattr("headstart.decode.batch.reserve", lambda *_: 1)
    outputs = DecodeLoop(target, FailingDrafter(plain, "propose")).generate(TEXTS, OPTIONS)
    assert [row.tokens for row in outputs] == plain
    assert all(row.drafter_error is None for row in outputs)


def test_memory_lowers_the_budget_and_refuses_what_cannot_fit(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    text, slots = 4 + 24, 4 + 24 + 32
    beside, per_node = target.forward_bytes(2, slots)
    per_token = 2 * target.kv_bytes_per_token
    assert per_node >= 2 * 4 * (61 + slots), "logits and a mask"
    free = int((text * per_token + beside + 5 * (per_token + per_node)) / 0.9) + 1
    assert reserve(target, TEXTS, 24, 32, free=free) == 5
    assert reserve(target, TEXTS, 24, 32, free=text * per_token) == 0
    with pytest.raises(UserError, match=r"Decoding a prompt to 28 tokens takes .* are usable on cpu"):
        reserve(target, TEXTS[1:], 24, 32, free=text * per_token // 4)
    assert reserve(target, TEXTS, 24, 3, free=free) == 3
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=123_456, total=10**9, free=7))
    assert free_bytes(torch.device("cpu")) == 123_456


def test_drafters_memory_reduces_the_nodes_and_no_single_prompts_text(target: Target) -> None:
    text, slots, keep = 4 + 24, 4 + 24 + 32, 1000
    for prompts in (TEXTS, TEXTS[1:]):
        rows = len(prompts)
        beside, per_node = target.forward_bytes(rows, slots)
        per_token = rows * target.kv_bytes_per_token
        enough = beside + text * (per_token + rows * keep) + 5 * (per_token + rows * keep + per_node)
        assert reserve(target, prompts, 24, 32, keep, free=int(enough / 0.9) + 1) == 5
        scarce = int((beside + (text + 1) * per_token + per_node) / 0.9) + 1
        assert reserve(target, prompts, 24, 32, keep, free=scarce) == (0 if rows > 1 else 1)


def test_heads_and_early_exit_report_their_memory_per_token(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    asked: list[int] = []
    monkeypatch.setattr("headstart.decode.batch.reserve", lambda *given: asked.append(given[4]) or 8)
    for name in ("medusa", "eagle3", "dflash"):
        heads = build(name, target)
        drafter = HeadDrafter(heads, TreeShape.chain(2))
        asked.clear()
        DecodeLoop(target, drafter).generate(TEXTS[:1], OPTIONS)
        session = drafter.prefill([[1]], {layer: torch.zeros(1, 1, target.hidden_size) for layer in heads.aux_layers})
        kv = session.cache.kv if hasattr(session, "cache") else []
        cached = sum(keys[0, :, 0].nbytes + values[0, :, 0].nbytes for keys, values in kv)
        assert asked == [len(heads.aux_layers) * target.hidden_size * 4 + 2 * cached]
    DecodeLoop(target, EarlyExitDrafter(target, 1)).generate(TEXTS[:1], OPTIONS)
    assert 3 * asked[-1] == target.kv_bytes_per_token


def test_memory_held_for_the_next_text_is_not_counted_twice(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a text just fits, it fits again: the graphs' memory is part of its needs."""
    host = Target(tiny_model("llama", vocab_size=61))
    target = Target(tiny_model("llama", vocab_size=61).to(CUDA))
    heads = build("eagle3", host).to(CUDA)
    heads.bind(target)
    drafter, whole = HeadDrafter(heads, TreeShape.chain(3)), 1 << 30
    monkeypatch.setattr("headstart.replay.cuda_graphs._ROUND_UP_SHARE", 0.0)

    def left(_: torch.device) -> int:
        return whole - target.spare_bytes - drafter.spare_bytes

    def nodes(prompts: list[list[int]]) -> int:
        return reserve(target, prompts, 24, drafter.max_nodes, drafter.bytes_per_token, drafter.spare_bytes)

    monkeypatch.setattr("headstart.decode.memory.free_bytes", left)
    while nodes(TEXTS) == drafter.max_nodes:
        whole = whole * 15 // 16
    whole = whole * 17 // 15
    assert nodes(TEXTS) == drafter.max_nodes
    DecodeLoop(target, drafter).generate(TEXTS, replace(OPTIONS, draft="on"))
    assert drafter._graphs is not None
    (memory,) = drafter._graphs._spares
    assert drafter.spare_bytes >= sum(store.nbytes for store in memory.stores) > 0
    assert nodes(TEXTS) == drafter.max_nodes


def test_states_of_the_prompt_go_when_drafters_have_read_them(target: Target) -> None:
    left: list[bool] = []

    class Reader(NgramDrafter):
        aux_layers = (1,)

        def prefill(self, prompts: Any, states: dict[int, Tensor]) -> Any:
            self.state = weakref.ref(states[1])
            return super().prefill(prompts, states)

        def propose(self, *given: Any) -> list[Tree]:
            left.append(self.state() is not None)
            return super().propose(*given)

    DecodeLoop(target, Reader()).generate(TEXTS, OPTIONS)
    assert left and not any(left)


@pytest.mark.drafter_fails
@pytest.mark.parametrize("where", ["prefill", "propose", "commit"])
def test_a_drafter_without_memory_names_what_to_lower(where: str, target: Target) -> None:
    class Hungry(FailingDrafter):
        def fail(self, where: str) -> None:
            if where == self.where:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    plain = DecodeLoop(target).generate(TEXTS[:1], OPTIONS)
    (output,) = DecodeLoop(target, Hungry([row.tokens for row in plain], where)).generate(TEXTS[:1], OPTIONS)
    assert output.tokens == plain[0].tokens
    assert output.drafter_error is not None
    for setting in ("prompt", "--max-new-tokens", "max_nodes"):
        assert setting in output.drafter_error


def test_a_narrow_budget_decodes_the_same(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    plain = [row.tokens for row in DecodeLoop(target).generate(TEXTS, OPTIONS)]
    monkeypatch.setattr("headstart.decode.batch.reserve", lambda *_: 3)
    outputs = DecodeLoop(target, ReplayDrafter(plain, 61, 0.8)).generate(TEXTS, OPTIONS)
    assert [row.tokens for row in outputs] == plain
    assert max(round.nodes for row in outputs for round in row.rounds) == 3


# -- batches that memory does not hold -------------------------------------------------------------------------------

ROWS = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [3, 3, 3, 3, 3]]


class Reading:
    """The caches of a call, by rows, and the tokens of every row as they arrive."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caches: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        honest = Target.new_cache

        def new_cache(target: Target, rows: int, capacity: int) -> Any:
            self.caches.append(rows)
            return honest(target, rows, capacity)

        monkeypatch.setattr(Target, "new_cache", new_cache)

    def on_tokens(self, row: int, tokens: list[int], _drafted: int) -> None:
        self.tokens.setdefault(row, []).extend(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["auto", "top_k"])
def test_large_batch_halves(temperature: float, verifier: str, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """With chains of 2 in every row, as with enough memory: seeds and random numbers follow a row's number."""
    options = replace(OPTIONS, temperature=temperature, verifier=verifier, seed=5)
    known = [row.tokens for row in DecodeLoop(target).generate(ROWS, options)]
    # A drafter that knows the texts would know them by the number of a row in its own batch.
    together = DecodeLoop(target, NgramDrafter()).generate(ROWS, options)
    reading, asked = Reading(target, monkeypatch), list[int]()

    def short(_target: Target, prompts: Sequence[Sequence[int]], *_: int) -> int:
        asked.append(len(prompts))
        return 32 if len(prompts) == 1 else 0

    monkeypatch.setattr("headstart.decode.batch.reserve", short)
    outputs = DecodeLoop(target, NgramDrafter()).generate(ROWS, options, reading.on_tokens)
    assert asked == [4, 2, 1, 1, 2, 1, 1] and reading.caches == [1, 1, 1, 1]
    assert [row.tokens for row in outputs] == [row.tokens for row in together]
    assert reading.tokens == {number: row.tokens for number, row in enumerate(outputs)}
    if not temperature:
        assert [row.tokens for row in outputs] == known


@pytest.mark.parametrize("where", ["prefill", "forward_tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_out_of_memory_halves(temperature: float, where: str, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.9}
    options = replace(OPTIONS, temperature=temperature, seed=5, logprobs=0, **penalties)
    plain = [row.tokens for row in DecodeLoop(target).generate(ROWS, options)]
    reading, honest, calls = Reading(target, monkeypatch), getattr(Target, where), itertools.count()

    def short(target: Target, cache: Any, *rest: Any) -> TargetOutput:
        if cache.rows > 2 and (where == "prefill" or next(calls) == 9):
            raise MemoryError
        return honest(target, cache, *rest)

    monkeypatch.setattr(Target, where, short)
    outputs = DecodeLoop(target).generate(ROWS, options, reading.on_tokens)
    assert reading.caches == [4, 2, 2]
    assert [row.tokens for row in outputs] == plain
    assert reading.tokens == dict(enumerate(plain))
    assert all(row.finish_reason == "length" for row in outputs)
    assert [[token for one in row.logprobs for token in one] for row in outputs] == plain


@pytest.mark.parametrize("where", ["prefill", "propose", "commit"])
def test_drafters_out_of_memory_get_fewer_rows(where: str, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    plain = [row.tokens for row in DecodeLoop(target).generate(ROWS, OPTIONS)]
    reading, honest = Reading(target, monkeypatch), getattr(NgramDrafter, where)

    def short(drafter: NgramDrafter, session: Any, *rest: Any) -> Any:
        if len(session) > 2:
            raise MemoryError
        return honest(drafter, session, *rest)

    monkeypatch.setattr(NgramDrafter, where, short)
    outputs = DecodeLoop(target, NgramDrafter()).generate(ROWS, OPTIONS)
    assert reading.caches == [4, 2, 2] and [row.tokens for row in outputs] == plain
    assert all(row.drafter_error is None for row in outputs)


def test_a_single_prompt_that_does_not_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    reading = Reading(target, monkeypatch)
    monkeypatch.setattr("headstart.decode.memory.free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match="Decoding a prompt to 29 tokens takes"):
        DecodeLoop(target).generate(ROWS, OPTIONS)
    assert not reading.caches


def test_a_single_prompt_out_of_memory_is_a_users_error(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:

    def fail(*_: Any) -> TargetOutput:
        raise MemoryError

    monkeypatch.setattr(Target, "forward_tree", fail)
    with pytest.raises(UserError, match="Decoding a single prompt takes more memory than cpu has"):
        DecodeLoop(target).generate(ROWS, OPTIONS)


# -- what was learned ------------------------------------------------------------------------------------------------


class Clock:
    """Ticks as given, whatever is done."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.steps = 0.0, itertools.cycle(seconds)

    def __call__(self) -> float:
        self.now += next(self.steps)
        return self.now


@pytest.mark.parametrize(("temperature", "deterministic"), [(0.0, False), (1.0, False), (0.0, True)])
def test_only_greedy_decoding_learns_from_the_clock_and_from_earlier_calls(
    temperature: float, deterministic: bool, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    """On a machine with equal times for everything, and on one with very slow drafts."""
    known = [row.tokens for row in DecodeLoop(target).generate(TEXTS, OPTIONS)]
    options = replace(OPTIONS, temperature=temperature, seed=3, deterministic=deterministic)
    found = []
    for ticks, earlier in (((1e-3,), 0), ((1e-3, 1.0, 1e-3, 1e-3), 3)):
        monkeypatch.setattr("headstart.decode.batch.perf_counter", Clock(*ticks))
        drafter = ReplayDrafter(known, 61, 1.0)
        loop = DecodeLoop(target, drafter, costs=Costs((1, 64), (10.0, 11.0), 1.0, 0.1, 8))
        for number in range(earlier):
            loop.generate([[9, 8, 7], [5]], replace(options, seed=number))
        drafter.rng.seed(0)
        outputs = loop.generate(TEXTS, options)
        found.append([(row.tokens, [one.nodes for one in row.rounds]) for row in outputs])
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    assert (found[0] == found[1]) == (temperature > 0 or deterministic), "the number of drafts"


def test_plain_rounds_to_the_end_read_no_states(tiny_target: Target, spy: Any) -> None:
    """Once nothing more will be drafted, the loop reads no states for the drafter and stops learning."""
    drafter = ReplayDrafter([[5] * 40], tiny_target.vocab_size, right=0.0)
    drafter.aux_layers = (1,)
    calls = spy(Target, "forward_tree")
    dear = Costs((1, 64), (1.0, 100.0), draft_ms=50.0)
    options = DecodeOptions(max_new_tokens=24, ignore_end=True)
    answer = DecodeLoop(tiny_target, drafter, costs=dear).generate([[4, 5, 6]], options)[0]
    assert answer.tokens == DecodeLoop(tiny_target).generate([[4, 5, 6]], options)[0].tokens
    used = [tuple(*aux_layers) for _, _, _, *aux_layers in calls[: len(answer.rounds)]]
    assert used[-1] == (), "no hidden states are read at the end"
    assert sorted(used, reverse=True) == used, "and never again once it was not"


@pytest.mark.parametrize("seed", range(5))
def test_accepting_on_the_device_is_accepting_on_the_host(seed: int) -> None:
    """Trees of several rows and sizes, with some correct drafts."""
    rng = random.Random(seed)
    trees = []
    for _ in range(4):
        tree = Tree([rng.randrange(5)])
        held: dict[int, int] = {}
        for node in range(1, rng.randint(1, 12)):
            parent = rng.randrange(node)
            held[parent] = held.get(parent, rng.randrange(5)) + 1  # siblings hold different tokens
            tree.add(parent, held[parent] % 9)
        trees.append(tree)
    batch = TreeBatch.of(trees)
    choice_BN = torch.tensor([[rng.randrange(9) for _ in range(batch.size)] for _ in trees])
    for row, tree in enumerate(trees):  # the first child of every other node is right
        for node in range(tree.size - 1, 0, -1):
            if node % 2:
                choice_BN[row, tree.parents[node]] = tree.tokens[node]
    out = TargetOutput(torch.nn.functional.one_hot(choice_BN, 9).float())
    expected, expected_roots = GreedyVerifier().accept(batch, out)
    found, roots = walk_on_device(batch, out, choice_BN)
    assert (found.paths, found.tokens) == (expected.paths, expected.tokens)
    assert roots.root_tokens == expected_roots.root_tokens
    for part in ("paths_BP", "counts_B"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    assert torch.equal(roots.root_B, expected_roots.root_B)
    assert max(map(len, found.paths)) > 1 or seed, "some drafts are accepted"


class LongestChains(ReplayDrafter):
    """Proposes a chain that uses every requested node."""

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        return [Tree.chain_of([root] + [1] * (request.max_nodes - 1)) for root in roots.root_tokens]


def test_drafts_before_a_rotary_limit_fit_and_are_verified() -> None:
    """Phi-3's rotary frequencies change at 24 tokens here. A randomly drawn tree must not be dropped for its depth, so
    drafters get a limit that fits."""
    target = Target(tiny_model("phi3_long", vocab_size=61))
    text = [[*range(3, 19)]]
    options = DecodeOptions(max_new_tokens=14, ignore_end=True, draft="on")
    plain = DecodeLoop(target).generate(text, options)[0].tokens
    found = DecodeLoop(target, LongestChains([plain], 61, 1.0)).generate(text, options)[0]
    nodes = [one.nodes for one in found.rounds]
    assert found.tokens == plain and found.drafter_error is None
    assert nodes[:8] == [8, 7, 6, 5, 4, 3, 2, 1] and set(nodes[8:]) == {9}
