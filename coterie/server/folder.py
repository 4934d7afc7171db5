"""The run folder: the output of a run, and the state for ``--resume``.

====================  ==================================================================================
config.toml           the resolved configuration, versions, git commit, device
local.json            the folder and the fingerprints of a simulation's data; never part of a release
metrics.jsonl         a line per round: released or charged values, and time
diagnostics.jsonl     a line per evaluation with exact scores, which are outside the guarantee
ledger.jsonl          a line per charge, written and synced before its release
privacy.json          the certificate
models/               ``cluster-<j>.safetensors``, each with its card (wire/model_card.py); ``constants.safetensors``,
                      frozen parameters and buffers of the network of a user, if it has some
SHA256SUMS            of certificate, ledger and models; SHA256SUMS.sig is its signature (coterie handover)
checkpoint/           ``state.safetensors``, replaced atomically after every round
start/                ``state.safetensors``, the initial models, if they are those of another run
clients/              state of simulated clients; never part of a release
evidence/             inputs of the clustering, where the server sees them: ``NAME.npz``, as exact as it sees them
result.json           released values, cost, time
diagnostics.json      exact scores of the last evaluation, which are outside the guarantee
report.html           one self-contained page, which `coterie run` and `coterie report` write
tensorboard/          series of the recorders, where they are configured; also mlflow.db, mlflow.json
====================  ==================================================================================
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import time
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import tomli_w

from coterie import __version__
from coterie.client.state import forget_states_after
from coterie.datasets import DataError
from coterie.fields.plugins import source_hash
from coterie.fields.settings import nested
from coterie.files import (
    FileError,
    open_private,
    open_regular,
    private_folder,
    read_bytes,
    read_lines,
    read_object,
    read_text,
    write_atomic,
    write_json,
)
from coterie.logs import ProgressCallback, ignore_progress
from coterie.models import fingerprint
from coterie.privacy import Ledger, LedgerError, Plan, SharedBudget, certificate, plan_from_terms, read_ledger
from coterie.privacy.check import verified
from coterie.privacy.ledger_lines import START
from coterie.privacy.manifest import MANIFEST, SIGNATURE, manifest_of
from coterie.results import CONFIG, DIAGNOSTICS, METRICS, RESULT, Outcome, RoundRecord, read_config
from coterie.rounds.client_registry import record_nothing
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.server import planning
from coterie.server.checkpoints import (
    CHECKPOINT,
    CONSTANTS,
    WAY_OUT,
    FolderError,
    checkpoint_content,
    constants_content,
    read_checkpoint,
    tensor_content,
)
from coterie.server.config import RunConfig
from coterie.server.continuation import ContinuationError, accepted_changes, extended_plan, extension
from coterie.server.data_origin import LOCAL, DataOrigin
from coterie.server.resolution import combine
from coterie.server.start_models import StartModels
from coterie.wire.messages import Layout
from coterie.wire.model_card import ModelCard

_LIBRARIES = ("flwr", "torch", "numpy", "scikit-learn", "dp-accounting", "opacus", "randomgen")
_LEDGER = "ledger.jsonl"
_DATA_DIR = "data.data-dir"
_START = "start/state.safetensors"
# Largest evidence that is compressed, in bytes; more takes too long.
_COMPRESSED = 1 << 24


class RunFolder(Recorder):
    """A run's folder, locked while open. It is the strategy's ``Recorder``.

    Make one with :meth:`create` or :meth:`resume`.
    """

    def __init__(
        self, path: str | Path, config: RunConfig, plan: Plan, ledger: Ledger, resumed: Checkpoint | None
    ) -> None:
        self.path = Path(path)
        self.config = config
        self.plan = plan
        self.ledger = ledger
        self.resumed = resumed
        self.on_metrics: Callable[[RoundRecord], None] = lambda record: None
        self.on_progress: ProgressCallback = ignore_progress
        self.on_audit: Callable[..., None] = record_nothing
        self.seen_rosters: Path | None = None
        #: When this session began, by :func:`time.monotonic`.
        self.began, self._earlier = time.monotonic(), 0.0
        if resumed is not None and (records := self.rounds()):
            self._earlier = records[-1].seconds_total or 0.0

    @property
    def seconds_total(self) -> float:
        """Seconds of this session and of the earlier ones of a resumed run, up to their last rounds."""
        return self._earlier + time.monotonic() - self.began

    @classmethod
    def create(
        cls, path: str | Path, config: RunConfig, origin: DataOrigin | None = None, start: StartModels | None = None
    ) -> RunFolder:
        """Create a new folder.

        Args:
            path: the folder.
            config: of the run.
            origin: the data of a simulation, with which a resumed run compares its own; None: they are not compared.
            start: the initial models, of another run; None: new ones.

        Raises:
            FolderError: ``path`` exists and is not empty.
        """
        path = Path(path)
        if (path / CONFIG).exists():
            raise FolderError(f"{path} already contains a run: continue it with --resume, or choose another --out")
        if path.exists() and (not path.is_dir() or any(not _is_trace(entry) for entry in path.iterdir())):
            raise FolderError(f"{path} is not an empty folder: choose another --out")
        plan = config.plan if start is None else start.plan(config)
        try:
            private_folder(path)
        except OSError as error:
            raise FolderError(f"{path} cannot be created ({error.strerror}): choose another --out") from None
        ledger_fields = planning.about(config)
        if start is not None:
            ledger_fields[START] = start.entry
            private_folder(path / "start")
            _replace(path / _START, checkpoint_content(start.checkpoint, {}, {}))
        # Before the ledger is locked: git, which this calls, holds the lock for a moment if this process is killed.
        document = {"config": nested(config.values), "versions": versions(), "machine": machine(config.training.device)}
        ledger = _opened(plan, path / _LEDGER, config, ledger_fields)
        for part in filter(_is_unfinished, [*path.iterdir()]):
            part.unlink()
        if origin is not None:
            config = config.with_data_dir(origin.folder)
        folder = cls(path, config.with_plan(plan), plan, ledger, None)
        if origin is not None:
            folder.write_json(LOCAL, origin.to_json())
        _replace(path / CONFIG, tomli_w.dumps(document).encode())
        _keep_constants(path, config)
        return folder

    @classmethod
    def resume(
        cls,
        path: str | Path,
        settings: Mapping[str, Any],
        check: Callable[[RunConfig], DataOrigin | None] = lambda config: None,
    ) -> RunFolder:
        """Open the folder of an interrupted run.

        Args:
            path: the folder.
            settings: explicit configuration values. They must agree with the run's own; only paths, devices,
                timeouts and ``stop-after`` may change, and ``rounds`` may grow within the budget that is left.
            check: raises if the run cannot work here; returns the data of a simulation, which must be those with
                which the run began.

        Raises:
            FolderError: there is no run, ``settings`` differ from it, its data are missing or changed, or further
                rounds exceed its budget.
            LedgerError: another process uses it, its ledger lacks charges that the folder proves, or its budget file
                is another one than at its start.
        """
        path = Path(path)
        try:
            stored = read_config(path)["config"]
        except FileError as error:
            raise FolderError(f"{path} contains no run to resume: {error}{WAY_OUT}") from None
        config = RunConfig.stored(stored, settings)
        try:
            changes = accepted_changes(RunConfig.stored(stored), config)
        except ContinuationError as error:
            raise FolderError(f"{path} {error}") from None
        config, origin = _with_data(path, config, settings, check)
        header, charges = verified(path)
        public = header.get("public", {})
        config = config.with_step(public.get("server-lr"))
        _check_code(path, config, public)
        _keep_constants(path, config)
        plan, ledger_fields = _planned(header, charges, config)
        checkpoint, line = read_checkpoint(path / CHECKPOINT)
        ledger = _opened(plan, path / _LEDGER, config, ledger_fields)
        try:
            extended = extended_plan(plan, config, checkpoint.round if checkpoint else 0, ledger)
            if extended != plan:
                ledger.extend(**extension(extended))
            folder = cls(path, config.with_plan(extended), extended, ledger, checkpoint)
            if origin is not None:
                folder.write_json(LOCAL, origin.to_json())
            if changes:
                document = tomllib.loads(read_text(path / CONFIG))
                document["config"] |= nested(changes)
                _replace(path / CONFIG, tomli_w.dumps(document).encode())
            last = checkpoint.round if checkpoint else 0
            folder._forget_after(last, line)
            forget_states_after(path / "clients", last)
        except BaseException as error:
            ledger.close()
            if isinstance(error, ContinuationError):
                raise FolderError(f"{path} {error}") from None
            raise
        return folder

    # ---- Recorder -------------------------------------------------------------------------------------

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        """Replace the checkpoint; it holds released values only."""
        proof = {"charges": len(self.ledger.charges), "chain": self.ledger.chain}
        private_folder(self.path / "checkpoint")
        _replace(self.path / CHECKPOINT, checkpoint_content(state, line, proof))

    def round_finished(self, line: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl, and exact scores to diagnostics.jsonl; then call ``on_metrics``."""
        timing = {"seconds_total": self.seconds_total} if "seconds" in line else {}
        record = self._record({**line, **timing})
        self._append_exact(record)  # first: a round whose metrics are there lacks no scores
        _append(self.path / METRICS, record.to_json())
        self.on_metrics(record)

    def save_artifact(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace ``evidence/{name}.npz``, inputs of the clustering."""
        private_folder(self.path / "evidence")
        content = io.BytesIO()
        few = sum(values.nbytes for values in arrays.values()) <= _COMPRESSED
        write: Callable[..., None] = np.savez_compressed if few else np.savez
        write(content, **arrays)
        _replace(self.path / "evidence" / f"{name}.npz", content.getvalue())

    def load_artifact(self, name: str) -> dict[str, np.ndarray] | None:
        """Read ``evidence/{name}.npz``; None: there is none."""
        path = self.path / "evidence" / f"{name}.npz"
        if not path.exists():
            return None
        try:
            with os.fdopen(open_regular(path), "rb") as file, np.load(file, allow_pickle=False) as archive:
                return dict(archive)
        except (FileError, OSError, ValueError, EOFError, KeyError, BadZipFile, zlib.error) as error:
            raise FolderError(f"{path} is damaged ({error}){WAY_OUT}") from None

    def report_progress(self, what: str) -> None:
        """Call ``on_progress``."""
        self.on_progress(what)

    def start_models(self) -> Checkpoint | None:
        """The initial models, where they are those of another run; None: they are new."""
        return read_checkpoint(self.path / _START)[0]

    @property
    def failure(self) -> str | None:
        """Why a run that completed its rounds failed; None otherwise."""
        try:
            path = self.path / "failure.json"
            return str(read_object(path).get("reason", f"the run failed before: {path}")) if path.exists() else None
        except FileError as error:
            raise FolderError(f"{error}{WAY_OUT}") from None

    @failure.setter
    def failure(self, reason: str | None) -> None:
        if reason is None:
            (self.path / "failure.json").unlink(missing_ok=True)
        else:
            self.write_json("failure.json", {"reason": reason})

    # ---- the end of a run ---------------------------------------------------------------------------------

    def rounds(self) -> list[RoundRecord]:
        """The finished rounds so far, with their exact scores."""
        paths = (self.path / METRICS, self.path / DIAGNOSTICS)
        try:
            return RoundRecord.joined(*(read_lines(path) if path.exists() else [] for path in paths))
        except FileError as error:
            raise FolderError(f"{error}{WAY_OUT}") from None
        except ValueError as error:
            raise FolderError(f"{self.path / METRICS} or {DIAGNOSTICS} is damaged ({error}){WAY_OUT}") from None

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write ``name`` atomically."""
        with _writing(self.path / name):
            write_json(self.path / name, document)

    def write_outcome(self, outcome: Outcome) -> None:
        """Write result.json and diagnostics.json."""
        with _writing(self.path / RESULT):
            outcome.write(self.path)

    def certify(self) -> dict[str, Any]:
        """Write privacy.json, derived from the ledger as it is on disk."""
        document = certificate(*read_ledger(self.path / _LEDGER))
        self.write_json("privacy.json", document)
        return document

    def write_models(self, models: np.ndarray, layout: Layout, card: ModelCard) -> None:
        """One file per model, with its card beside the parameters; files of more models are removed.

        Args:
            models: (k, d).
            layout: of a model.
            card: of the first; the others differ in ``cluster``.
        """
        private_folder(self.path / "models")
        for file in (self.path / "models").glob("cluster-*.safetensors"):
            if not 0 <= int(file.stem.removeprefix("cluster-")) < len(models):
                file.unlink()  # of the run before it was continued
        for cluster, model in enumerate(models):
            tensors = {name: values.copy() for name, values in layout.split(model).items()}
            metadata = replace(card, cluster=cluster).to_json()
            _replace(self.path / "models" / f"cluster-{cluster}.safetensors", tensor_content(tensors, metadata))

    def amend_last(self, evaluation: Mapping[str, Any]) -> None:
        """Add the evaluation of the last round if a crash prevented its writing."""
        *earlier, last = self.rounds()
        if last.mean_accuracy is not None or last.exact():
            return
        last = self._record({**{name: getattr(last, name) for name in last.stored()}, **evaluation})
        self._append_exact(last)
        _write_lines(self.path / METRICS, [record.to_json() for record in (*earlier, last)])

    def close(self) -> None:
        """Release the lock of the folder."""
        self.ledger.close()

    def _forget_after(self, round: int, line: Mapping[str, Any] | None) -> None:
        """Keep the rounds up to the checkpoint, which may hold the last one alone."""
        records = [record for record in self.rounds() if record.round <= round]
        if line and (not records or records[-1].round < round):
            records.append(self._record(line))
        _write_lines(self.path / METRICS, [record.to_json() for record in records])
        if (self.path / DIAGNOSTICS).exists():
            _write_lines(self.path / DIAGNOSTICS, [exact for record in self.rounds() if (exact := record.exact())])

    def _record(self, line: Mapping[str, Any]) -> RoundRecord:
        return RoundRecord.of(line, noisy=self.config.evaluation.evaluate == "private")

    def _append_exact(self, record: RoundRecord) -> None:
        if exact := record.exact():
            _append(self.path / DIAGNOSTICS, exact)


def seal(run: Path) -> None:
    """Write SHA256SUMS of certificate, ledger and models of a run; the signature of another one is removed."""
    content, former = manifest_of(run), b""
    with suppress(FileError):
        former = read_bytes(run / MANIFEST)
    if former != content:
        (run / SIGNATURE).unlink(missing_ok=True)
    _replace(run / MANIFEST, content)


def _check_code(path: Path, config: RunConfig, public: Mapping[str, Any]) -> None:
    """Check that the code of users is that with which a run has begun."""
    if "constants" in public and fingerprint(config.constants) != public["constants"]:
        raise FolderError(
            f"{path}: model '{config.training.model}' has other frozen parameters or buffers than at the start of "
            f"the run; nothing was charged: restore its code and files, or compare {CONSTANTS}"
        )
    if "pretrained-sha256" in public and config.pretrained_hash != public["pretrained-sha256"]:
        raise FolderError(
            f"{path}: pretrained = '{config.training.pretrained}' is another file than at the start of the run, by its "
            "SHA-256; nothing was charged: restore it"
        )
    for kind, name in config.training.plugins.items():
        if public.get(f"{kind}-sha256") != source_hash(kind, name):
            raise FolderError(
                f"{path}: the file of {kind} '{name}' differs from that at the start of the run; nothing was "
                "charged: restore its code"
            )


def _keep_constants(path: Path, config: RunConfig) -> None:
    """Write the constants of the network, if there are some and they are not there yet."""
    if config.constants and not (path / CONSTANTS).exists():
        private_folder(path / "models")
        _replace(path / CONSTANTS, constants_content(config.constants))


def _with_data(
    path: Path, config: RunConfig, settings: Mapping[str, Any], check: Callable[[RunConfig], DataOrigin | None]
) -> tuple[RunConfig, DataOrigin | None]:
    """The configuration with the folder of the data, which are checked before anything changes.

    A folder that was named relative to another directory must be named again.
    """
    try:
        earlier = DataOrigin.read(path / LOCAL)
    except FileError as error:
        raise FolderError(f"{error}{WAY_OUT}") from None
    try:
        if earlier is not None and not combine(settings).get(_DATA_DIR):
            earlier.require_directory()
            config = config.with_data_dir(earlier.folder)
        origin = check(config)
        if origin is not None and earlier is not None:
            origin.require_same(earlier)
    except DataError as error:
        raise FolderError(
            f"{error}; nothing was charged: restore the data, name their folder by --data-dir if it moved, or start a "
            "new run with another --out"
        ) from None
    return config if origin is None else config.with_data_dir(origin.folder), origin


def _planned(
    header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]], config: RunConfig
) -> tuple[Plan, dict[str, Any]]:
    """The plan for which the ledger was opened, and what its first line holds beside it.

    Another version might calibrate a little differently or lack settings that have their defaults here, and what lies
    outside the guarantee may depend on settings that a resumed run is free to change.
    """
    ledger_fields = planning.about(config)
    if START in header:
        ledger_fields[START] = header[START]
    now, stored = ledger_fields["tuned"], header.get("tuned", {})
    added = {name: value for name, value in now.items() if value != config.declared[name].shown_default}
    ledger_fields["tuned"] = {name: now.get(name, value) for name, value in stored.items()} | added
    if "rounds" in stored:  # charges state further rounds
        ledger_fields["tuned"]["rounds"] = stored["rounds"]
    public = ledger_fields["public"]
    ledger_fields["public"] = {name: public[name] for name in header.get("public", {}) if name in public}
    if charges:
        ledger_fields["diagnostics"] = header["diagnostics"]
    return config.plan if config.privacy.privacy_unit == "record" else plan_from_terms(header["plan"]), ledger_fields


def _opened(plan: Plan, path: Path, config: RunConfig, ledger_fields: Mapping[str, Any]) -> Ledger:
    """The run's ledger, with the shared budget where the configuration names one."""
    ledger = plan.ledger(path, **ledger_fields)
    try:
        if config.privacy.budget_file:
            file = Path(config.privacy.budget_file)
            budget = SharedBudget(
                file,
                clients=plan.clients,
                sampler=plan.sampler,
                epsilon=plan.epsilon,
                delta=plan.delta,
                planned=plan.planned(),
            )
            ledger.share(budget)
        elif any("shared" in charge for charge in ledger.charges):
            raise LedgerError(f"{path.parent} uses a shared budget: set budget-file to its file")
    except BaseException:
        ledger.close()
        raise
    return ledger


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with _writing(path), open_private(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    _replace(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _replace(path: Path, content: bytes) -> None:
    with _writing(path):
        write_atomic(path, content)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one that states how to continue."""
    try:
        yield
    except OSError as error:
        raise FolderError(
            f"{path} cannot be written: {error.strerror or error}; free the disk or make the folder writable, then "
            "continue with --resume"
        ) from None


def _is_trace(path: Path) -> bool:
    """Whether a file is of a run that was killed at its start: a ledger without charges, or a part of another file."""
    if path.is_file() and path.name == _LEDGER:
        return len(read_bytes(path).splitlines()) <= 1
    return path.is_file() and (path.name == LOCAL or _is_unfinished(path))


def _is_unfinished(path: Path) -> bool:
    """Whether a file is a part of one that a crash left: see :func:`coterie.files.write_atomic`."""
    return path.suffix == ".tmp" and path.name.startswith((f"{LOCAL}.", f"{CONFIG}."))


def versions() -> dict[str, str]:
    """Versions of Coterie, Python, and the libraries on which a result depends."""
    libraries = (*_LIBRARIES, "ray") if find_spec("ray") else _LIBRARIES
    return {"coterie": __version__, "python": platform.python_version(), **{n: version(n) for n in libraries}}


def machine(device: str) -> dict[str, Any]:
    """Device and git commit of a result."""
    command, commit = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"], ""
    with suppress(OSError, subprocess.TimeoutExpired):
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    return {"device": device, "cores": len(os.sched_getaffinity(0)), "git-commit": commit or "unknown"}
