"""Networks of a user: functions under a name module:function, as settings name them."""

import sys
import types


def own_network(monkeypatch, make):
    """The name of a module of this function alone, and of the function."""
    module = types.ModuleType("networks_of_a_test")
    module.make = make
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:make"
