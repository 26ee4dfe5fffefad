"""Recorded forwards: a replay matches the model's modules, and models that cannot be recorded give a reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, GptOssForCausalLM

from headstart.decode.costs import Conditions
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decoder import Decoder
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.eval.environment import environment
from headstart.kernels.prepacked import MAX_ROWS
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.replay.recorded import Recorded, Replay
from headstart.replay.recorder import NotRecordable, compile_graph, record
from headstart.tree.tree import Tree, TreeBatch
from tests.heads.test_frozen_lm_head import TARGETS as SCALED
from tests.heads.test_frozen_lm_head import tiny as scaled
from tests.replay.test_chains import hybrid
from tests.spies import spy
from tests.tiny import KINDS, LONG, packed_model, tiny_model, tiny_tokenizer

TEXTS = [[5, 9, 2, 7, 7, 1, 30], [4, 4, 8], [*range(1, 13)], [3]]
AUX_LAYERS = (0, 2, FINAL)
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
ROUNDING = 1e-5
"""For logits of size 1, float32 sums of up to 100 products in another order."""
CLOSE = {torch.float32: {"rtol": ROUNDING, "atol": ROUNDING}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}
"""In bfloat16 a sum in another order may round to a neighbouring number, in each of 3 layers."""


@contextmanager
def through_modules(target: Target) -> Iterator[None]:
    """Run forwards through the modules, as without a recording: the reference."""
    recorded, target._recorded = target._recorded, Recorded(refused="this is the reference")
    try:
        yield
    finally:
        target._recorded = recorded


def replay_of(target: Target) -> Replay:
    target.record()
    assert target._recorded.replay is not None, target.eager
    return target._recorded.replay


def tree(width: int, seed: int = 0) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(node, (1,), generator=draw)) for node in range(1, width))]
    return Tree(torch.randint(1, 100, (width,), generator=draw).tolist(), parents)


def rounds(target: Target, rows: int, width: int) -> list[Tensor]:
    """Return all logits and states of a prefill, two rounds and a plain step."""
    cache = target.new_cache(rows, 12 + 3 * width)
    texts = TEXTS[:rows]
    read = target.prefill(cache, texts, AUX_LAYERS)
    seen = [read.logits_BTV, *(read.aux_hidden_states[layer][0, : len(texts[0])] for layer in AUX_LAYERS)]
    for seed in (1, 2):
        out = target.forward_tree(cache, TreeBatch.of([tree(width, seed + row) for row in range(rows)]), AUX_LAYERS)
        seen += [out.logits_BTV, *(out.aux_hidden_states[layer] for layer in AUX_LAYERS)]
        cache.commit([[0, 1][:width] if row != 1 else [0] for row in range(rows)])  # lengths diverge
    return [*seen, target.forward_tree(cache, TreeBatch.roots([7] * rows)).logits_BTV]


def check_replay(target: Target, rows: int, width: int) -> None:
    """Assert that forwards match the modules, up to rounding."""
    replayed = rounds(target, rows, width)
    with through_modules(target):
        expected = rounds(target, rows, width)
    torch.testing.assert_close(replayed, expected, atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_matches_the_modules(kind: str, rows: int, width: int) -> None:
    """Every width from one recording, beyond a sliding window, and for rows of unequal lengths."""
    target = Target(tiny_model(kind))
    assert target.eager is None
    check_replay(target, rows, width)


def test_replay_runs_no_modules() -> None:
    target = Target(tiny_model("llama"))
    cache = target.new_cache(1, 20)
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: called.append(type(module).__name__))
    try:
        target.prefill(cache, [[1, 2, 3]])
        target.forward_tree(cache, TreeBatch.roots([3]))
    finally:
        handle.remove()
    assert called == ["Linear", "Linear"], "only the LM head"


@pytest.mark.parametrize("before", [True, False], ids=["before it is recorded", "after it was"])
@pytest.mark.parametrize("where", ["a hook", "a forward", "a layer's hook"])
def test_foreign_hooks_are_called(where: str, before: bool) -> None:
    target, called = Target(tiny_model("llama")), list[int]()
    if not before:
        target.record()
    model, forward = target.model, target.model.forward
    if where == "a forward":
        model.forward = lambda *args, **kwargs: called.append(1) or forward(*args, **kwargs)
    else:
        hooked = model if where == "a hook" else model.model.layers[1]
        hooked.register_forward_pre_hook(lambda module, args: called.append(1))
    cache = target.new_cache(1, 20)
    called.clear()
    target.prefill(cache, [[1, 2, 3]])
    name = "model.layers.1" if where == "a layer's hook" else "LlamaForCausalLM"
    assert called and target.eager is not None and f"{name} has hooks" in target.eager


def test_long_texts_run_through_the_modules() -> None:
    target = Target(tiny_model("llama", max_length=2 * MAX_ROWS))
    replay = replay_of(target)
    assert replay.serves(MAX_ROWS, False) and not replay.serves(MAX_ROWS + 1, False)
    text = [1 + i % 100 for i in range(MAX_ROWS + 5)]
    read = target.prefill(target.new_cache(1, len(text)), [text]).logits_BTV
    torch.testing.assert_close(read[0, 0], target.model(torch.tensor([text])).logits[0, -1], atol=1e-4, rtol=1e-4)


def other_weights(target: Target) -> None:
    layer = target.model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(2 * layer.weight.detach(), requires_grad=False)


def other_embeddings(target: Target) -> None:
    target.model.set_input_embeddings(nn.Embedding.from_pretrained(-target.embedding_weight.detach()))


@pytest.mark.parametrize("replace", [other_weights, other_embeddings])
def test_replaced_modules_are_recorded_again(replace: Callable[[Target], None]) -> None:
    """A replaced parameter or module; `test_prepacked` changes weights in place."""
    target = Target(tiny_model("llama"))
    target.record()
    replace(target)
    check_replay(target, 1, 4)
    assert target.eager is None


def test_replaced_sinks_are_recorded_again() -> None:
    """Attention itself is not recorded."""
    sizes: dict[str, Any] = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    target = Target(GptOssForCausalLM(GptOssConfig(num_local_experts=4, num_experts_per_tok=2, **sizes, **heads)))
    check_replay(target, 1, 4)
    assert target.eager is None
    attention = target.model.model.layers[1].self_attn
    attention.sinks = nn.Parameter(attention.sinks.detach() + 3, requires_grad=False)
    check_replay(target, 1, 4)
    assert target.eager is None


ROTARY = "its rotary frequencies depend on the length of the text"
EAGER = {"phi3_long": ROTARY, "llama_long": ROTARY, "qwen3_next": "its layers keep running states"}
"""Models that run through their modules, with the reason. All others are recorded."""


@pytest.mark.parametrize("kind", [*KINDS, *LONG, *SCALED, "qwen3_next"])
def test_every_kind_of_model_is_recorded_or_gives_a_reason(kind: str) -> None:
    target = scaled(kind) if kind in SCALED else Target(hybrid() if kind == "qwen3_next" else tiny_model(kind))
    assert target.eager == EAGER.get(kind)
    assert target.forwards == (f"through the model's modules: {EAGER[kind]}" if kind in EAGER else "replayed")


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts operators with results larger than one number per token.

    The replay computes the scale of an RMS norm with one more small operator, but with none over whole states.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.tokens, self.count = tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += not func.is_view and not (isinstance(out, Tensor) and out.numel() <= self.tokens)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_round_runs_no_more_operators(kind: str) -> None:
    """For a tree and for a plain step; each operator has overhead on a CPU."""

    def operators(drafts: Tree) -> int:
        cache, batch = target.new_cache(1, 60), TreeBatch.of([drafts])
        target.prefill(cache, TEXTS[:1])
        target.forward_tree(cache, batch, AUX_LAYERS)  # weights are prepacked by now
        with Operators(drafts.size) as counted:
            target.forward_tree(cache, batch, AUX_LAYERS)
        return counted.count

    target = Target(tiny_model(kind))
    for drafts in (tree(8), Tree([5])):
        replayed = operators(drafts)
        with through_modules(target):
            assert 0 < replayed <= operators(drafts)


def test_packed_weights_are_replayed() -> None:
    target = Target(packed_model(tiny_model("llama"), 8))
    check_replay(target, 1, 4)


def test_computed_embeddings_are_not_recorded() -> None:
    """Their result may change from call to call."""

    class Wrapped(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.table, self.weight = table, table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens)  # type: ignore[no-any-return]

    target = Target(tiny_model("llama"))
    target.model.set_input_embeddings(Wrapped(target.model.get_input_embeddings()))
    target.new_cache(1, 8)
    assert target.eager is not None and "embeddings" in target.eager


def test_data_dependent_code_is_not_recorded() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp
    original = type(layer).forward

    class Looking(type(layer)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return original(self, x) if float(x.sum()) > -1e9 else x

    layer.__class__ = Looking
    target = Target(model)
    assert target.eager is not None and "reads tensor values" in target.eager
    assert rounds(target, 2, 4)


def test_wrong_replay_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Replay.__call__

    def wrong(self: Replay, *args: Any) -> dict[int, Tensor]:
        return {layer: state + 1 for layer, state in own(self, *args).items()}

    monkeypatch.setattr(Replay, "__call__", wrong)
    target = Target(tiny_model("llama"))
    assert target.eager is not None and "differ" in target.eager


def test_reports_and_costs_name_the_kind_of_forward() -> None:
    replayed, not_replayed = Target(tiny_model("llama")), Target(tiny_model("llama_long"))
    assert environment(replayed)["forward"] == "replayed"
    assert "rotary" in environment(not_replayed)["forward"]
    assert Conditions.of(replayed) != Conditions.of(not_replayed)


# -- the time of recording ---------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Log each recording: whether it runs in inference mode."""
    return spy(monkeypatch, Replay, "__init__", lambda *_: torch.is_inference_mode_enabled())


def test_reading_states_records_nothing(recordings: list[bool]) -> None:
    target = Target(tiny_model("llama"))
    target.hidden_states(TEXTS, AUX_LAYERS)
    assert not recordings


def test_first_decoding_records_once(recordings: list[bool]) -> None:
    """Outside inference mode, yet usable inside it; other lengths and batch sizes reuse the recording."""
    target = Target(tiny_model("llama"))
    for texts in 2 * ([TEXTS[0]], TEXTS, [9 * TEXTS[0]]):
        DecodeLoop(target).generate(texts, DecodeOptions(4))
    assert recordings == [False]
    assert target.eager is None and recordings == [False]


@pytest.mark.parametrize(
    "ask",
    [lambda target: target.eager, Conditions.of, environment, Decoder],
    ids=["eager", "conditions", "environment", "decoder"],
)
def test_decoding_and_reports_trigger_the_recording(ask: Callable[[Target], Any], recordings: list[bool]) -> None:
    ask(Target(tiny_model("llama")))
    assert recordings == [False]


def test_early_exit_is_recorded_before_drafting(recordings: list[bool]) -> None:
    drafter = EarlyExitDrafter(Target(tiny_model("llama")), 2)
    assert len(recordings) == 1 and drafter.first_layers.eager is None and len(recordings) == 1


def test_targets_with_another_tokenizer_share_the_recording(recordings: list[bool]) -> None:
    target = Target(tiny_model("llama"))
    other = target.with_tokenizer(tiny_tokenizer())
    assert other.eager is None and target.eager is None and len(recordings) == 1


def test_second_thread_waits_for_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    target, begun, second_begins = Target(tiny_model("llama")), list[int](), threading.Event()
    record = Replay.__init__

    def slow(self: Replay, *args: Any) -> None:
        begun.append(threading.get_ident())
        if len(begun) == 1:
            second_begins.wait(0.3)  # without the lock, the second begins at once
        else:
            second_begins.set()
        record(self, *args)

    monkeypatch.setattr(Replay, "__init__", slow)
    with ThreadPoolExecutor(2) as pool:
        decoded = [pool.submit(DecodeLoop(target).generate, [TEXTS[0]], DecodeOptions(8)) for _ in range(2)]
    assert decoded[0].result()[0].tokens == decoded[1].result()[0].tokens
    assert len(begun) == 1 and replay_of(target)


# -- the recorder ------------------------------------------------------------------------------------------------------


def texts(count: int) -> list[Tensor]:
    return [torch.arange(float(count))]


def test_sizes_become_formulas() -> None:
    weight = torch.randn(3, 1)

    def code(recorder: Any, x_T: Tensor) -> Tensor:
        count = x_T.shape[0]
        doubled = torch.cat([x_T, torch.zeros(count + 2)]).view(2 * count + 2)
        return (weight @ doubled[None])[:, : count + 1]

    replay = compile_graph(record(code, ["x_T"], texts, (11, 13)))
    for count in (1, 2, 30):
        (x_T,) = texts(count)
        assert torch.equal(replay(x_T, count), code(None, x_T))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (lambda recorder, x_T: x_T if x_T.sum() > 100 else -x_T, "reads tensor values"),
        (lambda recorder, x_T: x_T[x_T > 3], "reads tensor values"),
        (lambda recorder, x_T: x_T + x_T.nonzero().shape[0], "reads tensor values"),
        (lambda recorder, x_T: x_T * 2 if x_T.shape[0] > 12 else x_T + 2, "depend on the number"),
        (lambda recorder, x_T: x_T + x_T.shape[0] // 2, "depending on the number"),
    ],
)
def test_unrecordable_code_is_refused(code: Callable[..., Any], reason: str) -> None:
    with pytest.raises(NotRecordable, match=reason):
        record(code, ["x_T"], texts, (11, 13))


def test_in_place_writes_are_repeated() -> None:
    def code(recorder: Any, x_T: Tensor) -> Tensor:
        y_T = x_T + 1
        y_T[:1] = 5.0
        y_T *= 2
        y_T.view(-1).add_(1)
        return y_T

    replay = compile_graph(record(code, ["x_T"], texts, (11, 13)))
    (x_T,) = texts(6)
    assert torch.equal(replay(x_T, 6), code(None, x_T.clone()))
