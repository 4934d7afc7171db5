"""The lines of a ledger: a first line that describes the run, and charges, chained by a hash.

Every charge ends with a ``chain``: a prefix of the SHA-256 of the previous chain and the rest of the line. The chain of
the first line is that of its bytes. A lost or changed line in the middle breaks the chain. A checkpoint stores the last
chain, so lost lines at the end are detected as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from coterie.files import FileError, open_regular, read_text, sync_folder
from coterie.privacy.accountants import Event
from coterie.privacy.anchors import Anchor

#: Entry of a charge that is for held-out records instead of an event: its epsilon, at delta 0.
HELD_OUT = "held_out_epsilon"
#: Entry of a first line: the run whose models are the initial ones, and its events if its clients are the same.
START = "start"
#: Entry of the charges after a run was continued beyond its plan: the terms of the plan that changed.
EXTENDED = "extended"
#: What a user does about a damaged ledger.
RESTORE = "; restore the ledger from a copy, or use a new file: a damaged ledger gives no certificate"
_KEYS = ("charge", "round", "sampling_rate", "noise_multiplier", "sampler")
# A line of a ledger, and its chain, which is its last key.
_CHAINED = re.compile(rb'(.*), "chain": "([0-9a-f]{16})"\}', re.DOTALL)


class LedgerError(RuntimeError):
    """The ledger cannot be used: it is in use by another process, damaged, or of another run."""


# ---- charges -----------------------------------------------------------------------------------------------------


def event_of(charge: Mapping[str, Any]) -> Event:
    """Return the event of a charge."""
    slot, slots = charge.get("slot"), charge.get("slots", 0)
    return Event(charge["sampling_rate"], charge["noise_multiplier"], charge["sampler"], slot, slots)


def count_of(charge: Mapping[str, Any]) -> int:
    """Return the number of events of a charge."""
    return int(charge.get("count", 1))


def count_events(charges: Iterable[Mapping[str, Any]]) -> Counter[Event]:
    """Return the events of all charges."""
    total: Counter[Event] = Counter()
    for charge in charges:
        if HELD_OUT not in charge:
            total[event_of(charge)] += count_of(charge)
    return total


def held_out_epsilon(charges: Iterable[Mapping[str, Any]]) -> float:
    """Return the epsilon of held-out records of all charges, at delta 0."""
    return math.fsum(charge.get(HELD_OUT, 0.0) for charge in charges)


def earlier_events(header: Mapping[str, Any]) -> Counter[Event]:
    """Return the events of the run whose models are the initial ones, as a first line states them; often empty."""
    return count_events(header.get(START, {}).get("events", ()))


def header_digest(header: Mapping[str, Any]) -> str:
    """Return a digest of a first line, which identifies a run."""
    return chain_digest(json.dumps(header, sort_keys=True).encode())


def extended_terms(charges: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the terms of the plan that charges extended, such as ``rounds``; the largest values, empty if none did."""
    largest: dict[str, int] = {}
    for charge in charges:
        for name, value in charge.get(EXTENDED, {}).items():
            largest[name] = max(largest.get(name, 0), int(value))
    return largest


class Mark(NamedTuple):
    """A charge of a ledger, and where its line is.

    Attributes:
        start: offset in bytes of the line.
        end: offset in bytes after the line.
        charges: number of the charge.
        chain: of the charge.
    """

    start: int
    end: int
    charges: int
    chain: str


class Lines(NamedTuple):
    """The contents of a ledger.

    Attributes:
        header: the first line; None in an empty file.
        charges: the other lines, without their chains.
        chains: the chain up to each line, the first line included.
    """

    header: dict[str, Any] | None
    charges: list[dict[str, Any]]
    chains: list[str]


def read_ledger(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the first line and the charges of a ledger, which may be in use.

    Raises:
        LedgerError: the ledger is missing or damaged.

    Examples:
        >>> header, charges = read_ledger("runs/ifca/ledger.jsonl")
        >>> header["plan"]["mechanism"], len(charges)
        ('joint', 2)
    """
    header, charges, _ = read_chained(Path(path))
    return header, charges


def read_chained(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Same as :func:`read_ledger`, with the chain up to each line, including the first one.

    Raises:
        LedgerError: the ledger is missing or damaged.
    """
    content = read_bytes(path)
    header, charges, chains = _parse(content[: content.rfind(b"\n") + 1], path)
    if header is None:
        raise LedgerError(f"{path} is empty: it contains neither a plan nor charges")
    return header, charges, chains


def charges_since(path: Path, mark: Mark | None) -> tuple[list[dict[str, Any]], Mark | None, bool]:
    """Read the charges after a mark; all charges without one, or if the ledger does not contain it.

    Returns:
        the charges, a mark of the last charge (None without charges), and whether these are all charges.

    Raises:
        LedgerError: the ledger is missing or damaged.
    """
    if mark is not None:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                file.seek(mark.start)
                after = _after(file.read(), mark)
        except (FileError, OSError) as error:
            raise LedgerError(str(error)) from None
        if after is not None:
            whole = after[: after.rfind(b"\n") + 1]
            _, charges, chains = _parse(whole, path, mark.charges + 1, mark.chain)
            return charges, _mark(whole, mark.end, mark.charges, chains) or mark, False
    content = read_bytes(path)
    whole = content[: content.rfind(b"\n") + 1]
    _, charges, chains = _parse(whole, path)
    return charges, _mark(whole, 0, 0, chains[1:]), True


def _mark(content: bytes, start: int, before: int, chains: Sequence[str]) -> Mark | None:
    """Return a mark of the last line of ``content``, which begins at an offset after so many charges."""
    if not chains:
        return None
    last = content.rfind(b"\n", 0, -1) + 1
    return Mark(start + last, start + len(content), before + len(chains), chains[-1])


def _after(content: bytes, mark: Mark | Anchor) -> bytes | None:
    """Return what follows the line of a mark in the content of a ledger from there on; None if it is another line."""
    size = mark.end - mark.start
    chained = _CHAINED.fullmatch(content[:size].rstrip(b"\n"))
    return content[size:] if len(content) >= size and chained and chained[2].decode() == mark.chain else None


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a ledger.

    Raises:
        LedgerError: it cannot be read.
    """
    try:
        return read_text(path).encode()
    except FileError as error:
        raise LedgerError(str(error)) from None


def chain_digest(*parts: bytes) -> str:
    """Return the link of a chain: the first 16 hexadecimal digits of the SHA-256 of these bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def chained_lines(chain: str, charges: Iterable[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Return lines for these charges with their chains, and the last chain."""
    lines = []
    for charge in charges:
        content = json.dumps(charge).encode()
        chain = chain_digest(chain.encode(), content)
        lines.append(content[:-1] + f', "chain": "{chain}"}}\n'.encode())
    return b"".join(lines), chain


def append_synced(file: IO[bytes], path: Path, content: bytes, then: str) -> None:
    """Append and sync; a failure leaves the file unchanged, and ``then`` is what its user does afterwards.

    Raises:
        LedgerError: the file cannot be written.
    """
    if file.closed:
        raise LedgerError(f"{path} was closed after a write error: {then}")
    size = os.fstat(file.fileno()).st_size
    try:
        left = content
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(size)
        file.close()  # prevent writes after an incomplete line
        raise LedgerError(
            f"{path} cannot be written: {error.strerror or error}; nothing was released for this charge: free the disk "
            f"or make the file writable, then {then}"
        ) from None


def open_locked(path: Path) -> IO[bytes]:
    """Open a ledger for this process alone, or create it.

    Raises:
        LedgerError: it cannot be written, or another process uses it.
    """
    try:
        file = os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0)
    except FileError as error:
        raise LedgerError(f"{error}; a ledger must be a writable regular file") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LedgerError(
            f"{path} is in use by another process: wait for it, or choose another file or --out"
        ) from None
    sync_folder(path.parent)
    return file


def take_over(file: IO[bytes], path: Path, header: dict[str, Any], then: str) -> tuple[list[dict[str, Any]], str]:
    """Return all charges, and the last chain; write the header if there are no charges.

    An incomplete last line was never synced, so nothing was released for it, and it is removed.
    """
    content = read_bytes(path)
    whole = content[: content.rfind(b"\n") + 1]
    before, charges, chains = _parse(whole, path)
    if not charges:  # without charges, another plan may replace the header
        first = json.dumps(header).encode() + b"\n"
        if whole != first or content != whole:
            file.truncate(0)
            append_synced(file, path, first, then)
        return [], chain_digest(first)
    _check_header(before, header, path)
    if whole != content:
        file.truncate(len(whole))
    return charges, chains[-1]


def take_over_after(
    file: IO[bytes], path: Path, header: Mapping[str, Any], anchor: Anchor, way_out: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the charges after an anchor, and the last chain; an incomplete last line is removed.

    Raises:
        LedgerError: the ledger does not contain the charge of the anchor, is damaged after it, or has another header.
    """
    file.seek(anchor.start)
    after = _after(file.read(), anchor)
    if after is None:
        raise LedgerError(
            f"{path} lacks charge {anchor.charges}, which this client made in {anchor.ledger}: the ledger was deleted, "
            f"shortened or replaced by an older copy. Restore the newest copy, or run: {way_out}"
        )
    file.seek(0)
    _check_header(json.loads(file.readline()), header, path)
    whole = after[: after.rfind(b"\n") + 1]
    if whole != after:
        file.truncate(anchor.end + len(whole))
    _, charges, chains = _parse(whole, path, anchor.charges + 1, anchor.chain)
    return charges, chains[-1] if chains else anchor.chain


def _check_header(before: Mapping[str, Any] | None, header: Mapping[str, Any], path: Path) -> None:
    """Raise LedgerError unless the first line of a ledger is that of this run."""
    expected = json.loads(json.dumps(header))
    if before == expected:
        return
    plans = [set(first.get("plan") or ()) for first in (before or {}, expected)]
    if all(plans) and plans[0] != plans[1]:
        raise LedgerError(
            f"{path} was written by another version of Coterie, whose plans have other entries: continue the run with "
            "that version, or start another run with its models (--from)"
        )
    raise LedgerError(f"{path} belongs to a run with another plan; choose another --out")


def _parse(content: bytes, path: Path, start: int = 0, chain: str = "") -> Lines:
    """Parse the lines of a ledger, from line ``start`` on, after the line with this chain.

    Raises:
        LedgerError: a line is damaged, or its chain does not match the preceding lines.
    """
    lines: list[dict[str, Any]] = []
    chains: list[str] = []
    for number, line in enumerate(content.splitlines(keepends=True), start):
        chained = _CHAINED.fullmatch(line.rstrip(b"\n")) if number else None
        text = chained[1] + b"}" if chained else line
        chain = chain_digest(chain.encode(), text) if number else chain_digest(line)
        try:
            read = json.loads(text)
            held_out = HELD_OUT in read
            keys = ("round", HELD_OUT) if held_out else _KEYS
            good = read["charge"] == number and all(key in read for key in keys) if number else "ledger" in read
            if good and number and held_out:
                good = isinstance(read[HELD_OUT], float | int) and 0 < read[HELD_OUT] < math.inf
            elif good and number:
                event_of(read)
                good = good and count_of(read) >= 1
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            what = "a charge of this ledger" if number else "the beginning of a ledger"
            raise LedgerError(f"{path}, line {number + 1} is not {what}: {line.decode().rstrip()[:80]!r}{RESTORE}")
        if number and (not chained or chained[2].decode() != chain):
            raise LedgerError(f"{path}, line {number + 1}: its chain does not match the preceding lines{RESTORE}")
        chains.append(chain)
        lines.append(read)
    return Lines(None, lines, chains) if start else Lines(lines[0] if lines else None, lines[1:], chains)
