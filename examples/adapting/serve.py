"""Answer requests one by one, log them, and switch to updated heads.

    python serve.py requests.jsonl --heads runs/quickstart/adapt/heads --log traffic

Each line of the file is {"user": ..., "prompt": ...}. It stands in for a server: the lines to copy
load the heads, answer, and pass the user of each request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import headstart
from headstart.data.served.log import RequestLog, Served


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests")
    parser.add_argument("--heads", default="runs/quickstart/adapt/heads")
    parser.add_argument("--log", default="traffic")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args(arguments)

    def keep(served: Served) -> Served | None:
        return None if served.source == "private" else served

    log = RequestLog(options.log, gigabytes=1, days=30, keep=keep)
    decoder = headstart.load(options.heads, log=log, follow=True)
    with open(options.requests, encoding="utf-8") as file:
        for line in file:
            request = json.loads(line)
            answer = decoder.generate(request["prompt"], max_new_tokens=options.max_new_tokens, source=request["user"])
            print(f"{answer.tokens_per_round:.2f} tokens per round with heads {answer.heads}: {answer.text[:60]!r}")


if __name__ == "__main__":
    main()
