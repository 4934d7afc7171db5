"""``python -m tests.fuzz``: change replies of one client, and report what each strategy makes of them."""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from campaign import Campaign, Report, Tally  # noqa: E402
from federations import SETTINGS  # noqa: E402

_HEAD = ("mutated", "invalid", "dropped", "accepted", "unexplained", "compared", "findings")


def table(report: Report) -> str:
    """Counts by setting and verb, their sums, and the findings."""
    total = Tally(*map(sum, zip(*(tally.row() for tally in report.tallies.values()), strict=True)))
    rows = [(f"{setting:26} {verb:16}", tally) for (setting, verb), tally in report.tallies.items()]
    lines = [f"{'setting':26} {'verb':16}" + "".join(f"{name:>12}" for name in _HEAD)]
    lines += [name + "".join(f"{count:12}" for count in tally.row()) for name, tally in (*rows, (f"{'all':43}", total))]
    lines += [f"valid but dropped, {count} times: {reason:.200}" for reason, count in report.unexplained.items()]
    cases: dict[tuple[str, str, str], list[int]] = {}
    for setting, verb, case, what in report.findings:
        cases.setdefault((setting, verb, what), []).append(case)
    lines += [
        f"FINDING {setting}, {verb}, {len(found)} times, first in case {found[0]}: {what}"
        for (setting, verb, what), found in cases.items()
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return "\n".join([*lines, f"{report.seconds:.0f} s, slowest run {report.slowest:.1f} s, peak memory {peak:.0f} MB"])


def main() -> int:
    """1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--replies", type=int, default=10_000, help="how many are changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", help="only the settings that begin with this")
    words = parser.parse_args()
    settings = [name for name in SETTINGS if name.startswith(words.strategy or "")]
    if not settings:
        parser.error(f"no setting begins with {words.strategy!r}; there are {', '.join(SETTINGS)}")
    report = Campaign(words.seed, settings).run(words.replies)
    print(table(report))
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
