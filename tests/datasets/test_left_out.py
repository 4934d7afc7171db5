"""The account of what is left out of a client's data."""

import json
import re

from kit.tables import for_rows

from coterie.datasets.left_out import LeftOut, Loss, unequal_losses


def test_losses_of_one_reason_are_one_line():
    losses = [
        Loss("unsupported file type .dcm", "file", examples=(f"1/{i}.dcm",), classes={"1": 1}) for i in range(1200)
    ]
    account = LeftOut.of(
        [*losses, Loss("missing", count=3, examples=("row 4",)), Loss("above 9", effect="clamped", classes={"0": 1})]
    )
    assert [str(loss) for loss in account.losses] == [
        "unsupported file type .dcm, 1,200 files left out (1,200 of class 1), such as 1/0.dcm, 1/1.dcm, 1/2.dcm",
        "missing, 3 records left out, such as row 4",
        "above 9, 1 record clamped (1 of class 0)",
    ]
    assert (account.records, account.files, account.classes) == (3, 1200, {"1": 1200})
    assert str(account) == "3 records and 1,200 files"


def test_nothing_is_left_out():
    assert not LeftOut()
    assert LeftOut.of([Loss("above 9", effect="clamped")])  # something happened to a record
    assert str(LeftOut()) == "nothing"
    assert LeftOut.of([]) == LeftOut() + LeftOut() == LeftOut()


def test_a_record_with_several_losses_counts_once():
    losses = [Loss("column 'a': missing", count=5), Loss("column 'b': missing", count=5)]
    account = LeftOut.of(losses, records=5, classes={"sick": 5})
    assert (account.records, account.classes) == (5, {"sick": 5})
    twice = account + account
    assert (twice.records, twice.classes, [loss.count for loss in twice.losses]) == (10, {"sick": 10}, [10, 10])


def test_a_sum_merges_reasons_and_keeps_the_first_examples():
    one, other = (LeftOut.of([Loss("missing", count=2, examples=(f"{part} row 2",))]) for part in ("train", "test"))
    assert [str(loss) for loss in (one + other).losses] == [
        "missing, 4 records left out, such as train row 2, test row 2"
    ]


def test_json_states_all_of_it():
    account = LeftOut.of([Loss("missing", count=2, examples=("row 2",), classes={"a": 2})])
    loss = {"reason": "missing", "unit": "record", "count": 2, "effect": "left out", "examples": ["row 2"]}
    losses = [loss | {"classes": {"a": 2}, "by-rule": False}]
    stated = {"records": 2, "files": 0, "classes": {"a": 2}, "losses": losses}
    assert json.loads(json.dumps(account.to_json())) == stated


@for_rows(
    ("kept", "lost", "warns"),
    [
        ({"healthy": 35, "sick": 94}, {"healthy": 65, "sick": 6}, "65 of 100 of class healthy .* and 6 of 100 of"),
        ({"0": 12, "1": 12}, {"1": 40}, "40 of 52 of class 1 are left out, and 0 of 12 of class 0;"),
        ({"0": 100}, {"1": 100}, "100 of 100 of class 1"),  # all of one class
        ({"0": 50, "1": 50}, {"0": 50, "1": 50}, ""),
        ({"0": 8, "1": 8}, {"1": 2}, ""),  # too few to tell
        ({"0": 1000, "1": 1000}, {"1": 20}, ""),  # too small a share
        ({"0": 100}, {"0": 100}, ""),  # one class alone
        ({}, {}, ""),
        ({"0": 0, "1": 4}, {}, ""),
    ],
)
def test_a_warning_where_losses_differ_between_classes(kept, lost, warns):
    assert re.search(warns or "^$", unequal_losses(kept, lost))
