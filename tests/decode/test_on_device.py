"""Decoding and training on a stand-in CUDA device: no operation mixes devices, and greedy texts equal the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.decode.costs import Costs
from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.verify import SAMPLES_DRAFTS
from headstart.drafters.catalog import make_drafters
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.heads.base import DraftHead, HeadBatch
from headstart.heads.io import load_heads, save_heads
from headstart.model.model import Target
from headstart.recipes.sections import TrainSection
from headstart.support.answer_file import write_answers
from headstart.train.batches import count_predictions, subsample
from headstart.train.fused_loss import Teacher, batch_loss
from headstart.train.losses import LOSSES
from headstart.train.optimizers import make_optimizers
from headstart.tree.tree import TreeShape
from tests.heads.test_contract import CASES, batch_of, build, shake
from tests.standin import CUDA, StandIn, clock_of_captures
from tests.tiny import tiny_model

TEXTS = [[3, 9, 14, 3, 9, 14, 3, 9], [8, 40, 12, 5, 51, 22]]
GREEDY = DecodeOptions(max_new_tokens=6, ignore_end=True)
SHAPE = TreeShape.from_paths([(0, 0), (1, 0), (2,)])


@pytest.fixture(scope="module")
def host() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


@pytest.fixture(scope="module")
def target() -> Target:
    with StandIn():
        return Target(tiny_model("llama", vocab_size=61).to(CUDA))


def texts_of(target: Target, *drafters: Drafter, options: DecodeOptions = GREEDY) -> list[list[int]]:
    outputs = DecodeLoop(target, *drafters).generate(TEXTS, options)
    assert [output.drafter_error for output in outputs] == [None] * len(TEXTS)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral", "gpt2", "phi3_long"])
def test_plain_decoding_of_every_architecture(kind: str, device: StandIn) -> None:
    expected = texts_of(Target(tiny_model(kind, vocab_size=61)))
    target = Target(tiny_model(kind, vocab_size=61).to(CUDA))
    assert target.device == CUDA
    before = device.counts
    assert texts_of(target) == expected
    assert (device.counts - before).launches > 100, "it ran there"


@pytest.mark.parametrize(
    ("name", "tree"), [*((name, "dynamic") for name in CASES), ("medusa", "static"), ("eagle3", "chain")]
)
def test_every_family(name: str, tree: Any, host: Target, target: Target, device: StandIn) -> None:
    heads = shake(build(name, host)).to(CUDA)
    heads.bind(target)
    drafter = HeadDrafter(heads, SHAPE, tree, max_nodes=8)
    assert texts_of(target, drafter) == texts_of(host)


DRAFTERS = "ngram memory lookahead early-exit:1 heads heads+ngram heads+ngram+memory lookahead+ngram"


@pytest.mark.parametrize("name", DRAFTERS.split())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters(name: str, temperature: float, host: Target, target: Target, device: StandIn, tmp_path: Path) -> None:
    answers = tmp_path / "answers.bin"
    write_answers(answers, [[*text, *texts_of(host)[row]] for row, text in enumerate(TEXTS)], 1_000_000)
    trained = build("eagle3", host).to(CUDA)
    trained.bind(target)
    drafters = make_drafters(name, target, HeadDrafter(trained, SHAPE, "dynamic"), answers)
    options = DecodeOptions(max_new_tokens=6, ignore_end=True, temperature=temperature, seed=0)
    texts = texts_of(target, *drafters, options=options)
    assert texts == texts_of(host) if not temperature else list(map(len, texts)) == [6, 6]


def no_repeats(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.scatter(1, input_ids[:, -1:], float("-inf"))


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "cuts": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}},
    "processors": {"temperature": 1.0, "repetition_penalty": 1.3, "processors": (no_repeats,)},
    "greedy with processors": {"repetition_penalty": 1.3, "processors": (no_repeats,)},
}


@pytest.mark.parametrize(
    ("rule", "settings"),
    [*((rule, "temperature") for rule in SAMPLES_DRAFTS), *(("auto", settings) for settings in SETTINGS)],
)
def test_every_rule(rule: str, settings: str, host: Target, target: Target, device: StandIn) -> None:
    heads = HeadDrafter(build("medusa", host).to(CUDA), SHAPE)
    options = DecodeOptions(max_new_tokens=6, ignore_end=True, verifier=rule, **SETTINGS[settings])
    for drafters in ([], [heads], [NgramDrafter()]):
        assert list(map(len, texts_of(target, *drafters, options=options))) == [6, 6]


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}])
def test_greedy_penalties_and_logprobs(settings: Any, host: Target, target: Target, device: StandIn) -> None:
    """The same tokens as on the host, whose nodes are decided level by level."""
    options = DecodeOptions(max_new_tokens=12, ignore_end=True, logprobs=2, **settings)
    expected = DecodeLoop(host).generate(TEXTS, options)
    for drafters in ([], [HeadDrafter(build("medusa", host).to(CUDA), SHAPE)], [NgramDrafter()]):
        found = DecodeLoop(target, *drafters).generate(TEXTS, options)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tokens == theirs.tokens
            for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert one == pytest.approx(other, abs=1e-5)  # products on the host sum in another order


@pytest.mark.parametrize("name", CASES)
def test_heads_load_to_a_device(name: str, host: Target, target: Target, device: StandIn, tmp_path: Path) -> None:
    save_heads(shake(build(name, host)), tmp_path / "heads")
    expected = load_heads(tmp_path / "heads")
    before, random = device.counts, torch.random.get_rng_state()
    heads = load_heads(tmp_path / "heads", device=CUDA)
    assert (device.counts - before).uploads == len(heads.state_dict()), "nothing goes there but what was saved"
    assert torch.equal(torch.random.get_rng_state(), random), "nothing is drawn"
    ours, theirs = ({**dict(held.named_parameters()), **dict(held.named_buffers())} for held in (heads, expected))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.device == CUDA and tensor.dtype == theirs[key].dtype and torch.equal(tensor.cpu(), theirs[key])
    heads.bind(target)
    assert texts_of(target, HeadDrafter(heads, SHAPE, max_nodes=8)) == texts_of(host)


def test_cudnn_attention_is_off(host: Target, target: Target, device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a target disables cuDNN attention for the process. Forwards change no such setting: other threads would
    see it."""

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*args, **kwargs)

    def refuse(_: bool) -> None:
        raise AssertionError("a setting of the whole process")

    allowed: list[bool] = []
    original = torch.nn.functional.scaled_dot_product_attention
    torch.backends.cuda.enable_cudnn_sdp(True)
    Target(tiny_model("llama", vocab_size=61))
    assert torch.backends.cuda.cudnn_sdp_enabled(), "a target on the host leaves it alone"
    eager = Target(tiny_model("phi3_long", vocab_size=61).to(CUDA))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for kernels in ("cudnn", "flash", "mem_efficient", "math"):
        monkeypatch.setattr(torch._C, f"_set_sdp_use_{kernels}", refuse)
    for name, reader in (("eagle3", target), ("dflash", target), ("eagle3", eager)):
        heads = build(name, host if reader is target else reader).to(CUDA)
        heads.bind(reader)
        texts_of(reader, HeadDrafter(heads, SHAPE, "chain" if name == "dflash" else "dynamic", max_nodes=8))
        reader.hidden_states(TEXTS, [1])
        assert len(allowed) > 10 and not any(allowed)
        allowed.clear()


# -- training ----------------------------------------------------------------------------------------------------------

LESSONS = [list(range(1, 25)), list(range(20, 36))]


def loss_of(heads: DraftHead, target: Target, batch: HeadBatch, section: TrainSection) -> float:
    """One optimiser step, as the training loop does it; returns the loss."""
    optimizers = make_optimizers(heads, section)
    loss = batch_loss(
        heads.train().unroll(batch),
        LOSSES[section.loss],
        Teacher(target, heads.draft_to_target_D).logits(batch),
        section.step_weight,
        section.position_weight,
        0.1 if heads.drafts_features else 0.0,
    )
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    torch.nn.utils.clip_grad_norm_(heads.parameters(), section.max_grad_norm)
    before = [parameter.detach().clone() for parameter in heads.parameters()]
    for optimizer in optimizers:
        optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, heads.parameters(), strict=True)), "it learns"
    return float(loss.detach())


def on_both(name: str, host: Target, target: Target) -> tuple[DraftHead, DraftHead]:
    """Return the same heads twice: on the host, and on the target's device."""
    heads = shake(build(name, host))
    moved = build(name, host).to(target.device)
    moved.load_state_dict(heads.state_dict())
    moved.bind(target)
    return heads, moved


def training_batch(host: Target, heads: DraftHead, device: str) -> HeadBatch:
    batch = batch_of(host, heads, LESSONS, prompt=3)
    final = batch_of(host, build("medusa", host), LESSONS, prompt=3).states
    states = {layer: state.to(device) for layer, state in (final | batch.states).items()}
    return HeadBatch(batch.tokens_BT.to(device), batch.supervised_BT, states)


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_of_every_family(name: str, host: Target, target: Target, device: StandIn) -> None:
    section = TrainSection()
    heads, moved = on_both(name, host, target)
    expected = loss_of(heads, host, training_batch(host, heads, "cpu"), section)
    batch = training_batch(host, heads, "cuda")
    assert loss_of(moved, target, batch, section) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss": loss} for loss in LOSSES),
        {"position_weight": "subsampled"},
        {"position_weight": "dpace"},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_a_training_step_of_every_kind(settings: dict[str, Any], host: Target, target: Target, device: StandIn) -> None:
    section = TrainSection(**settings)
    heads = build("hydra", host).to(CUDA)
    batch = training_batch(host, heads, "cuda")
    if section.position_weight == "subsampled":
        batch = subsample(batch, section.step_weight, [0])
    assert count_predictions(batch) > 5
    assert loss_of(heads, target, batch, section) > 0


def test_captures_are_not_timed(host: Target, target: Target, device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting captures made drafting look slow, and it was given up for good."""
    clock_of_captures(monkeypatch, "headstart.decode.batch")
    heads = shake(build("eagle3", host)).to(CUDA)
    heads.bind(target)
    costs = Costs((1, 64), (2.0, 2.0), draft_ms=1.0, levels=3)
    loop = DecodeLoop(target, HeadDrafter(heads, SHAPE, "dynamic", max_nodes=8), costs=costs)
    for _ in range(4):
        loop.generate(TEXTS[:1], DecodeOptions(max_new_tokens=40, ignore_end=True))
    (experience,) = loop._experience.values()
    ratios = experience.rounds.ratios
    assert len(ratios[0]) >= 2, "drafts were timed"
    assert max(ratio for of_kind in ratios.values() for ratio in of_kind) < 10, ratios
