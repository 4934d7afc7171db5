"""What the process of a message makes of an app's exceptions."""

import pytest
from flwr.app import Context, Message, RecordDict

from coterie.client.state import ClientError
from coterie.deploy.clientapp import answer

CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def message():
    return Message(RecordDict(), dst_node_id=1, message_type="train")


@pytest.mark.usefixtures("identity")
def test_a_rejected_request_is_a_reply_with_one_line_in_the_log(caplog):
    def app(message, context):
        raise ClientError("client 0 rejects the request: it exceeds the client's budget")

    reply = answer(app, message(), CONTEXT)
    assert reply.has_error()
    assert reply.error.reason == "client 0 rejects the request: it exceeds the client's budget"
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "rejects the request" in caplog.text


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize(
    "error", [RuntimeError("a crash"), KeyError("x"), type("ClientError", (RuntimeError,), {})("y")]
)
def test_a_crash_stays_an_exception(error):
    def app(message, context):
        raise error

    with pytest.raises(type(error)):
        answer(app, message(), CONTEXT)


@pytest.mark.usefixtures("identity")
def test_a_reply_is_returned_unchanged():
    expected = Message(RecordDict(), reply_to=message())
    assert answer(lambda message, context: expected, message(), CONTEXT) is expected
