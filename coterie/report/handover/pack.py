"""The hand-over pack: page, certificate, charges, signature and verifier of a finished run, in one folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.fields.settings import flat
from coterie.files import private_folder, read_bytes, read_object, write_atomic
from coterie.privacy import certificate
from coterie.privacy.check import check, verified
from coterie.privacy.manifest import CERTIFICATE, LEDGER, MANIFEST, SIGNATURE, manifest_of, manifest_problems
from coterie.report.formats import NBSP
from coterie.report.handover.content import page
from coterie.results import read_config

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAGE, VERIFIER, README = "handover.html", "verify.py", "README.txt"
_PUBLIC = "operator.pub"
# Packs of earlier versions have a PDF, which is replaced by nothing.
_OURS = (PAGE, "handover.pdf", VERIFIER, README, _PUBLIC, CERTIFICATE, LEDGER, MANIFEST, SIGNATURE)


class HandoverError(RuntimeError):
    """No pack of a run is possible; the message names the reason and the way out."""


@dataclass(frozen=True)
class Pack:
    """A pack that was written.

    Attributes:
        folder: where.
        files: their names.
        fingerprint: of the key whose signature it has; empty: the signature was not verified, or there is none.
        remarks: what is missing, and why.
    """

    folder: Path
    files: tuple[str, ...]
    fingerprint: str
    remarks: tuple[str, ...]


def write_pack(
    run: Path, out: Path, key: Ed25519PrivateKey | None = None, public: Ed25519PublicKey | None = None
) -> Pack:
    """Write the pack of a finished run, after all of it was checked.

    Args:
        run: its folder.
        out: folder of the pack; it is made, and may be that of an earlier pack.
        key: signs the run, in its folder as well; None: the run keeps its signature, if it has one.
        public: verifies the signature that the run has, if there is no ``key``.

    Raises:
        HandoverError: the run is not finished, has a problem or is not signed by ``public``; ``out`` has other files.
        LedgerError, FileError: a file of the run cannot be read.
    """
    header, charges = verified(run)
    if not (run / CERTIFICATE).exists():
        raise HandoverError(f"{run} has no {CERTIFICATE}: finish the run first (coterie run --resume --out {run})")
    stated = read_object(run / CERTIFICATE, strict=True)
    problems = [*check(header, charges, stated), *manifest_problems(run)]
    if problems:
        raise HandoverError(f"{run}: {problems[0]}; nothing was written: see coterie privacy check {run}")
    if out.exists() and not out.is_dir():
        raise HandoverError(f"{out} is a file: choose another --out")
    others = [file.name for file in out.iterdir() if file.name not in _OURS] if out.exists() else []
    if (out / "config.toml").exists() or (others and not (out / PAGE).exists()):
        raise HandoverError(f"{out} has other files, such as {min(others)}: choose a new folder as --out")
    config = {name.rpartition(".")[2]: value for name, value in flat(read_config(run)["config"]).items()}
    method, derived = str(config.get("strategy", "unknown")), certificate(header, charges)
    public, signature, remarks = _signed(run, key, public)
    private_folder(out)
    contents = {name: read_bytes(run / name) for name in (CERTIFICATE, LEDGER, MANIFEST)}
    contents[VERIFIER] = read_bytes(Path(__file__).with_name(VERIFIER))
    option = "" if public is None else " --public-key operator.pub"
    readme = (
        f"{PAGE} says what this run guarantees, to whom, and what it does not.\n"
        f"Check it without us: pip install dp-accounting cryptography; python {VERIFIER} .{option} --without-models\n"
        "To check the models, too, copy the folder models of the run here, and leave --without-models out.\n"
    )
    contents[README] = readme.encode()
    if signature:
        contents[SIGNATURE] = signature
    fingerprint = ""
    if public is not None:
        from coterie.site.operator_keys import operator_fingerprint, public_pem

        fingerprint, contents[_PUBLIC] = operator_fingerprint(public), public_pem(public)
    name, finished = run.resolve().name, "ended"
    with suppress(ValueError):  # a charge may state no time
        day = date.fromisoformat(str(charges[-1].get("time", ""))[:10] if charges else "")
        finished = "ended on " + f"{day:%-d %B %Y}".replace(" ", NBSP)
    contents[PAGE] = page(derived, name=name, method=method, finished=finished, fingerprint=fingerprint).encode()
    try:
        for name in _OURS:
            (out / name).unlink(missing_ok=True)
        for name, content in contents.items():
            write_atomic(out / name, content)
    except OSError as error:
        raise HandoverError(f"{out} cannot be written: {error.strerror or error}; choose another --out") from None
    return Pack(out, tuple(sorted(contents)), fingerprint, remarks)


def _signed(
    run: Path, key: Ed25519PrivateKey | None, public: Ed25519PublicKey | None
) -> tuple[Ed25519PublicKey | None, bytes, tuple[str, ...]]:
    """Sign a run, or verify its signature; return the key that verifies it, the signature, and remarks."""
    from coterie.site.operator_keys import verifies

    path = run / MANIFEST
    if not path.exists():  # of an earlier version
        write_atomic(path, manifest_of(run))
    content = read_bytes(path)
    if key is not None:
        signature = key.sign(content)
        write_atomic(run / SIGNATURE, signature)
        return key.public_key(), signature, ()
    if not (run / SIGNATURE).exists():
        if public is not None:
            raise HandoverError(f"{run} is not signed: sign it with --key operator.key")
        return None, b"", ("not signed: nothing shows who made this run; sign it with --key operator.key",)
    signature = read_bytes(run / SIGNATURE)
    if public is None:
        return None, signature, ("the signature was not verified: give --public-key operator.pub, or --key",)
    if not verifies(public, content, signature):
        raise HandoverError(
            f"{run}: {SIGNATURE} is no signature of {MANIFEST} by this key: give the right --public-key"
        )
    return public, signature, ()
