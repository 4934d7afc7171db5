"""Clients whose data are tables: the schema of the owner counts, and what is wrong with a table stays there."""

import logging

import numpy as np
import pytest
from kit.deployed import reply_of, request_of
from kit.site_tables import AGE, OUTCOME, SEX

from coterie.client.answer import handle
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.datasets import own_shard
from coterie.server import RunConfig
from coterie.wire.messages import read_reply

SCHEMA = 'version = 1\nignore = ["id"]\n' + OUTCOME + AGE + SEX
SETTINGS = {"dataset": "own", "model": "linear", "device": "cpu", "strategy": "fedavg", "clients": 1, "seed": 3}
LINES = [f"{i},{i},{'fm'[i % 2]},{['alive', 'dead'][i // 2 % 2]}" for i in range(40)]


@pytest.fixture(autouse=True)
def _fresh():
    own_shard.cache_clear()


@pytest.fixture
def home(tmp_path):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "t.csv").write_text("\n".join(["id,age,sex,outcome", *LINES, ""]))
    return tmp_path


def configured(home, text=SCHEMA, **settings):
    (home / "of-the-run.toml").write_text(text)
    return RunConfig({**SETTINGS, "table-schema": str(home / "of-the-run.toml"), "privacy-unit": "none", **settings})


def question(home, text=SCHEMA, **settings):
    return request_of(configured(home, text, **settings))


def ask(content, home, **node):
    node = {"data": str(home / "t.csv"), "schema": str(home / "schema.toml"), **node}
    return reply_of({key: value for key, value in node.items() if value is not None}, content)


def update(content, layout):
    return read_reply(content, client_id=0, round=1, num_clusters=1, layout=layout).update


def test_a_deployed_client_reads_its_table_by_its_own_schema(home):
    content, layout = question(home)
    found = update(ask(content, home), layout)
    own_shard.cache_clear()
    (home / "client-0.csv").write_text((home / "t.csv").read_text())
    cells = [line.split(",") for line in LINES]
    german = ["id;age;sex;outcome", *(f"{i};{age},0;{sex};{outcome}" for i, age, sex, outcome in cells), ""]
    (home / "t.csv").write_text("\n".join(german))
    (home / "schema.toml").write_text(f'{SCHEMA}[file]\ndecimal = ","\n')  # its file, not the contract
    np.testing.assert_array_equal(update(ask(content, home), layout), found)
    content, _ = question(home, **{"data-dir": str(home)})
    own_shard.cache_clear()
    (simulated,) = handle("train", content, [Client(0)])
    np.testing.assert_array_equal(update(simulated, layout), found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mean = 50", "mean = 71.23"),
        ("scale = 10", "scale = 1e-6"),  # would isolate records near 50
        ("range = [0, 100]", "range = [89, 90]"),
        ('["f", "m"]', '["m", "f"]'),
        ('["f", "m"]', '["f", "P-1234"]'),
        ('["alive", "dead"]', '["dead", "alive"]'),
        ('name = "sex"', 'name = "postcode"'),
    ],
)
def test_a_run_with_another_schema_is_refused_before_the_data_are_touched(home, old, new):
    assert SCHEMA.count(old) == 1
    content, _ = question(home, SCHEMA.replace(old, new))
    (home / "t.csv").unlink()  # reading it would fail with another message
    with pytest.raises(
        ClientError,
        match=r"^client 0 rejects the request: it is for examples of 3 with 2 classes by schema [0-9a-f]{12}, but the "
        r"node configuration declares examples of 3 with 2 classes by schema [0-9a-f]{12}$",
    ):
        ask(content, home)


def test_schema_and_no_schema_exclude_each_other(home):
    content, _ = question(home)
    with pytest.raises(
        ClientError, match=r"reads tables by a schema, but the node configuration declares none; set sch"
    ):
        ask(content, home, schema=None)
    with pytest.raises(ClientError, match=r"by schema .*declares examples of 3 with 2 classes$"):
        ask(content, home, schema=None, **{"input-shape": "3", "num-classes": 2})
    content["config"]["table-schema"] = ""
    with pytest.raises(ClientError, match=r"it is for examples of 3 with 2 classes, but .* by schema"):
        ask(content, home)
    content["config"]["table-schema"] = "{" * 10_000
    with pytest.raises(ClientError, match="client 0 rejects the request: table-schema: is not valid TOML"):
        ask(content, home)
    content["config"]["table-schema"] = "x" * 2**21
    with pytest.raises(ClientError, match="table-schema has 2097152 characters"):
        ask(content, home)


def test_a_budget_needs_a_declaration_and_a_schema_is_one(home, caplog):
    content, layout = question(home)
    budget = {"epsilon": 8.0, "delta": 1e-3, "state-dir": str(home / "state")}
    shape = {"input-shape": "3", "num-classes": 2}
    for node, reason in (
        ({"schema": None, **budget}, "epsilon requires input-shape and num-classes, or schema"),
        (shape, "schema declares shape and classes: leave out input-shape"),
        ({"schema": "schema.toml"}, "schema must be an absolute path"),
    ):
        with pytest.raises(ClientError, match="the node configuration has errors; see the client's own log"):
            ask(content, home, **node)
        assert reason in caplog.text
    level = {"privacy-unit": "record", "samples-per-client": 30, "delta": 1e-3, "seed": "auto", "rounds": 2}
    content, layout = question(home, **level)
    assert np.any(update(ask(content, home, **budget), layout))


def test_errors_of_the_owner_s_schema_do_not_leave_the_client(home, caplog):
    content, _ = question(home)
    (home / "schema.toml").write_text("Anna Kowalska = 17")
    with pytest.raises(ClientError) as refusal:
        ask(content, home)
    assert str(refusal.value) == "the node configuration has errors; see the client's own log"
    with pytest.raises(ClientError, match="the node configuration has errors"):
        ask(content, home, schema=str(home / "t.csv"))
    assert "is not valid TOML" in caplog.text


def test_what_is_wrong_with_a_table_is_in_the_client_s_log_alone(home, caplog):
    caplog.set_level(logging.INFO, "flwr")
    content, layout = question(home)
    clean = ask(content, home)
    own_shard.cache_clear()
    with (home / "t.csv").open("a") as file:
        file.write("40,secret,f,alive\n41,55,x,alive\n")
    spoiled = ask(content, home)
    np.testing.assert_array_equal(update(spoiled, layout), update(clean, layout))
    assert spoiled["reply"] == clean["reply"]  # no count, no text
    assert "the first problem is: " in caplog.text
    assert "secret" in caplog.text
    own_shard.cache_clear()
    with (home / "t.csv").open("a") as file:
        file.write("42,777,f,alive\n")
    clamped = ask(content, home)
    assert set(clamped) == {"update", "reply"}
    assert clamped["reply"] == clean["reply"]
    assert "column 'age': above 100, 1 record clamped by rule, such as row 44 (777)" in caplog.text
    own_shard.cache_clear()
    (home / "t.csv").write_text("id,age,outcome\n1,50,alive\n")
    with pytest.raises(ClientError) as refusal:
        ask(content, home)
    assert str(refusal.value) == "client 0 failed; see its own log for details"
    assert "has no column 'sex'" in caplog.text


def test_plainly_unscaled_features_are_warned_of_at_the_client(home, caplog):
    text = SCHEMA.replace("scale = 10", "scale = 0.1").replace("range = [0, 100]", "")
    (home / "schema.toml").write_text(text)
    content, layout = question(home, text)
    warned = ask(content, home)
    assert "client 0: feature 'age' reaches 500; training needs numbers of about [-3, 3]" in caplog.text
    assert set(warned) == {"update", "reply"}
    assert not any("age" in str(value) for value in warned["reply"].values())
    assert len(layout.names) == 2
