"""Imports what is not there."""

import no_such_library  # noqa: F401
