"""Question files for the places where drafting is hardest, and where copying pays most.

    python benchmarks/make_questions.py runs/quickstart OUT_FOLDER [--count 24]

Writes OUT_FOLDER/random.jsonl (texts of random tokens), languages.jsonl (requests in eight languages other than the
training prompts') and quotes.jsonl (requests to quote a long text, of the run's own calibration answers). Measure with
`headstart eval HEADS --questions FILE`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headstart.data.conversations.records import read_conversations
from headstart.support.files import write_jsonl

LANGUAGES = {
    "french": ["Explique comment fonctionne un moteur à vapeur.", "Écris une lettre pour inviter un ami à dîner."],
    "german": ["Erkläre, warum der Himmel blau ist.", "Schreibe eine kurze Geschichte über einen Leuchtturm."],
    "spanish": ["Explica qué es la fotosíntesis.", "Dame una receta sencilla con arroz y tomates."],
    "italian": ["Spiega come si forma un arcobaleno.", "Racconta la storia di un gatto che viaggia in treno."],
    "portuguese": ["Explique o que é a inflação.", "Escreva um poema sobre o mar."],
    "polish": ["Wyjaśnij, jak działa magnes.", "Napisz krótki list do nauczyciela."],
    "turkish": ["Depremler neden olur, açıkla.", "Bir balıkçı hakkında kısa bir öykü yaz."],
    "dutch": ["Leg uit hoe een fiets rechtop blijft.", "Schrijf een kort gedicht over de herfst."],
}
REQUESTS = [
    "Repeat the following text word for word, and then give it a title.\n\n{text}",
    "Correct the spelling in this text. Write the whole corrected text.\n\n{text}",
    "Summarise this text. Quote the most important sentences exactly as they are written.\n\n{text}",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=24)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    tokenizer = AutoTokenizer.from_pretrained(options.run / "target" / "tokenizer")
    noise = [
        tokenizer.decode([rng.randrange(10, len(tokenizer)) for _ in range(rng.randrange(20, 80))])
        for _ in range(options.count)
    ]
    write_jsonl(options.out / "random.jsonl", _questions("random tokens", noise))

    asked = [(language, text) for language, texts in LANGUAGES.items() for text in texts]
    rows = [row for language, text in asked for row in _questions(language, [text])]
    write_jsonl(options.out / "languages.jsonl", rows)

    answers = [
        message["content"]
        for conversation in read_conversations(options.run / "data" / "conversations" / "calibration.jsonl")
        for message in conversation.messages
        if message["role"] == "assistant" and len(message["content"]) > 300
    ][: options.count]
    quotes = [REQUESTS[number % len(REQUESTS)].format(text=text) for number, text in enumerate(answers)]
    write_jsonl(options.out / "quotes.jsonl", _questions("quoting", quotes))
    print(json.dumps({name: sum(1 for _ in (options.out / f"{name}.jsonl").open()) for name in FILES}))


FILES = ("random", "languages", "quotes")


def _questions(category: str, texts: list[str]) -> list[dict[str, Any]]:
    return [
        {"question_id": f"{category}-{number}", "category": category, "turns": [text]}
        for number, text in enumerate(texts)
    ]


if __name__ == "__main__":
    main()
