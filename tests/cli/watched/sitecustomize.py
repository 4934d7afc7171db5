"""Writes what clients of a masked round add up, before and after masks, to the folder WATCHED: for tests alone.

Python imports this module when a process starts with this folder in PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile

_MODULE = "coterie.client.masked_rounds"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as usual, and changes it once it is loaded."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            masked = module.MaskingClient.masked

            def watched(masking, vector):
                sent = masked(masking, vector)
                for suffix, values in ((".clear", vector), (".sent", sent)):
                    with tempfile.NamedTemporaryFile(suffix=suffix, dir=os.environ["WATCHED"], delete=False) as file:
                        file.write(values.astype("<u4").tobytes())
                return sent

            module.MaskingClient.masked = watched

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, _Finder())
