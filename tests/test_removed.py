"""Names of earlier versions are refused in one line that says what to use."""

import re
from pathlib import Path

import pytest
import torch

from coterie.datasets import SchemaError, TableSchema
from coterie.fields.removed import REMOVED
from coterie.server import ConfigError, RunConfig
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.testing import check_loss

SURVIVAL = 'version = 1\n[survival]\ntime = "t"\n[[columns]]\nname = "a"\ntype = "number"\nmean = 0\nscale = 1\n'


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: RunConfig({"time-bins": "1,2"}), "time-bins"),
        (lambda: RunConfig({"data": {"time-bins": "1,2"}}), "time-bins"),
        (lambda: RunConfig({"task": "survival"}), "task = survival"),
        (lambda: NodeConfig(client_id=0, task="survival"), "task = survival"),
        (lambda: TableSchema.parse(SURVIVAL), "[survival]"),
    ],
)
def test_a_removed_name_is_refused(use, name):
    with pytest.raises((ConfigError, DeployError, SchemaError), match=re.escape(REMOVED[name])) as raised:
        use()
    assert f"{name} was removed: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_documented_loss_is_the_likelihood_of_censored_times():
    page = (Path(__file__).parents[1] / "docs" / "networks.md").read_text()
    code = re.search(r"^## Times until an event.*?```python\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(code[1], names)
    check_loss(names["exponential"], num_classes=0)
    rate, time = torch.tensor([0.5, 0.5]), torch.tensor([3.0, -3.0])
    times = torch.distributions.Exponential(rate[0])
    wanted = torch.stack([-times.log_prob(torch.tensor(3.0)), -torch.log(1 - times.cdf(torch.tensor(3.0)))])
    torch.testing.assert_close(names["exponential"](rate.log(), time), wanted)
