"""Search for a case in which a wrapped model trains other than the plain one.

    python -m properties.search --cases 1000            # seeds 0 to 999, on CPU and on the executing virtual GPU
    python -m properties.search --only 417              # one seed, with what is wrong and a smaller case
    python -m properties.search --log cases.log         # go on where the last run with that file was stopped

Run it with `tests` on PYTHONPATH, or as `make search`. The exit code is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from properties.check import KINDS, Outcome, check, shrink
from properties.generator import Case, make_case
from properties.plans import EVERY, check_plans

SECONDS_PER_CASE = 900  # a case that takes longer hangs; on a busy machine some take minutes
CASES_PER_LINE = 100  # between lines with counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--only", type=int, nargs="+", help="just these seeds, in detail")
    parser.add_argument("--device", choices=["cpu", "vgpu"], help="instead of the one that a case draws")
    parser.add_argument("--without", default="", help="kinds of pieces to leave out, with commas between")
    parser.add_argument("--no-shrink", action="store_true", help="do not make failing cases smaller")
    parser.add_argument(
        "--log", type=Path, help="a file with a line for each case; those in it are not run again"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("memscale").setLevel(logging.CRITICAL)
    left_out = set(filter(None, options.without.split(",")))
    seeds = options.only or range(options.seed, options.seed + options.cases)
    summary = Summary(options.log)
    for seed in seeds:
        case = make_case(seed, options.device)
        if seed in summary.done or case.kinds() & left_out:
            continue
        faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
        before = time.monotonic()
        outcome = check(case)
        if outcome.kind == "equal" and (options.only or seed % EVERY == 0):
            outcome = check_plans(case)
        faulthandler.cancel_dump_traceback_later()
        if options.only:
            print(case.describe())
        summary.add(case, outcome, time.monotonic() - before)
        if outcome.is_failure and outcome.kind != "mispredicted" and not options.no_shrink:
            print(_indented(shrink(case, outcome).describe()), flush=True)
        if options.only and outcome.details:
            print(_indented(outcome.details), flush=True)
        gc.collect()
        if seed == seeds[0]:
            gc.freeze()  # all imports are done: what they made need not be searched after each case
    summary.print()
    return 1 if summary.failures else 0


class Summary:
    """What was found."""

    def __init__(self, log: Path | None) -> None:
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.techniques: Counter[str] = Counter()
        self.failures: list[tuple[int, str]] = []
        self.done: set[int] = set()
        self.began = time.monotonic()
        self._ran = 0
        self._log = log
        if log is not None and log.exists():
            for line in log.read_text().splitlines():
                seed, device, kind, reason, techniques = line.split("\t")
                self._count(int(seed), device, kind, reason, techniques.split(","))

    def add(self, case: Case, outcome: Outcome, seconds: float) -> None:
        techniques = sorted(name for name, count in outcome.techniques.items() if count)
        reason = outcome.reason.replace("\t", " ")
        self._count(case.seed, case.device, outcome.kind, reason, techniques)
        self._ran += 1
        print(f"{case.seed} {case.device} {outcome.kind} {seconds:.1f}s {outcome.reason}", flush=True)
        if self._log is not None:
            with self._log.open("a") as file:
                print(case.seed, case.device, outcome.kind, reason, ",".join(techniques), sep="\t", file=file)
        if len(self.done) % CASES_PER_LINE == 0:
            print(self.line(), flush=True)

    def line(self) -> str:
        """How many cases came out in each way, and how long one took."""
        found = Counter[str]()
        for (kind, _), count in self.kinds.items():
            found[kind] += count
        counts = ", ".join(f"{found[kind]} {kind}" for kind in KINDS)
        pace = (time.monotonic() - self.began) / max(1, self._ran)
        return f"{len(self.done)} cases: {counts}; {pace:.2f} s a case"

    def _count(self, seed: int, device: str, kind: str, reason: str, techniques: list[str]) -> None:
        self.done.add(seed)
        self.kinds[kind, device] += 1
        self.techniques.update(filter(None, techniques))
        if Outcome(kind).is_failure:
            self.failures.append((seed, f"{kind} on {device}: {reason}"))
        elif kind in ("refused", "invalid"):
            self.reasons[kind, reason[:100]] += 1

    def print(self) -> None:
        print(f"\n{self.line()}")
        for (kind, device), count in sorted(self.kinds.items()):
            print(f"  {count:5} {kind} on {device}")
        print("cases in which a plan had:")
        for name, count in self.techniques.most_common():
            print(f"  {count:5} {name}")
        for wanted in ("refused", "invalid"):
            chosen = [(count, reason) for (kind, reason), count in self.reasons.items() if kind == wanted]
            if chosen:
                print(f"{wanted}:")
            for count, reason in sorted(chosen, reverse=True):
                print(f"  {count:5} {reason}")
        print(f"failures: {len(self.failures)}")
        for seed, reason in self.failures:
            print(f"  {seed}: {reason}")
            print(f"        again: PYTHONPATH=src:tests python -m properties.search --only {seed}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
