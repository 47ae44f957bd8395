#!/usr/bin/env python3
"""The reactive rule with LRU in plain Python, for the speed of replays and as an independent check of their counts.

usage: replay.py STREAM BUDGET

STREAM is JSON: page_tokens, sinks, recent, marks (0 for prefill or 1 for decode, tokens before, new tokens) and heads (a list of
pages per mark). Prints hits and misses of decode and the demanded pages per second.
"""
import json
import math
import sys
import time
from collections import OrderedDict


def replay_head(demands, marks, budget, page_tokens, sinks, recent):
    resident = OrderedDict()  # the page that goes next comes first
    ways = hits = misses = 0
    for (decode, start, tokens), demand in zip(marks, demands):
        before, after = -(-start // page_tokens), -(-(start + tokens) // page_tokens)
        ways = max(ways, min(after, budget))
        keep = before - 1 if start % page_tokens else -1
        for page in range(before, after):
            if len(resident) == ways:
                victim = next(old for old in resident if old >= sinks and old + recent < page and old != keep)
                del resident[victim]
            resident[page] = None
        wanted = set(demand)
        missing = [page for page in demand if page not in resident]
        if missing:
            spare = [old for old in resident if old not in wanted and old < before]
            for page in missing:
                if len(resident) == ways:
                    if not spare:
                        break  # streamed, and not admitted
                    del resident[spare.pop(0)]
                resident[page] = None
        for page in demand:
            if page in resident:
                resident.move_to_end(page)
        for page in range(before, after):
            if page in resident:
                resident.move_to_end(page)
        if decode:
            hits += len(demand) - len(missing)
            misses += len(missing)
    return hits, misses


def main():
    with open(sys.argv[1]) as file:
        stream = json.load(file)
    shape = stream["page_tokens"], stream["sinks"], stream["recent"]
    seconds = math.inf
    for _ in range(5):
        started = time.perf_counter()
        counts = [replay_head(head, stream["marks"], int(sys.argv[2]), *shape) for head in stream["heads"]]
        seconds = min(seconds, time.perf_counter() - started)
    demanded = sum(len(demand) for head in stream["heads"] for demand in head)
    print(json.dumps({
        "hits": sum(hits for hits, _ in counts),
        "misses": sum(misses for _, misses in counts),
        "pages_per_second": demanded / seconds,
    }))


if __name__ == "__main__":
    main()
