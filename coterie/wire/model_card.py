"""The card of a trained model: what it expects and what it cost in privacy. It is stored inside the model's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from coterie.fields import MAX_SCHEMA, ROUNDS, Bounds, Fields, Length, OneOf
from coterie.models.adapters import NO_ADAPTERS
from coterie.models.spec import NetworkSpec
from coterie.tasks import NAMES, WEIGHTS

# Longest JSON text of a card, and most entries of a list in it.
_MAX_TEXT, _MAX_NAMES = 1 << 24, 100_000
#: Name of the file of a network's constants, beside the files of its models.
CONSTANTS_FILE = "constants.safetensors"
#: Largest number of values of an example.
MAX_EXAMPLE = 1 << 24


class CardError(ValueError):
    """The metadata of a model file are no card."""


@dataclass(frozen=True, kw_only=True)
class ModelCard(Fields):  # large: one field per key
    """What a model expects, how it was trained, and what it cost in privacy.

    Attributes:
        strategy: the method.
        dataset: the data set.
        model: name of the network, or ``module:function``.
        adapters: adapters of the network, as the setting of this name; None: there are none.
        frozen: layers and parameters that are frozen, as the setting of this name; None: those of the model.
        pretrained: SHA-256 of the file of initial parameters, hexadecimal; None: there is none.
        trainable_parameters: number of numbers of the network that train; None: the method trains no model.
        parameters: number of all numbers in its parameters.
        features: name of the fixed features that precede the network.
        kind: "images", "vectors" or "tokens".
        shape: shape of an example, before the features.
        num_classes: number of classes; 0 for real targets.
        task: what it predicts, if not classes or numbers without a schema; None: these, or what the schema says.
        weights: factors of the loss, of each class or positive label; None: 1.
        cluster: index of this model; 0 if the method clusters records.
        clusters: number of clusters; each has a model unless the method clusters records.
        additive: whether the network is the sum of a global and a cluster's network (FedCAM).
        constants: SHA-256 of the frozen parameters and buffers, which the function ``model`` builds, hexadecimal; None:
            there are none.
        encoder: name of the encoder if the method clusters records; None if it trains models.
        columns: names of the features of a table, in order; None: unknown.
        table_schema: schema by which tables are read, as text; None: their columns are the features.
        classes: names of the classes, in order; None: they are numbers.
        scaling: how records are scaled before the features, in words.
        rounds: rounds of training.
        unit: privacy unit, "client", "record" or "none".
        epsilon: privacy loss; None: unbounded.
        delta: the δ of ``epsilon``; None without privacy.
        certified: whether the run is certified.
        certificate: SHA-256 of the run's privacy.json, hexadecimal.
        version: version of Coterie.
    """

    error = CardError

    strategy: str
    dataset: str
    model: str
    adapters: str | None = None
    frozen: str | None = None
    pretrained: Annotated[str | None, Length(64)] = None
    trainable_parameters: Annotated[int | None, Bounds(0, 1 << 53)] = None
    parameters: Annotated[int | None, Bounds(0, 1 << 53)] = None
    features: str
    kind: Annotated[str, OneOf(("images", "vectors", "tokens"))]
    shape: Annotated[tuple[int, ...], Bounds(1, MAX_EXAMPLE), Length(3)]
    num_classes: Annotated[int, Bounds(0, MAX_EXAMPLE)]
    task: Annotated[str | None, OneOf(NAMES)] = None
    weights: Annotated[tuple[float, ...] | None, Bounds(*WEIGHTS), Length(MAX_EXAMPLE)] = None
    cluster: Annotated[int, Bounds(0, 1_000_000)]
    clusters: Annotated[int, Bounds(1, 1_000_000)]
    additive: bool = False
    constants: Annotated[str | None, Length(64)] = None
    encoder: str | None = None
    columns: Annotated[tuple[str, ...] | None, Length(_MAX_NAMES)] = None
    table_schema: Annotated[str | None, Length(MAX_SCHEMA)] = None
    classes: Annotated[tuple[str, ...] | None, Length(_MAX_NAMES)] = None
    scaling: str
    rounds: Annotated[int, Bounds(0, ROUNDS.high)]
    unit: Annotated[str, OneOf(("client", "record", "none"))]
    epsilon: Annotated[float | None, Bounds(0, 1e300)] = None
    delta: Annotated[float | None, Bounds(0, 1)] = None
    certified: bool = False
    certificate: Annotated[str, Length(64)]
    version: str

    @property
    def network(self) -> NetworkSpec:
        """The model, and what of it trained."""
        return NetworkSpec(self.model, self.adapters or NO_ADAPTERS, self.frozen or "")

    def to_json(self) -> dict[str, Any]:
        """Return the card as stored."""
        return self.to_record()

    @classmethod
    def parse(cls, text: str) -> ModelCard:
        """Read a card, which may come from anyone.

        Raises:
            CardError: the text is not a card, or a value is out of bounds.
        """
        try:
            record = json.loads(text) if len(text) <= _MAX_TEXT else None
            if not isinstance(record, dict):
                raise CardError("it is not a JSON object")
            return cls.from_record(record)
        except (ValueError, RecursionError) as error:
            raise CardError(str(error)) from None


def scaling_of(kind: str) -> str:
    """Describe how records of a kind are scaled, whatever the run."""
    if kind == "images":
        return "pixels 0..255, or fractions in [0, 1], to [-1, 1]"
    return "none"
