"""The memory drafter: search against brute force, proposals by hand, losslessness, and remembering."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decoder import Decoder
from headstart.drafters.catalog import make_drafters
from headstart.drafters.memory import AHEAD, CONTEXT, LONGEST, WEIGHTS, AnswerIndex, MemoryDrafter, find
from headstart.errors import UserError
from headstart.eval.audit import run_audit
from headstart.eval.options import AuditOptions
from headstart.model.model import Target
from headstart.support.answer_file import AnswerFile, write_answers
from headstart.tree.tree import Committed, Tree, TreeShape
from tests.decode.drafters import lossless
from tests.drafters.helpers import propose
from tests.eval.sources import Drafts
from tests.hub.helpers import TUNING, make_heads
from tests.tiny import tiny_model

FINGERPRINT = "0a" * 16


def served_answers(file: Path, target: Target) -> list[list[int]]:
    return AnswerFile(file, target.identity().fingerprint).read_new()[0]


def memory_of(answers: Sequence[Sequence[int]], folder: Path, vocab_size: int = 61, **settings: Any) -> MemoryDrafter:
    write_answers(folder / "answers.bin", answers, 1_000_000)
    return MemoryDrafter(vocab_size, folder / "answers.bin", **settings)


# -- the search -------------------------------------------------------------------------------------------------------


def brute_force(answers: Sequence[Sequence[int]], tail: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return length and continuation of every match of at least two tokens."""
    found = []
    for answer in answers:
        for place in range(2, len(answer)):
            length = 0
            while length < min(place, len(tail), LONGEST) and answer[place - 1 - length] == tail[-1 - length]:
                length += 1
            if length >= 2:
                continuation = [*answer[place : place + AHEAD], *[-1] * AHEAD][:AHEAD]
                found.append((length, list(continuation)))
    return found


def whole(continuation: list[int]) -> tuple[int, ...]:
    return tuple(continuation[: continuation.index(-1)] if -1 in continuation else continuation)


@pytest.mark.parametrize("alphabet", [2, 3, 6, 40])
def test_matches_by_brute_force(alphabet: int) -> None:
    rng = random.Random(alphabet)
    index, answers = AnswerIndex(50), list[list[int]]()
    for number in range(60):
        repeats = answers and rng.random() < 0.5
        answer = list(rng.choice(answers)) if repeats else [rng.randrange(alphabet) for _ in range(rng.randint(1, 30))]
        answer += [rng.randrange(alphabet) for _ in range(rng.randint(1, 3))]
        index.add([answer])
        answers.append(answer)
        for _ in range(4):
            source = rng.choice(answers)
            tail = source[: rng.randint(1, len(source))][-rng.randint(1, LONGEST) :]
            every = [held for at, held in enumerate(answers) if len(held) > 2 and held not in answers[:at]]
            expected = brute_force(every, tail)
            ahead, lengths = find(index.segments, tail)
            assert lengths == sorted(lengths, reverse=True)
            if not expected:
                assert not ahead
                continue
            longest = max(length for length, _ in expected)
            assert lengths[0] == longest
            found = [(length, whole(rest)) for length, rest in zip(lengths, ahead, strict=True)]
            assert set(found) <= {(length, whole(rest)) for length, rest in expected}
            best = [rest for length, rest in expected if length == longest]
            assert lengths.count(longest) == min(32, len(best)), number


def test_parts_are_few_and_the_index_is_bounded() -> None:
    rng = random.Random(0)
    index = AnswerIndex(1000, most_tokens=5000)
    for _ in range(400):
        before = index.segments
        seen = [segment.tokens.copy() for segment in before]
        index.add([[rng.randrange(1000) for _ in range(40)]])
        assert index.size <= 5000 and len(index.segments) <= 6
        assert all((segment.tokens == held).all() for segment, held in zip(before, seen, strict=True)), "never changed"
    assert index.size > 4000
    last = [rng.randrange(1000) for _ in range(40)]
    index.add([last])
    assert find(index.segments, last[:10])[0][0] == last[10 : 10 + AHEAD]


def test_each_answer_counts_once_and_foreign_tokens_never() -> None:
    index = AnswerIndex(10)
    index.add([[1, 2, 3, 4]] * 3 + [[1, 2, 3, 10], [1, -1, 3], [1, 2]])
    index.add([[1, 2, 3, 4]])
    assert index.size == 5
    assert find(index.segments, [1, 2])[1] == [2]


# -- what is proposed -------------------------------------------------------------------------------------------------


def test_the_tree_by_hand(tmp_path: Path) -> None:
    """After 1, 2 came 3 twice, then 4 or 5, and 6 once; after 8, 1, 2 came 6."""
    drafter = memory_of([[9, 1, 2, 3, 4], [7, 1, 2, 3, 5], [8, 1, 2, 6]], tmp_path)
    session = drafter.prefill([[8, 1], [0, 1]], {})
    of_three, of_two = propose(drafter, session, [2, 2])
    three, two = WEIGHTS[3], WEIGHTS[2]
    assert of_three.tokens == [2, 6], "places with the same last three tokens alone"
    assert of_three.accept_probs == pytest.approx([1.0, three / (three + 1)])
    assert of_two.tokens[:3] == [2, 3, 6]
    assert sorted(zip(of_two.parents[3:], of_two.tokens[3:], strict=True)) == [(1, 4), (1, 5)]
    first = 2 * two / (3 * two + 2)
    second = first * three / (2 * three + 2)
    assert of_two.accept_probs == pytest.approx([1.0, first, two / (3 * two + 2), second, second])


def test_an_answer_ends_where_it_ended(tmp_path: Path) -> None:
    drafter = memory_of([[5, 1, 2, 3], [4, 4, 4]], tmp_path)
    assert propose(drafter, drafter.prefill([[5, 1]], {}), [2])[0].tokens == [2, 3]


def test_requests_are_kept_to(tmp_path: Path) -> None:
    before = list(range(50, 58))
    answers = [[*before, token, token + 1, token + 2, *range(30, 50)] for token in range(3, 20, 4)]
    drafter = memory_of(answers, tmp_path)

    def tree(**wishes: Any) -> Tree:
        return propose(drafter, drafter.prefill([before[:-1]], {}), before[-1:], **wishes)[0]

    everything = tree()
    assert everything.size <= 32 and everything.accept_probs == sorted(everything.accept_probs or [], reverse=True)
    assert tree(max_nodes=4).tokens == everything.tokens[:4]
    least = tree(threshold=0.1)
    assert 1 < least.size < everything.size and min(least.accept_probs or []) >= 0.1
    assert max(map(len, tree(chain=True).children)) == 1
    assert tree(threshold=0.9).tokens == before[-1:]


def test_probabilities_adapt_to_the_text(tmp_path: Path) -> None:
    rng = random.Random(0)
    answer = [rng.randrange(50) for _ in range(400)]
    drafter = memory_of([answer], tmp_path)
    session = drafter.prefill([answer[:10], answer[:10]], {})
    for place in range(10, 60):
        roots = [answer[place], answer[place] if place % 3 else 55]
        propose(drafter, session, roots)
        drafter.commit(session, Committed.of([[root] for root in roots], {}))
    right, wrong = propose(drafter, session, [answer[60], answer[60]])
    assert right.size == AHEAD + 1 and (right.accept_probs or [])[5] > 0.85
    assert wrong.size < right.size


def test_paused_rounds_are_read_too(tmp_path: Path) -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1]
    drafter = memory_of([text], tmp_path)
    one, two = drafter.prefill([text[:2]], {}), drafter.prefill([text[:6]], {})
    drafter.commit(one, Committed.of([text[2:4]], {}))
    drafter.commit(one, Committed.of([text[4:6]], {}))
    assert propose(drafter, one, [2]) == propose(drafter, two, [2])
    assert propose(drafter, one, [2])[0].tokens[:4] == [2, 6, 3, 1][: propose(drafter, one, [2])[0].size]


# -- losslessness -----------------------------------------------------------------------------------------------------

TEXTS = [[3, 9, 14, 3, 9, 14, 3, 9], [8, 40, 12, 5, 51, 22], [7, 7, 7, 7]]
OPTIONS = DecodeOptions(max_new_tokens=40, ignore_end=True)


def damaged(answers: Sequence[Sequence[int]], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[token if rng.random() < 0.85 else rng.randrange(61) for token in answer] for answer in answers]


def test_output_equals_plain_decoding(target: Target, tmp_path: Path) -> None:
    whole = [[*text, *DecodeLoop(target).generate([text], OPTIONS)[0].tokens] for text in TEXTS]
    memory = memory_of([*damaged(whole, 0), *damaged(whole, 1)], tmp_path)
    for drafters in ([memory], [*make_drafters("lookahead+ngram", target), memory]):
        together = lossless(target, drafters, TEXTS, OPTIONS)
    assert max(row.tokens_per_round for row in together) > 1.5, "the proof must exercise accepted drafts"
    assert any(round.emitted == 1 < round.nodes for row in together for round in row.rounds), "and rejected ones"


def test_the_audit_finds_nothing(tmp_path: Path) -> None:
    """Greedy texts are identical, and samples follow the distribution with each rule."""
    model = tiny_model("llama", vocab_size=24)
    model.lm_head.weight.data *= 8  # a peaked distribution, as real models have
    target = Target(model, None, "tiny")
    prompts = [[5, 9, 7, 3], [1, 2, 3, 4, 5, 6], [8, 8]]
    answers = [
        [*prompt, *DecodeLoop(target).generate([prompt], replace(OPTIONS, temperature=heat, seed=seed))[0].tokens[:10]]
        for prompt in prompts
        for seed, heat in enumerate((0.0, 1.0, 1.0, 1.0, 1.0))
    ]
    source = Drafts(target, memory_of(answers, tmp_path, 24))
    options = AuditOptions(
        drafters=("memory",), batch_sizes=(1, 3), max_new_tokens=10, samples=500, texts=1, depth=3,
        verifier=("top_k", "greedy_draft"), temperature=(0.0, 1.0),
    )  # fmt: skip
    results = run_audit(source, prompts, options)
    assert results["clean"], results["problems"]
    assert sum(row["drafts_accepted"] for row in results["greedy"]) > 10
    assert all(row["rounds"] < 2 * row["samples"] for row in results["sampling"] if row["temperature"]), "some accepted"


# -- remembering ------------------------------------------------------------------------------------------------------


def test_answers_are_remembered_for_calls_and_processes(tmp_path: Path, target: Target) -> None:
    file, decoder = tmp_path / "served", Decoder(target)
    name = f"ngram+memory:{file}"
    plain = decoder.generate(TEXTS[1], max_new_tokens=40)
    assert plain.drafter_error is None and not file.exists(), "opt-in"
    first = decoder.generate(TEXTS[1], max_new_tokens=40, drafter=name, draft="on")
    second = decoder.generate(TEXTS[1], max_new_tokens=40, drafter=name, draft="on")
    assert first.tokens == second.tokens == plain.tokens
    assert second.rounds < 0.5 * first.rounds
    elsewhere = Decoder(target).generate(TEXTS[1], max_new_tokens=40, drafter=f"memory:{file}", draft="on")
    assert (elsewhere.tokens, elsewhere.rounds <= second.rounds + 2) == (plain.tokens, True)
    assert served_answers(file, target) == [[*TEXTS[1][-CONTEXT:], *plain.tokens]], "no more of the prompt"
    decoder.generate_batch([TEXTS[0], TEXTS[2]], max_new_tokens=8, drafter=name)
    assert len(served_answers(file, target)) == 3
    file.unlink()
    again = decoder.generate(TEXTS[1], max_new_tokens=40, drafter=name, draft="on")
    assert (again.tokens, again.rounds) == (first.tokens, first.rounds), "deleted is forgotten"


def test_measuring_remembers_nothing(tmp_path: Path, target: Target) -> None:
    drafters = Decoder(target).drafters(f"memory:{tmp_path / 'served'}")
    DecodeLoop(target, *drafters).generate(TEXTS, OPTIONS)
    assert served_answers(tmp_path / "served", target) == []


def test_threads_remember_at_once(tmp_path: Path, target: Target) -> None:
    decoder, name = Decoder(target), f"memory:{tmp_path / 'served'}"
    expected = [decoder.generate(text, max_new_tokens=12).tokens for text in TEXTS]
    read: list[list[list[int]]] = [[] for _ in TEXTS]

    def answer(number: int) -> None:
        for _ in range(4):
            read[number].append(decoder.generate(TEXTS[number], max_new_tokens=12, drafter=name).tokens)

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        list(pool.map(answer, range(len(TEXTS))))
    assert read == [[tokens] * 4 for tokens in expected]
    assert len(served_answers(tmp_path / "served", target)) == len(TEXTS)


@pytest.mark.drafter_fails
@pytest.mark.parametrize("page", [0, 1])
def test_a_damaged_file_is_reported_and_the_answer_given(page: int, tmp_path: Path, target: Target) -> None:
    decoder, file = Decoder(target), tmp_path / "served"
    known: dict[str, Any] = {"max_new_tokens": 12, "drafter": f"memory:{file}", "draft": "on"}
    before = decoder.generate(TEXTS[0], **known)
    file.write_bytes(b"something else" if page == 0 else file.read_bytes()[: page * 4096])
    damaged = file.read_bytes()
    with pytest.warns(RuntimeWarning) as caught:
        after = decoder.generate(TEXTS[0], **known)
    problem = ("something else than answers", "malformed")[page]
    said = [str(warning.message) for warning in caught]
    assert any(text.startswith("An answer was not kept") and problem in text for text in said), said
    assert after.tokens == before.tokens and problem in (after.drafter_error or "")
    assert file.read_bytes() == damaged


def test_answers_shipped_with_the_heads(tmp_path: Path, target: Target) -> None:
    heads, shape = make_heads(target), TreeShape.from_paths(TUNING["paths"])
    plain = Decoder(target).generate(TEXTS[1], max_new_tokens=30)
    write_answers(tmp_path / "answers.bin", [[*TEXTS[1], *plain.tokens]], 1_000_000)
    with_answers = Decoder(target, heads, shape, answers=tmp_path / "answers.bin")
    names = ("memory", "heads+ngram+memory")
    for name in names:
        answer = with_answers.generate(TEXTS[1], max_new_tokens=30, drafter=name, draft="on")
        assert answer.tokens == plain.tokens and answer.rounds < 12
        again = with_answers.generate(TEXTS[1], max_new_tokens=30, drafter=name, draft="on", deterministic=True)
        assert (again.tokens, again.rounds) == (answer.tokens, answer.rounds)
    without = Decoder(target, heads, shape)
    assert len(without.drafters("heads+ngram+memory")) == len(without.drafters("heads+ngram")) == 2
    with pytest.raises(UserError, match="memory:FILE"):
        without.drafters("memory")
    with pytest.raises(UserError, match="does not depend on earlier answers"):
        without.generate(TEXTS[1], drafter=f"memory:{tmp_path / 'served'}", deterministic=True)
    (tmp_path / "other").write_text("something else")
    with pytest.raises(UserError, match="something else than answers"):
        without.generate(TEXTS[1], drafter=f"memory:{tmp_path / 'other'}")


def test_newer_heads_bring_their_own_answers(tmp_path: Path, target: Target) -> None:
    heads, shape = make_heads(target), TreeShape.from_paths(TUNING["paths"])
    plain = [Decoder(target).generate(text, max_new_tokens=30) for text in TEXTS[:2]]
    for number, (text, answer) in enumerate(zip(TEXTS, plain, strict=False)):
        kept = [[*text, *answer.tokens]]
        write_answers(tmp_path / f"{number}", kept, 1_000_000)
    decoder = Decoder(target, heads, shape, answers=tmp_path / "0")
    known: dict[str, Any] = {"max_new_tokens": 30, "drafter": "memory", "draft": "on"}
    before = [decoder.generate(text, **known) for text in TEXTS[:2]]
    decoder.swap(heads, shape, {}, tmp_path / "1")
    after = [decoder.generate(text, **known) for text in TEXTS[:2]]
    assert [answer.tokens for answer in before] == [answer.tokens for answer in after]
    assert before[0].rounds < after[0].rounds and after[1].rounds < before[1].rounds
    decoder.swap(heads, shape, {})
    with pytest.raises(UserError, match="memory:FILE"):
        decoder.generate(TEXTS[0], **known)


def test_another_targets_answers_are_not_drafted(tmp_path: Path, target: Target) -> None:
    AnswerFile(tmp_path / "served", FINGERPRINT).add([[*TEXTS[1], 1, 2, 3]])
    drafters = Decoder(target).drafters(f"memory:{tmp_path / 'served'}")
    with pytest.warns(UserWarning, match="another target's"):
        (answer,) = DecodeLoop(target, *drafters).generate([TEXTS[1]], OPTIONS)
    assert all(round.nodes == 1 for round in answer.rounds)
