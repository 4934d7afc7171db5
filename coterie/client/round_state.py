"""What a client keeps of masked rounds: one open round with its secrets, and which rounds it has answered.

Two files in the state folder, both written atomically:

=========================  =========================================================================================
``client-I.open-round``    the open round: its request, its secrets, and the answers so far. It is removed before the
                           last answer leaves
``client-I.rounds``        the latest round of every run that is over, and the answers of the last one that was finished
=========================  =========================================================================================

An answer is on disk, with the secrets of the next step, before it leaves. So the same message gets the same answer
after a crash, and another message for the same step none.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from coterie.client.state import ClientError
from coterie.files import FileError, open_private, private_folder, read_bytes, sync_folder, write_atomic

# Runs whose latest round is remembered.
_MOST_RUNS = 1000


class RoundId(NamedTuple):
    """A masked round of a run."""

    run: str
    number: int
    attempt: int


class Answer(NamedTuple):
    """The digest of a message, and the reply to it."""

    digest: str
    reply: bytes


@dataclass(frozen=True)
class OpenRound:
    """A round that is open, or finished (without secrets).

    Attributes:
        id: which round.
        request: that of step 1.
        secrets: of the next step (:meth:`coterie.privacy.secure_aggregation.MaskingClient.to_bytes`).
        answers: to the steps so far.
    """

    id: RoundId
    request: bytes
    secrets: bytes
    answers: tuple[Answer, ...]

    def __repr__(self) -> str:
        return f"OpenRound({self.id}, {len(self.answers)} answers)"

    def to_bytes(self, **further: object) -> bytes:
        """Return the content of a file, whose first line ``further`` extends."""
        digests = [answer.digest for answer in self.answers]
        parts = [self.request, self.secrets, *(answer.reply for answer in self.answers)]
        header = {"id": self.id, "digests": digests, "sizes": [len(entry) for entry in parts], **further}
        return json.dumps(header).encode() + b"\n" + b"".join(parts)

    @classmethod
    def from_bytes(cls, content: bytes) -> OpenRound:
        """Read the content of a file.

        Raises:
            ValueError, KeyError, TypeError: it is damaged.
        """
        first, _, rest = content.partition(b"\n")
        header = json.loads(first)
        parts: list[bytes] = []
        for size in header["sizes"]:
            parts, rest = [*parts, rest[:size]], rest[size:]
        if [len(entry) for entry in parts] != header["sizes"] or rest:
            raise ValueError("a part is missing")
        request, secrets, *replies = parts
        answers = tuple(Answer(*pair) for pair in zip(header["digests"], replies, strict=True))
        run, number, attempt = header["id"]
        return cls(RoundId(str(run), int(number), int(attempt)), request, secrets, answers)


class RoundState:
    """The masked rounds of one client; use it within :meth:`lock`.

    Args:
        folder: its state folder.
        client_id: id in Coterie.
        sync: whether files are synced to disk.

    Attributes:
        open: the open round; None if there is none.
        finished: the last round that was finished, without secrets.
    """

    def __init__(self, folder: Path, client_id: int, *, sync: bool = True) -> None:
        self._folder, self._sync = folder, sync
        self._secret, self._public = (folder / f"client-{client_id}.{name}" for name in ("open-round", "rounds"))
        self._over: dict[str, tuple[int, int]] = {}  # by run
        self.open: OpenRound | None = None
        self.finished: OpenRound | None = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold an exclusive lock, and read both files: a ClientApp process can outlive its SuperNode.

        Raises:
            ClientError: a file is damaged.
        """
        private_folder(self._folder)
        with open_private(self._public.with_name(f"{self._public.name}.lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.open = self.finished = None
            try:
                if self._public.exists():
                    content = read_bytes(self._public)
                    over = json.loads(content.partition(b"\n")[0])["over"]
                    self._over = {str(run): (int(number), int(attempt)) for run, (number, attempt) in over.items()}
                    self.finished = OpenRound.from_bytes(content)
                if self._secret.exists():
                    self.open = OpenRound.from_bytes(read_bytes(self._secret))
            except (ValueError, KeyError, TypeError, AttributeError, FileError):
                raise ClientError(
                    f"the client's state of masked rounds is damaged: move {self._secret.name} and "
                    f"{self._public.name} away"
                ) from None
            if self.open is not None and self.is_over(self.open.id):  # a crash came before it was removed
                self._remove()
            yield

    def is_over(self, id: RoundId) -> bool:
        """Whether a round, or a later one of its run, is over."""
        return self._over.get(id.run, (-1, -1)) >= (id.number, id.attempt)

    def answers(self, id: RoundId) -> Sequence[Answer]:
        """Return the answers to a round so far."""
        return next((one.answers for one in (self.open, self.finished) if one is not None and one.id == id), ())

    def begin(self, id: RoundId, request: bytes, secrets: bytes, answer: Answer) -> None:
        """Keep a new round, instead of one that is open, which is over then."""
        if self.open is not None:
            nothing = OpenRound(self.open.id, b"", b"", ())
            self._note(self.finished or nothing, self.open.id)
        self._keep(OpenRound(id, request, secrets, (answer,)))

    def go_on(self, secrets: bytes, answer: Answer) -> None:
        """Keep the answer to a further step of the open round."""
        assert self.open is not None
        self._keep(replace(self.open, secrets=secrets, answers=(*self.open.answers, answer)))

    def finish(self, answer: Answer) -> None:
        """Keep the last answer, and remove all secrets of the round."""
        assert self.open is not None
        self._note(replace(self.open, request=b"", secrets=b"", answers=(*self.open.answers, answer)), self.open.id)
        self._remove()

    def _keep(self, round: OpenRound) -> None:
        write_atomic(self._secret, round.to_bytes(), sync=self._sync)
        self.open = round

    def _note(self, finished: OpenRound, id: RoundId) -> None:
        self._over.pop(id.run, None)
        self._over[id.run] = id.number, id.attempt
        self._over = dict(list(self._over.items())[-_MOST_RUNS:])
        write_atomic(self._public, finished.to_bytes(over=self._over), sync=self._sync)
        self.finished = finished

    def _remove(self) -> None:
        self._secret.unlink(missing_ok=True)
        if self._sync:
            sync_folder(self._folder)
        self.open = None
