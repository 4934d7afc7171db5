"""What a client says when it is asked the same again: the same, and it pays nothing."""

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from kit.deployed import RECORDS, reply_of

from coterie.client.reply_cache import ReplyCache
from coterie.client.state import ClientError
from coterie.models import initialise
from coterie.privacy.ledger_lines import read_ledger
from coterie.server import RunConfig
from coterie.wire import TrainRequest
from coterie.wire.messages import Layout, pack_models, read_reply

SETTINGS = {**RECORDS, "sampling-rate": 1}
CONFIG = RunConfig(SETTINGS)
LAYOUT = Layout.of(initialise("linear", (1, 4, 4), 2, 0))


@pytest.fixture
def ask(tmp_path):
    """Asks a deployed client for an update, in a Flower run of its own; the update."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 256, (24, 1, 4, 4), np.uint8), y=np.arange(24) % 2)
    node = {"data": str(tmp_path / "own.npz"), "state-dir": str(tmp_path)}

    def call(number, start=0.0, flower_run=1, settings=CONFIG):
        models = pack_models(np.full((1, LAYOUT.size), start, np.float32), LAYOUT)
        request = TrainRequest(round=1, record_plans=settings.plan.record_plans)
        config = ConfigRecord({**settings.for_clients(), **request.to_record(), "round": number})
        answer = reply_of(node, RecordDict({"models": models, "config": config}), run=flower_run)
        return read_reply(answer, client_id=0, round=number, num_clusters=1, layout=LAYOUT).update

    return call


def charged(tmp_path):
    """Rounds that the client has paid for."""
    return [line["round"] for line in read_ledger(tmp_path / "client-0.ledger.jsonl")[1]]


def test_the_same_question_is_answered_the_same_and_paid_once(ask, tmp_path):
    first = ask(1)
    assert np.array_equal(ask(1), first)
    assert np.array_equal(ask(1, flower_run=2), first)  # a server that died, and was resumed
    assert charged(tmp_path) == [1]


@pytest.mark.parametrize("other", [{"number": 2}, {"start": 0.5}])
def test_another_question_is_paid_for(ask, tmp_path, other):
    first = ask(1)
    second = ask(**{"number": 1, **other})
    assert not np.array_equal(second, first)
    assert charged(tmp_path) == [1, other.get("number", 1)]
    with pytest.raises(ClientError, match="client 0 rejects the request: it exceeds the client's budget"):
        ask(3)
    assert np.array_equal(ask(**{"number": 1, **other}), second)


def test_all_answers_of_a_round_are_kept_and_none_of_another(ask, tmp_path):
    first = ask(1)
    ask(1, start=0.5)  # as the second phase of a round
    assert np.array_equal(ask(1), first)
    with pytest.raises(ClientError, match="it exceeds the client's budget"):
        ask(2)
    assert np.array_equal(ask(1), first)
    assert len(charged(tmp_path)) == 2


def test_answers_of_an_earlier_round_are_forgotten(ask, tmp_path):
    ask(1)
    ask(2)
    with pytest.raises(ClientError, match="it exceeds the client's budget"):
        ask(1)
    assert len(list((tmp_path / "client-0.answers").glob("*-*"))) == 1


def test_where_data_lie_and_what_computes_may_change(ask, tmp_path):
    first = ask(1)
    elsewhere = RunConfig({**SETTINGS, "device": "auto", "data-dir": "/elsewhere"})
    assert np.array_equal(ask(1, settings=elsewhere), first)
    assert charged(tmp_path) == [1]


def test_an_answer_that_was_not_paid_for_is_not_kept(ask, tmp_path):
    ask(1, settings=RunConfig({**SETTINGS, "privacy-unit": "none", "samples-per-client": 0}))
    assert not (tmp_path / "client-0.answers").exists()


def test_an_answer_that_cannot_be_kept_does_not_leave(ask, tmp_path, monkeypatch):
    def full(old, new, replace=os.replace):
        if new.name != "attempt":
            raise OSError("no room")
        replace(old, new)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(ClientError, match="see its own log for details"):
            ask(1)
    assert charged(tmp_path) == [1]
    ask(1)
    assert charged(tmp_path) == [1, 1]


@pytest.fixture
def kill(ask, tmp_path, monkeypatch):
    """Asks, and kills the client when it calls a function: what it does at its end is undone."""
    mark, kept = (tmp_path / "client-0.answers" / name for name in ("attempt", "kept"))

    def call(number, at="handlers.train_privately", before=None):
        def end(*arguments):
            if before:
                before(*arguments)
            os.link(mark, kept)
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(f"coterie.client.{at}", end)
            with pytest.raises(ClientError, match="see its own log"):
                ask(number)
        kept.rename(mark)
        return mark

    return call


def test_a_charge_pays_for_one_more_attempt_at_a_request(ask, kill, tmp_path):
    kill(1)
    assert charged(tmp_path) == [1]
    first = ask(1)
    assert np.array_equal(ask(1), first)
    assert charged(tmp_path) == [1]
    kill(2)
    kill(2)
    with pytest.raises(ClientError, match="it exceeds the client's budget"):
        ask(2)
    assert charged(tmp_path) == [1, 2]


def test_an_attempt_that_was_killed_before_its_charge_pays_for_nothing(ask, kill, tmp_path):
    kill(1, at="record_level.charge")
    assert not (tmp_path / "client-0.ledger.jsonl").exists()
    ask(1)
    assert charged(tmp_path) == [1]


@pytest.mark.parametrize("change", [{"boot": "x"}, {"began": 0}, {"request": "1-0"}, {"again": True}, None])
def test_only_the_mark_of_this_very_attempt_counts(ask, kill, tmp_path, change):
    """Of another start of the machine, restored, of another request, of a second attempt, or damaged."""
    mark = kill(1)
    mark.write_text(json.dumps(json.loads(mark.read_text()) | change) if change else "{")
    ask(1)
    assert charged(tmp_path) == [1, 1]


def test_no_reply_that_has_left_is_given_anew(ask, kill, tmp_path):
    """A client that is killed after its reply was kept leaves the mark."""
    kept = ReplyCache(tmp_path, 0).put
    kill(1, at="reply_cache.ReplyCache.put", before=kept.__func__)
    ask(1)
    (reply,) = (tmp_path / "client-0.answers").glob("*-*")
    reply.unlink()
    ask(1)
    assert charged(tmp_path) == [1, 1]


def test_a_request_after_a_killed_attempt_at_another_is_charged(ask, kill, tmp_path):
    kill(1)
    ask(2)
    assert charged(tmp_path) == [1, 2]
    with pytest.raises(ClientError, match="it exceeds the client's budget"):
        ask(1)


def test_a_damaged_answer_is_not_given_anew_unless_somebody_at_the_client_says_so(ask, tmp_path):
    ask(1)
    (kept,) = (tmp_path / "client-0.answers").glob("*-*")
    kept.write_bytes(b"nonsense")
    with pytest.raises(ClientError, match="cannot be read"):
        ask(1)
    assert charged(tmp_path) == [1]
    kept.unlink()
    ask(1)
    assert charged(tmp_path) == [1, 1]


def test_another_app_of_the_client_waits_for_the_answer(ask, tmp_path):
    (tmp_path / "client-0.answers").mkdir()
    with (tmp_path / "client-0.answers" / "lock").open("w") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        answer = pool.submit(ask, 1)
        with pytest.raises(TimeoutError):
            answer.result(timeout=1.0)
        fcntl.flock(file, fcntl.LOCK_UN)
        answer.result(timeout=60)
    assert charged(tmp_path) == [1]


@pytest.mark.parametrize("number", ["../../elsewhere", "1/../x"])
def test_a_server_names_no_file(ask, tmp_path, number):
    with pytest.raises(ClientError, match=r"round is '.*'; expected an integer"):
        ask(number)
    assert not list(tmp_path.rglob("*elsewhere*"))
