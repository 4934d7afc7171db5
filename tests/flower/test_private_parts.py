"""The private parts of Flower on which Coterie relies; this file fails first with another version of Flower."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from flwr.app import Array, Message, RecordDict

import coterie
from coterie.flower import PRIVATE
from coterie.flower.metadata import set_message_id, set_request

PACKAGE = Path(coterie.__file__).parent
#: How source code reaches for names that a module does not export.
PRIVATE_USE = re.compile(r"vars\(flower\)|__dict__\[|flower\._[a-z]|backend\.BasicActorPool = |\.__kwdefaults__")


def resolve(name):
    module, attributes = name, []
    while module:
        try:
            found = import_module(module)
        except ImportError:
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
            continue
        for attribute in attributes:
            found = getattr(found, attribute)
        return found
    raise ImportError(name)


@pytest.mark.parametrize("part", PRIVATE, ids=lambda part: part.name)
def test_a_private_part_is_there_with_its_parameters(part):
    found = resolve(part.name)
    if part.parameters:
        function = found.__init__ if isinstance(found, type) else found
        assert set(part.parameters) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize("part", PRIVATE, ids=lambda part: part.name)
def test_its_user_names_it(part):
    source = (PACKAGE / f"{part.user.replace('.', '/')}.py").read_text()
    assert part.name.removesuffix(".sleep").removesuffix(".Popen").rpartition(".")[2] in source


def test_no_other_module_uses_private_parts():
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if PRIVATE_USE.search(path.read_text())}
    listed = {f"{part.user.replace('.', '/')}.py" for part in PRIVATE}
    assert users - listed == {"flower/metadata.py", "flower/sizes.py", "plugins.py"} & users


@pytest.mark.usefixtures("identity")
def test_ids_of_messages_can_be_set():
    request = Message(RecordDict(), dst_node_id=1, message_type="train")
    set_message_id(request, "7")
    reply = Message(RecordDict(), reply_to=request)
    set_request(reply, "8")
    assert (request.metadata.message_id, reply.metadata.reply_to_message_id) == ("7", "8")


def test_flower_reads_the_chunks_of_an_array():
    array = Array("float32", (1,), "numpy.ndarray", b"1234")
    array.__dict__["_chunks"] = chunks = [("id", object())]
    assert array.slice_array() == chunks
