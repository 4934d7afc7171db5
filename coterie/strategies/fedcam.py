"""FedCAM: clustered additive modelling, on IFCA.

J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang: Structured Federated Learning through Clustered Additive Modeling,
NeurIPS 2023, Algorithm 1 (IFCA-CAM). A base of RR-Cluster (papers/rr_cluster, Table 1) with a plan of
``rebalance_min = B``.

     1  input: global model Theta_g, cluster models theta_j, j in [k]
     2  for t = 1, ..., T do
     3      server: broadcast Theta_g and all theta_j
     4      for client i in the cohort in parallel do
     5          c_i <- argmin_j loss of the prediction  y = h(x; Theta_g) + h(x; theta_j)  on its data
     6          train Theta_g and theta_(c_i) so that the *sum* of their outputs fits
     7          send both updates and c_i
     8      server: Theta_g <- mean of all global updates; theta_j <- mean of the updates of its members

Deviations from the paper
- Line 6 trains both parts jointly; the paper alternates between them, with a warm-up of the global part.
- Both updates are clipped jointly to norm C, as one vector with one charge. The global block is summed over the whole
  cohort and receives noise once, with the same standard deviation as a cluster block.
- Divisors: qM for the global block, D_j for a cluster block (see ifca.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from coterie.strategies.ifca import IFCA
from coterie.strategies.method import Models, Parameters, Round
from coterie.wire import EvaluateRequest, TrainRequest

# Prefixes of parameter names.
_GLOBAL, _CLUSTER = "global.", "cluster."


class FedCAM(IFCA):
    """A global and a cluster model whose outputs are added.

    ``initial_arrays`` of ``start`` hold ``global.*`` first, then ``cluster.*``; all rows of models share ``global.*``.
    """

    name: ClassVar[str] = "fedcam"
    title: ClassVar[str] = "the outputs of a global and a cluster's model are added, optional rebalancing"
    paper: ClassVar[str] = "Ma et al. 2023; RR-Cluster, Algorithm 1"
    row_wise: ClassVar[bool] = True
    finds_clusters: ClassVar[bool] = False
    searches: ClassVar[bool] = False

    @property
    def shared(self) -> int:
        """Size of the global block."""
        sizes = zip(self.layout.names, self.layout.sizes, strict=True)
        return sum(size for name, size in sizes if name.startswith(_GLOBAL))

    def round(self, number: int, models: Models) -> Round:
        """Lines 3 to 8."""
        released = yield from self.sums(self.training(), models)  # lines 3-7; 5-7 are client/handlers.py::_train
        return self.step(models, released)  # line 8

    def initial_models(self, models: Models) -> Models:
        """Line 1: one global part for all clusters."""
        every = super().initial_models(models)
        every[:, : self.shared] = every[0, : self.shared]
        return every

    def initial_parameters(self, draw: Callable[[], Parameters]) -> Parameters:
        """Line 1: both parts."""
        return {prefix + name: values for prefix in (_GLOBAL, _CLUSTER) for name, values in draw().items()}

    def training(self) -> TrainRequest:
        """Lines 5 and 6: the network is a sum."""
        return TrainRequest(additive=True)

    def evaluation(self) -> EvaluateRequest:
        """The same network."""
        return EvaluateRequest(additive=True)
