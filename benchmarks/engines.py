"""Heads in a real serving engine: as many drafts accepted as by our decoder's chain, and how much faster?

    python benchmarks/engines.py runs/quickstart/heads --engine vllm --questions mt_bench.jsonl --limit 24 \\
        --engine-command "engines/vllm/bin/vllm serve" --engine-arguments "--dtype bfloat16 --max-model-len 2048"

`engine_setup.py` makes the environment of an engine. Exports the heads, serves the target twice, with them and without,
and asks both the same questions in turns, greedily, another one first each time. Our own decoder then drafts chains of
the same length, for the same prompts and, replayed, on the engine's own texts: on the same texts as many drafts should
be accepted. Tokens a second are over the engine's own plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from never_slower import prompts_of
from record import record
from tables import table

import headstart
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.eval.environment import environment
from headstart.heads.base import DraftHead
from headstart.hub.engine_tuning import Asked, measure_drafts
from headstart.hub.engines.export import export_for
from headstart.hub.format import CALIBRATION
from headstart.model.model import Target
from headstart.pipeline.in_engine import served_with
from headstart.servers.engines import ENGINES
from headstart.servers.process import Server
from headstart.support.files import read_json, write_text
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import Text
from headstart.tuning.acceptance import measure_drafts as measure_acceptance


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, help="a folder of heads")
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--engine-command", default="", help="what starts it")
    parser.add_argument("--engine-target", default="", help="the target as the engine takes it")
    parser.add_argument("--engine-arguments", default="", help="more of its own")
    parser.add_argument("--questions", type=Path, help="JSONL, as of `headstart eval`; by default a few of our own")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--drafts", nargs="+", type=int, default=[3])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--target", help="where it is, when it is not where the heads say")
    parser.add_argument("--dtype", default="bfloat16", help="of our decoder")
    parser.add_argument("--weights", help="dtype of the exported heads")
    parser.add_argument("--out", type=Path, default=Path("out/engines"))
    options = parser.parse_args(arguments)

    engine = ENGINES[options.engine]
    decoder = headstart.load(options.heads, options.target, dtype=options.dtype)
    prompts = prompts_of(decoder.target, options.questions, options.limit)
    asked = Asked(prompts, options.max_new_tokens, read_json(options.heads / CALIBRATION)["acceptance"])
    rows: list[dict[str, Any]] = []
    texts: list[list[Text]] = []
    with TemporaryDirectory() as place:
        exported = export_for(options.heads, Path(place) / "heads", engine.format, options.target, options.weights)
        served = options.engine_target or engine.own_target(exported.facts.folder, exported.facts.gguf)

        def start(drafting: Sequence[str], name: str) -> Server:
            log = options.out / f"{engine.name}-{name}.log"
            return Server(
                engine, served, drafting, log, command=options.engine_command, options=options.engine_arguments
            )

        with start((), "plain") as plain:
            for drafts in options.drafts:
                with start(served_with(engine, exported, drafts), f"{drafts}-drafts") as drafted:
                    compared = measure_drafts(plain, drafted, drafts, asked)
                texts.append([Text.of(*pair) for pair in zip(prompts, map(list, compared.drafted), strict=True)])
                drafts_row = compared.row
                rows.append(
                    {
                        "engine": engine.name,
                        "version": plain.version(),
                        "served": Path(served).name,
                        "drafts": drafts,
                        "questions": len(prompts),
                        "tokens_per_second": drafts_row.tokens_per_second,
                        "plain_tokens_per_second": drafts_row.plain_tokens_per_second,
                        "over_plain": drafts_row.speedup,
                        "round_ms": drafts_row.round_ms,
                        "plain_ms": drafts_row.plain_ms,
                        "accepted_per_round": drafts_row.accepted,
                        "acceptance_by_place": list(drafts_row.by_position),
                        "same_texts": compared.same,
                        "over_plain_expected": drafts_row.expected,
                    }
                )
    for row, written in zip(rows, texts, strict=True):
        chain = HeadDrafter(decoder.heads, TreeShape.chain(row["drafts"]))
        row |= ours(decoder.target, chain, prompts, options.max_new_tokens)
        row["our_accepted_on_its_texts"] = replayed(decoder.target, decoder.heads, written, row["drafts"])
        accepted = row["our_accepted_on_its_texts"]
        row["share_of_ours"] = row["accepted_per_round"] / accepted if accepted else None
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "arguments": options.engine_arguments,
        "weights": options.weights,
    }
    what = f"Heads in {engine.name} beside our own decoder's chain on the same questions, greedy, batch size 1."
    file = options.out / f"{engine.name}.json"
    record(file, what, rows, environment(decoder.target), __file__, arguments, settings, {"rows": rows})
    write_text(file.with_suffix(".md"), report(rows))
    print(report(rows))


def ours(target: Target, drafter: HeadDrafter, prompts: Sequence[list[int]], most: int) -> dict[str, Any]:
    """Drafts that our decoder accepts in chains of the same length, a round, and at each place."""
    loop, asked = DecodeLoop(target, drafter), DecodeOptions(most, draft="on")
    rounds = [done for prompt in prompts for done in loop.generate([prompt], asked)[0].rounds if done.nodes > 1]
    depth = max((done.nodes for done in rounds), default=1)
    places = [sum(done.emitted > place for done in rounds) / len(rounds) for place in range(1, depth)]
    return {"our_accepted_per_round": sum(places), "our_acceptance_by_place": places, "our_rounds": len(rounds)}


def replayed(target: Target, heads: DraftHead, texts: Sequence[Text], drafts: int) -> float:
    """Drafts a round that chains of ours would have had accepted, had our decoder written these very texts.

    Engines round otherwise than we do, and a text that parts from ours at a near-tie goes on to be another text, with
    other acceptance: only on the same texts can the two be compared closely. The last round of a text is cut where the
    text ends, as our decoder cuts it.
    """
    rounds = accepted = 0
    for text in texts:
        beyond = heads.draft_steps  # tokens, for the last of the text to be drafted from as well; they count nowhere
        longer = Text([*text.tokens, *text.tokens[-1:] * beyond], [*text.supervised, *[True] * beyond])
        ranks = measure_acceptance(target, heads, [longer], 1).ranks_OK[:, :drafts].tolist()
        decided, answer = 1, sum(text.supervised)  # reading the prompt decides the first token
        while decided < answer:
            right = next((place for place, rank in enumerate(ranks[decided - 1]) if rank), drafts)
            rounds, accepted = rounds + 1, accepted + min(right, answer - decided - 1)
            decided += right + 1
    return accepted / rounds if rounds else 0.0


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each number of drafts."""
    head = ["engine", "served", "drafts", "plain tokens/s", "with heads", "speed-up", "accepted a round", "ours"]
    head += ["ours on its texts", "of these", "same texts", "round", "plain step"]
    lines = [
        [
            f"{row['engine']} {row['version']}".strip(),
            row["served"],
            row["drafts"],
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['over_plain']:.2f}x",
            f"{row['accepted_per_round']:.3f} ({places(row['acceptance_by_place'])})",
            f"{row['our_accepted_per_round']:.3f} ({places(row['our_acceptance_by_place'])})",
            f"{row['our_accepted_on_its_texts']:.3f}",
            "–" if row["share_of_ours"] is None else f"{100 * row['share_of_ours']:.1f} %",
            f"{row['same_texts']} of {row['questions']}",
            f"{row['round_ms']:.1f} ms",
            f"{row['plain_ms']:.1f} ms",
        ]
        for row in rows
    ]
    return table(head, lines) + "\n"


def places(shares: Sequence[float]) -> str:
    """Shares by place of the chain."""
    return " / ".join(f"{share:.2f}" for share in shares)


if __name__ == "__main__":
    main()
