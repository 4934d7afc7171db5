import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.client.state import KeptStates, StateFile, forget_states_after, write_states
from coterie.files import FileError


def own(value):
    return {"own": np.full(3, value, np.float32), "label": np.array([int(value)])}


def leave(states, number, values):
    """Write the states that a call of a round leaves, as the engine does."""
    states.begin(number)
    file = write_states(states.new_file(), {client: own(value) for client, value in values.items()})
    states.keep(file)
    return file


def values(states, clients):
    return [state["own"][0] if (state := states.of(client).read()) else None for client in clients]


def test_a_client_has_the_state_of_its_latest_call(tmp_path):
    states = KeptStates(tmp_path / "clients")
    assert values(states, range(2)) == [None, None]
    assert states.of(0).read() == {}
    leave(states, 1, {0: 1.0, 1: 2.0})
    leave(states, 2, {1: 3.0})
    for kept in (states, KeptStates(tmp_path / "clients")):
        assert values(kept, range(3)) == [1, 3, None]
        assert kept.of(1).read()["label"].tolist() == [3]
    assert (tmp_path / "clients").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "clients").iterdir())


def test_what_is_written_counts_once_the_call_has_ended(tmp_path):
    states = KeptStates(tmp_path)
    leave(states, 1, {0: 1.0})
    state = states.of(0)
    state.write(own(5.0))
    assert state.written["own"][0] == 5
    assert values(states, [0]) == [1]


def test_a_round_that_was_not_finished_leaves_nothing(tmp_path):
    killed = KeptStates(tmp_path)
    leave(killed, 1, {0: 1.0, 1: 1.0})
    left = leave(killed, 2, {0: 2.0})
    forget_states_after(tmp_path, 1)
    assert not left.exists()
    again = KeptStates(tmp_path)
    assert values(again, range(2)) == [1, 1]
    leave(again, 2, {1: 4.0})
    assert values(KeptStates(tmp_path), range(2)) == [1, 4]


def test_rounds_that_count_from_one_again_continue(tmp_path):
    for value in (1.0, 2.0):
        states = KeptStates(tmp_path)
        for number in (1, 2, 3):
            leave(states, number, {0: value + number, 1: value})
    assert values(KeptStates(tmp_path), range(2)) == [5, 2]
    assert len(list(tmp_path.iterdir())) <= 2


def test_calls_of_one_round_add_up(tmp_path):
    states = KeptStates(tmp_path)
    first, second = leave(states, 1, {0: 1.0}), leave(states, 1, {1: 1.0})
    assert first.exists()
    assert second.exists()
    assert values(states, range(2)) == [1, 1]


def test_former_states_take_no_more_room_than_latest_ones(tmp_path):
    states = KeptStates(tmp_path)
    latest, rng = {}, np.random.default_rng(0)
    for number in range(1, 60):
        changed = {int(client): float(number) for client in rng.choice(40, 4, replace=False)}
        latest |= changed
        leave(states, number, changed)
        stored = sum(len(np.unique([key.split("/")[0] for key in load_file(file)])) for file in tmp_path.iterdir())
        assert stored <= 2 * len(latest) + 2 * 4  # those of this round, and of the one before, come on top
    assert values(states, sorted(latest)) == [latest[client] for client in sorted(latest)]
    assert values(KeptStates(tmp_path), sorted(latest)) == [latest[client] for client in sorted(latest)]


def test_many_states_are_gathered_in_several_files(tmp_path):
    states = KeptStates(tmp_path)
    leave(states, 1, dict.fromkeys(range(600), 1.0))
    for number in (2, 3, 4):
        leave(states, number, dict.fromkeys(range(1, 600), float(number)))
    leave(states, 5, {0: 9.0})
    assert values(states, [0, 1, 599]) == [9, 4, 4]
    forget_states_after(tmp_path, 4)
    assert values(KeptStates(tmp_path), [0, 1, 599]) == [1, 4, 4]


def test_files_of_clients_hold_older_states(tmp_path):
    StateFile(tmp_path, 0).write(own(1.0))
    StateFile(tmp_path, 1).write(own(1.0))
    states = KeptStates(tmp_path)
    leave(states, 1, {1: 2.0, 2: 2.0})
    assert values(states, range(3)) == [1, 2, 2]
    leave(states, 2, {0: 3.0})
    KeptStates(tmp_path).as_client_files()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"client-{i}.safetensors" for i in range(3)]
    assert [StateFile(tmp_path, client).read()["own"][0] for client in range(3)] == [3, 2, 2]
    assert values(KeptStates(tmp_path), range(3)) == [3, 2, 2]


def test_a_folder_that_is_made_again_has_no_former_states(tmp_path):
    leave(KeptStates(tmp_path), 1, {0: 1.0})
    assert values(KeptStates(tmp_path), [0]) == [1]
    for file in tmp_path.iterdir():
        file.unlink()
    leave(KeptStates(tmp_path), 1, {0: 2.0})
    assert values(KeptStates(tmp_path), [0]) == [2]


def test_other_files_and_rounds_below_zero_are_of_no_matter(tmp_path):
    (tmp_path / "notes.states").write_text("mine")
    states = KeptStates(tmp_path)
    leave(states, -1, {0: 1.0})
    leave(states, 1, {1: 2.0})
    assert values(KeptStates(tmp_path), range(2)) == [1, 2]
    assert (tmp_path / "notes.states").exists()


def test_a_damaged_file_is_named_with_the_way_out(tmp_path):
    file = leave(KeptStates(tmp_path), 1, {0: 1.0})
    damaged = file.with_name("000000007-000000001-ab.states")
    damaged.write_bytes(file.read_bytes()[:20])
    with pytest.raises(FileError, match=rf"{damaged.name} cannot be read .*move it away"):
        KeptStates(tmp_path)
    damaged.unlink()
    assert values(KeptStates(tmp_path), [0]) == [1]
