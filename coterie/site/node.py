"""The configuration of a client's node: its data, its identity, and its privacy budget."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from coterie.fields import (
    COUNT,
    EPSILON,
    GUARANTEES,
    MASKED_SUMS,
    MAX_COHORT,
    PERSONAL_METHODS,
    RECORD_LEVEL,
    SIZE,
    TRUSTED_SERVER,
    Bounds,
    Fields,
    OneOf,
    key_of,
)
from coterie.site.errors import DeployError

# Values of the setting `task`.
_TASKS = ("multi-class", "binary", "multi-label", "regression")
#: Environment variable of the process of a message: SHA-256 of the app that runs, in hexadecimal.
APP_HASH = "COTERIE_APP_HASH"
#: Least number of clients in a masked round, unless a node configuration states another one.
MIN_COHORT = 10


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Fields):  # large: one field per key
    """What the owner of a client's data writes into the node configuration; the server cannot read or change it.

    Attributes:
        client_id: id of the client, 0 to the number of clients - 1.
        state_dir: folder of its state; None: it keeps none.
        guarantee: what it gives to a server at all (:data:`~coterie.wire.guarantees.ANSWERS`); None: what
            :attr:`declared_guarantee` infers.
        data: its data, a folder or a file; None: those of the run.
        epsilon: its privacy budget over all runs; None: that of each run's plan.
        delta: of the budget.
        diagnostics: whether the client may be evaluated exactly, outside its guarantee; a trusted server always may.
        input_shape: declared shape of an example, such as `1x28x28`, or `16`.
        num_classes: declared number of classes, or of labels; 0 for real targets.
        task: declared task, as the setting `task`; None: classes or real targets, or that of the schema.
        value_range: minimum and maximum to which vectors are clamped, such as `0:1`.
        columns: names of the features of its table without a schema, in order; None: those of the run.
        pretrained: file of the public initial parameters of runs that start from some; None: it takes part in none of
            them.
        schema: file with the schema of its table, which declares shape and classes.
        budget_file: file that records its privacy spending; None: beside the data.
        policy: file that states what its owner consents to (:mod:`coterie.site.policy`); None: everything.
        roster: file of who is who, by which signed requests for runs are verified; None: they are not.
        authority: certificate of the authority that has signed the roster; None: ca.crt beside it.
        key: file with the private key of the node, which signs the client's keys for masked rounds once; coterie client
            sets it if there is a roster.
        min_cohort: least number of clients in a masked round; None: :data:`MIN_COHORT`.
        min_corrupt: least number of clients that may work with the server for which a masked round has noise; None: 0.
        server: address and authority of the server, for the client's records; coterie client sets it.
        code: names of objects of users (data sets, networks, training) that a server may choose.
        personalize: how it fits released models to its own records, for a model of its own that stays in its state
            folder; None: not at all.
        local_report: whether it writes how good each received model is on its held-out records, to a file of its state
            folder that is never sent.
        reply_seconds: least time of a reply, so that its time reveals less.

    Raises:
        DeployError: a value is out of bounds, or fields contradict each other.
    """

    error = DeployError

    client_id: Annotated[int, SIZE]
    state_dir: str | None = None
    guarantee: Annotated[str | None, OneOf(GUARANTEES)] = None
    data: str | None = None
    epsilon: Annotated[float | None, EPSILON] = None
    delta: Annotated[float | None, Bounds(0, 1, above=True, below=True)] = None
    diagnostics: bool = False
    input_shape: str | None = None
    num_classes: Annotated[int | None, Bounds(0, COUNT.high)] = None
    task: Annotated[str | None, OneOf(_TASKS)] = None
    value_range: str | None = None
    columns: str | None = None
    pretrained: str | None = None
    schema: str | None = None
    budget_file: str | None = None
    policy: str | None = None
    roster: str | None = None
    authority: str | None = None
    key: str | None = None
    min_cohort: Annotated[int | None, Bounds(3, MAX_COHORT)] = None
    min_corrupt: Annotated[int | None, Bounds(0, MAX_COHORT)] = None
    server: str | None = None
    code: str | None = None
    personalize: Annotated[str | None, OneOf(PERSONAL_METHODS)] = None
    local_report: bool = False
    reply_seconds: Annotated[float | None, Bounds(0, 1e6)] = None

    def __post_init__(self) -> None:
        self.to_record()
        shape, classes = self.input_shape is not None, self.num_classes is not None
        budget = self.epsilon is not None or self.delta is not None
        rules = {
            "epsilon and delta form one budget: set both or neither": (self.epsilon is None) != (self.delta is None),
            f"guarantee = {MASKED_SUMS} requires roster and state-dir, by which the client has keys to mask with; set "
            f"them, or guarantee = {RECORD_LEVEL} with epsilon and delta, or guarantee = {TRUSTED_SERVER}": (
                self.guarantee == MASKED_SUMS and not self._has_masking_keys
            ),
            f"guarantee = {RECORD_LEVEL} requires epsilon and delta, the budget of its records; set them, or guarantee "
            f"= {TRUSTED_SERVER} if the server may choose the privacy of a run": (
                self.guarantee == RECORD_LEVEL and not budget
            ),
            f"guarantee = {TRUSTED_SERVER} and epsilon contradict each other: no budget covers exact values; leave out "
            f"epsilon and delta, or set guarantee = {RECORD_LEVEL}": self.guarantee == TRUSTED_SERVER and budget,
            f"roster and state-dir imply guarantee = {MASKED_SUMS}, and epsilon and delta imply {RECORD_LEVEL}: set "
            "guarantee to that which the budget is for": (self.guarantee is None and budget and self._has_masking_keys),
            "input-shape and num-classes declare the data: set both or neither": shape != classes,
            "schema declares shape and classes: leave out input-shape, num-classes and value-range": (
                self.schema is not None and (shape or classes or self.value_range is not None)
            ),
            "task declares the data beside input-shape; leave it out with a schema": (
                not shape and self.task is not None
            ),
            "value-range requires input-shape and num-classes": self.value_range is not None and not shape,
            "columns requires input-shape and num-classes": self.columns is not None and not shape,
            "epsilon requires input-shape and num-classes, or schema: without them, a server could infer the shape of "
            "the data from rejected requests": bool(self.epsilon and self.data and not shape and not self.schema),
        }
        names = ("data", "pretrained", "schema", "budget_file", "policy", "roster", "authority", "key")
        paths = {key_of(name): getattr(self, name) for name in names}
        relative = [key for key, path in paths.items() if path is not None and not os.path.isabs(path)]
        broken = [problem for problem, applies in rules.items() if applies]
        for problem in broken + [f"{key} must be an absolute path" for key in relative]:
            raise DeployError(problem)

    @property
    def declaration(self) -> tuple[str | None, str | None, int | None, str | None, str | None, str | None]:
        """What it declares about the data: schema, shape, number of classes, range, columns and task."""
        return self.schema, self.input_shape, self.num_classes, self.value_range, self.columns, self.task

    @property
    def _has_masking_keys(self) -> bool:
        return self.roster is not None and self.state_dir is not None

    @property
    def declared_guarantee(self) -> str | None:
        """What the client gives to a server at all; None: nothing, since its owner has not declared it.

        Without ``guarantee``, the keys for masked rounds that follow from ``roster`` and ``state_dir`` declare masked
        sums, and a budget declares record level. Nothing but ``guarantee`` itself declares that the server is trusted.
        """
        implied = {MASKED_SUMS: self._has_masking_keys, RECORD_LEVEL: self.budget is not None}
        return self.guarantee or next((guarantee for guarantee, holds in implied.items() if holds), None)

    @property
    def budget(self) -> tuple[float, float] | None:
        """Epsilon and delta; None: no budget."""
        return None if self.epsilon is None or self.delta is None else (self.epsilon, self.delta)
