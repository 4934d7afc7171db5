"""A short campaign over every strategy and verb; and each check that protects a run is missed when it is gone."""

import numpy as np
import pytest
from campaign import Campaign
from federations import EVALUATION, SETTINGS, TRAINING

from coterie.privacy import RecordLevel, contributions
from coterie.rounds import batches, evaluation, phases
from coterie.strategies.registry import STRATEGIES
from coterie.wire import REQUESTS, EvaluationReply, messages

pytestmark = pytest.mark.timeout(300)

#: One setting of each strategy, and each privacy unit, mechanism and kind of evaluation once.
SOME = [
    *("fedavg", "fedavg library metrics", "fedavg private evaluation", "fedprox joint", "fedper", "local"),
    *(
        "ifca joint",
        "ifca rr-slot",
        "rr-cluster",
        "fesem joint",
        "fedcam joint",
        "rc-dpfl",
        "f-cdpfl",
        "km-cdpfl",
        "oracle record",
    ),
    *("lcfl", "cfl", "ppfc-gan", "kfed", "ffcm"),
]


def test_every_strategy_has_a_setting():
    assert {name.split()[0] for name in SETTINGS} == set(STRATEGIES)
    assert {name.split()[0] for name in SOME} == set(STRATEGIES)


@pytest.mark.parametrize(("half", "replies"), [(0, 100), (1, 200)])  # the second half has all verbs
def test_replies_that_are_changed_end_no_run_and_none_is_accepted_that_is_invalid(half, replies):
    report = Campaign(seed=0, settings=SOME[half::2]).run(replies)
    assert report.findings == []
    assert dict(report.unexplained) == {}
    assert report.mutated == replies
    verbs = {verb for _, verb in report.tallies}
    assert half == 0 or verbs == {*REQUESTS, "query.identity"}
    counts = {verb: [t.row() for (_, of), t in report.tallies.items() if of == verb] for verb in verbs}
    for verb, rows in counts.items():
        mutated, invalid, _, accepted, _, compared, _ = np.sum(rows, axis=0)
        assert mutated > invalid > 0, verb
        assert accepted > 0, verb
        assert compared > 0, verb


def test_the_same_seed_gives_the_same_cases():
    first, second, other = (Campaign(seed, ["kfed"]).run(15) for seed in (3, 3, 4))
    assert dict(first.tallies) == dict(second.tallies)
    assert dict(first.tallies) != dict(other.tallies)


# ---- the campaign notices when a check is gone -----------------------------------------------------------------------


def without(complaint):
    """Reads replies as the strategies do, but for this one complaint."""

    def read(content, *, client_id, layout, **request):
        try:
            return messages.read_reply(content, client_id=client_id, layout=layout, **request)
        except messages.ReplyError as error:
            if complaint not in str(error):
                raise
        values = [np.full(size, np.nan, np.float32) for size in layout.sizes]
        return messages.Reply(client_id, 0, 0, np.concatenate(values))

    return read


def as_it_came(update, clip_norm):
    return np.array(update, np.float64)


REPLIES = ["NaN or Inf", "label is", "round is", "expected float32", "parameters are"]
GONE = {
    **{complaint: (phases, "read_reply", without(complaint), "fedavg", "though invalid") for complaint in REPLIES},
    "clipping": (contributions, "clip_to_unit", as_it_came, "fedavg joint", "models moved by"),
    "norms": (RecordLevel, "max_update_norm", lambda *_: np.inf, "oracle record", "though invalid"),
    "numbers of points": (messages.PointsSpec, "check", lambda *_: None, "kfed", "though invalid"),
    "clusters and groups": (EvaluationReply, "check", lambda *_: None, "oracle", "though invalid"),
    "senders of labels": (evaluation, "check_sender", lambda *_, **__: None, "ffcm", "though invalid"),
    "errors": (phases, "parse", lambda read, content, **context: read(content, **context), "kfed", "crash"),
    "texts": (batches, "printable", lambda text, most=200: str(text), "fedavg", "reason"),
}


@pytest.mark.parametrize("check", GONE)
def test_a_check_that_is_gone_is_found(check, monkeypatch):
    owner, name, instead, setting, what = GONE[check]
    monkeypatch.setattr(owner, name, instead)
    kind = EVALUATION if check in ("clusters and groups", "senders of labels") else TRAINING
    report = Campaign(0, [setting], [kind]).run(1000 if check == "errors" else 250, until=what)
    assert any(what in problem for *_, problem in report.findings)
