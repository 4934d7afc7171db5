"""``coterie audit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from coterie.cli.console import JsonFlag, console_for, print_json, print_table

if TYPE_CHECKING:
    from coterie.audit import Finding

_PARTS = "Part of the audit: mechanisms, randomness, runs, records, views or ledgers; repeatable; default: all."
_MECHANISMS = "Attack single releases of this mechanism only: joint, banded, secure, rr-slot or paper; repeatable."
_SYMBOLS = {"mu": "μ", "delta(1)": "δ(1)", "delta(2)": "δ(2)"}


def audit(
    part: Annotated[list[str], typer.Option(help=_PARTS)] = [],  # noqa: B006
    mechanism: Annotated[list[str], typer.Option(help=_MECHANISMS)] = [],  # noqa: B006
    draws: Annotated[int, typer.Option(min=1000, help="Number of draws of a mechanism per dataset.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the attacks.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Attack the mechanisms and compare the proved lower bounds with the claimed guarantees."""
    from coterie.audit import PARTS
    from coterie.audit import audit as attack
    from coterie.privacy import MECHANISMS, PrivacyError

    for option, given, choices in (("mechanism", mechanism, list(MECHANISMS)), ("part", part, list(PARTS))):
        unknown = [name for name in given if name not in choices]
        if unknown:
            raise PrivacyError(f"--{option} {unknown[0]}: must be {', '.join(choices)}")
    parts = part or (["mechanisms"] if mechanism else list(PARTS))
    findings = attack(mechanism or list(MECHANISMS), draws, seed, parts)
    failed = [f for f in findings if f.failed]
    if as_json:
        violations = [f"{f.mechanism}: {f.attack}" for f in failed]
        document = {"draws": draws, "seed": seed, "violations": violations, "findings": [f.as_dict() for f in findings]}
        print_json(document)
    else:
        rows: list[list[str | Text]] = []
        for f in findings:
            style = "red" if f.failed else "yellow" if f.control else "green"
            verdict = ("broken" if f.violated else "holds") + (" (control)" if f.control else "")
            claim = f"{_SYMBOLS.get(f.quantity, f.quantity)} {f.claim:.3g}"
            rows.append([f.mechanism, f.attack, claim, f"{f.bound:.3g}", Text(verdict, style)])
        out = console_for(as_json)
        print_table(out, ("mechanism", "attack", "claim", "proved", "verdict"), rows)
        out.print(_sentence(findings), soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _sentence(findings: Sequence[Finding]) -> str:
    broken = sum(f.failed and not f.control for f in findings)
    undetected = sum(f.failed and f.control for f in findings)
    if broken:
        return f"[red]{broken} attack(s) violate a claim: do not trust certificates of this version.[/red]"
    if undetected:
        return f"[red]{undetected} control(s) not broken, so the audit is inconclusive: increase --draws.[/red]"
    controls = any(f.control for f in findings)
    power = ", and every control is broken, so the attacks have power" if controls else ""
    claims = "Every claim holds" if not all(f.control for f in findings) else "No claim was attacked"
    return f"{claims}{power}. Attacks can prove a violation, but not its absence."
