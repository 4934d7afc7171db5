"""The process of one message: a fork of a process that has imported :data:`LIBRARIES`, and perhaps an app's code.

The child fetches the app (FAB) from its SuperNode, installs it and imports its code from there, as Flower's program
``flwr-clientapp`` does, unless its parent has imported the code of this very FAB.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.flower.generators import collect_generators, reseed_generators
from coterie.site.node import APP_HASH

if TYPE_CHECKING:
    from flwr.app import Context, Message

#: Third-party modules that Flower and Coterie's ClientApp import for a training request.
LIBRARIES = (
    "flwr.supernode.runtime.run_clientapp",
    "flwr.clientapp",
    "httpcore",
    "h11",
    "torch",
    "dp_accounting.pld",
    "dp_accounting.rdp",
    "scipy.stats",
    "cryptography.x509",
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "randomgen",
    "safetensors.numpy",
)
# The exception by which Coterie's ClientApp rejects a request, in the copy of Coterie that the app holds.
_REFUSAL = ("coterie.client.state", "ClientError")
# The module that Coterie's ClientApp imports when a message comes.
_LAZY = "coterie.client.answer"


def preload() -> None:
    """Import the libraries; an app that needs a missing one reports the error."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            import_module(name)


@dataclass(frozen=True)
class App:
    """An installed app.

    ``fab_hash`` is the SHA-256 of its FAB in hexadecimal, ``folder`` holds its code.
    """

    fab_hash: str
    folder: str


@dataclass(frozen=True)
class Loaded:
    """An app whose code this process has imported, and the random generators that the import created."""

    app: App
    generators: Sequence[object]


def load(app: App) -> Loaded | None:
    """Import the code of an app that messages of its runs will execute.

    Returns None if this process must not be forked, because the import has started a thread.
    """
    from flwr.clientapp.client_app import LoadClientAppError
    from flwr.common.config import get_project_config
    from flwr.supercore.object_ref import load_app

    reseed_generators()
    _forget("coterie")
    config = get_project_config(app.folder)
    with collect_generators() as generators:
        load_app(config["tool"]["flwr"]["app"]["components"]["clientapp"], LoadClientAppError, app.folder)
        with contextlib.suppress(ImportError):
            import_module(_LAZY)
    return Loaded(app, generators) if _single_threaded() else None


def _single_threaded() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # not Linux
        return threading.active_count() == 1


def run(options: Mapping[str, Any], loaded: Loaded | None, installed: Callable[[App | None], None]) -> None:
    """Run the ClientApp for one message.

    All children start with the state of their parent. All random generators therefore get new seeds from the operating
    system, and modules that are not from the message's app are forgotten: the app may have modules of their names.

    Args:
        options: those of Flower's `run_clientapp`.
        loaded: the app that this process has imported, if any.
        installed: called before any code of the message's app runs, with the app if it is not ``loaded``.
    """
    from flwr.supernode.runtime import run_clientapp as flower

    reseed_generators()
    if loaded is None:
        _forget("coterie")
    install, loader = vars(flower)["install_from_fab"], vars(flower)["get_load_client_app_fn"]

    def install_once(fab: bytes, **how: Any) -> Path:
        fab_hash = os.environ[APP_HASH] = hashlib.sha256(fab).hexdigest()
        if loaded is not None:
            if loaded.app.fab_hash == fab_hash and os.path.isdir(loaded.app.folder):
                installed(None)
                return Path(loaded.app.folder)
            # forget the other app's modules and its folder
            start = loaded.app.folder + os.sep
            files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
            for name in {name.partition(".")[0] for name, file in files.items() if file and file.startswith(start)}:
                _forget(name)
            sys.path[:] = [path for path in sys.path if path != loaded.app.folder]
        folder = Path(install(fab, **how))
        installed(App(fab_hash, str(folder)))
        return folder

    def loader_that_reseeds(**how: Any) -> Callable[..., Any]:
        def load_client_app(*fab: str) -> Any:
            with collect_generators() as generators:
                client_app = loader(**how)(*fab)
            reseed_generators([*generators, *(loaded.generators if loaded else ())])
            return partial(answer, client_app)

        return load_client_app

    vars(flower).update(install_from_fab=install_once, get_load_client_app_fn=loader_that_reseeds)
    flower.run_clientapp(**options)


def answer(client_app: Callable[..., Message], message: Message, context: Context) -> Message:
    """Return the reply of an app; why Coterie's ClientApp rejects a request is a reply, too.

    Flower logs a traceback and an exit code for an exception, as for a crash.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.common.logger import log

    try:
        return client_app(message=message, context=context)
    except RuntimeError as error:
        if (type(error).__module__, type(error).__name__) != _REFUSAL:
            raise
        from coterie.wire.messages import REFUSALS  # of the app

        log(WARNING, "reply to the server: %s", error)
        code = REFUSALS.get(getattr(error, "kind", ""), ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
        return Message(Error(code, str(error)), reply_to=message)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
