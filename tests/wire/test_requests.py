"""Requests are typed and bounded; what is missing, of another type or out of range is rejected by name."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from kit.tables import for_rows

from coterie.fields import Bounds, Fields, Length, OneOf
from coterie.server import RunConfig
from coterie.wire import REQUESTS, ClientConfig, RequestError, TrainRequest, digest
from coterie.wire.messages import Layout, pack_models
from coterie.wire.requests import parse_plans

CONFIG = {"round": 1}
OF_VERBS = {
    "train.gan": {"gan": "gan-pendigits", "labels": 2, "samples": 1, "average": 0.0, "feature-range": 1.0},
    "train.centroids": {"local": "k-means", "local-centroids": 1, "feature-range": 1.0},
    "query.label": {"labels": 2, "encoder": "none", "release-counts": False},
    "query.losses": {"compared": 3},
}


@dataclass(frozen=True, kw_only=True)
class Example(Fields):
    error = RequestError

    many: Annotated[int, Bounds(1, 10)]
    step: Annotated[float, Bounds(0, 1, above=True)]
    word: Annotated[str, OneOf(("a", "b"))]
    text: str
    flag: bool
    maybe: Annotated[float | None, Bounds(0, 1)]
    either: Annotated[int | str, Bounds(0, 5), OneOf(("none",))]
    row: Annotated[tuple[float, ...] | None, Length(3), Bounds(0, 1)]


GOOD = {"many": 3, "step": 0.5, "word": "a", "text": "", "either": "none"}


def test_a_good_record_is_read_and_other_keys_are_ignored():
    read = Example.from_record({**GOOD, "row": [0, 0.5, 1], "other": object()})
    assert read == Example(
        many=3, step=0.5, word="a", text="", flag=False, maybe=None, either="none", row=(0.0, 0.5, 1.0)
    )
    assert Example.from_record({**GOOD, "step": 1, "flag": True, "maybe": 0, "either": 5}).step == 1.0


@for_rows(
    ("change", "complaint"),
    [
        ({"many": 0}, r"many is 0; expected an integer in \[1, 10\]"),
        ({"many": 11}, "many is 11; expected"),
        ({"many": 2.0}, "many is 2.0; expected an integer$"),
        ({"many": True}, "many is True; expected an integer$"),
        ({"many": "3"}, "many is '3'; expected an integer$"),
        ({"step": 0}, r"step is 0; expected a finite number in \(0, 1\]"),
        ({"step": math.nan}, "step is nan; expected"),
        ({"step": math.inf}, "step is inf; expected"),
        ({"step": 1 + 1e-9}, "step is 1.000000001; expected"),
        ({"step": "x" * 100_000}, "step is 'x{59}; expected a number$"),
        ({"word": "c"}, "word is 'c'; expected one of a, b"),
        ({"text": "x" * 4097}, "text has 4097 characters; expected at most 4096"),
        ({"flag": 1}, "flag is 1; expected true or false"),
        ({"maybe": -0.1}, "maybe is -0.1"),
        ({"maybe": None}, "maybe is None; expected a number"),
        ({"either": 6}, "either is 6"),
        ({"either": "some"}, "either is 'some'; expected one of none"),
        ({"row": [0.0] * 4}, "row must be a list of at most 3 entries"),
        ({"row": [0.0, math.nan]}, "row is nan"),
        ({"row": 0.5}, "row must be a list"),
    ],
)
def test_a_bad_value_is_rejected_by_name(change, complaint):
    with pytest.raises(RequestError, match=complaint):
        Example.from_record({**GOOD, **change})


@for_rows("key", GOOD)
def test_a_missing_value_has_no_default(key):
    with pytest.raises(RequestError, match=f"{key} is missing"):
        Example.from_record({name: value for name, value in GOOD.items() if name != key})


def test_the_configuration_of_a_run_is_read_and_every_field_is_needed():
    config = RunConfig({}).for_clients()
    read = ClientConfig.from_record(config)
    assert (read.training.lr, read.seed, read.clients_dir) == (config["lr"], None, None)
    assert read.to_record() == config
    for key in config.keys() - {"loss-bound", "strategy"}:
        with pytest.raises(RequestError, match=f"{key} is missing"):
            ClientConfig.from_record({name: value for name, value in config.items() if name != key})


@for_rows("verb", REQUESTS)
def test_a_request_is_read_as_it_was_sent_and_every_field_is_needed(verb):
    sent = {"round": 1, "record-plans": "[]", "cluster": 2, **OF_VERBS.get(verb, {})}
    request = REQUESTS[verb].from_record({**RunConfig({}).for_clients(), **sent})
    assert (request.message_type, request.round, request.cluster) == (verb, 1, 2)
    assert REQUESTS[verb].from_record(request.to_record()) == request
    assert sent.items() <= request.to_record().items()
    for key in sent.keys() - {"record-plans", "cluster", "release-counts"}:
        with pytest.raises(RequestError, match=f"{key} is missing"):
            REQUESTS[verb].from_record({name: value for name, value in sent.items() if name != key})


def test_what_is_out_of_bounds_is_not_sent():
    with pytest.raises(RequestError, match="penalty-weight is nan"):
        TrainRequest(penalty="proximal", penalty_weight=math.nan).to_record()
    with pytest.raises(RequestError, match="penalty-weight is missing"):
        TrainRequest(penalty="proximal")
    with pytest.raises(RequestError, match="penalty is missing"):
        TrainRequest(penalty_weight=1.0)
    with pytest.raises(TypeError, match="chose"):
        TrainRequest(chose=True)


def test_equal_messages_have_one_digest_wherever_data_and_device_are():
    config = {**RunConfig({}).for_clients(), **TrainRequest(round=1).to_record()}

    def of(verb="train", models=0.0, **changes):
        arrays = pack_models(np.full((1, 2), models, np.float32), Layout(("w",), ((2,),)))
        return digest(verb, RecordDict({"models": arrays, "config": ConfigRecord({**config, **changes})}))

    assert of() == of(device="cuda", **{"data-dir": "elsewhere"})
    assert len({of(), of("evaluate"), of(models=1.0), of(choice=True), of(round=2)}) == 5


@pytest.mark.parametrize("matrix", [[1.0], [0.5, 0.5, 0.25, 0.75]])
def test_a_redraw_matrix_is_square_and_stochastic(matrix):
    assert TrainRequest.from_record({**CONFIG, "redraw": matrix}).redraw == tuple(matrix)
    for wrong in ([*matrix, 0.5], [value / 2 for value in matrix]):
        with pytest.raises(RequestError, match="redraw is not a square matrix whose rows sum to 1"):
            TrainRequest.from_record({**CONFIG, "redraw": wrong})


@for_rows("text", ["", "{", "{}", "[]", "[1]", "[null]", '[{"rounds": 1}]', "[[[" * 10_000])
def test_plans_that_are_none(text):
    with pytest.raises(RequestError, match="record-plans"):
        parse_plans(text)
