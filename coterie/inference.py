"""Use trained models: load them, predict, assign new records to a cluster, export.

Everything here runs on this machine and reads nothing but the given files, so it has no privacy cost.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from coterie import models as networks
from coterie.client.cohort import OWN
from coterie.client.layers import Additive
from coterie.client.personal import personalised
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.state import ClientError, KeptStates
from coterie.datasets import DataError, Facts, Shard, TableSchema, TestSet
from coterie.datasets.local_files import LocalRecords, local_records
from coterie.fields import PERSONAL_METHODS, key_of
from coterie.fields.settings import ConfigError, flat
from coterie.files import FileError, open_regular
from coterie.models import merged
from coterie.models.errors import few
from coterie.models.settings import TrainingSettings
from coterie.results import Outcome, read_config
from coterie.tasks import Measure, Performance, Task, TaskError, named_task
from coterie.wire.messages import Layout
from coterie.wire.model_card import CONSTANTS_FILE, MAX_EXAMPLE, CardError, ModelCard

# Examples per forward pass; bounds memory.
_CHUNK = 1024
# Classes in one message.
_SHOWN_CLASSES = 10
_ABOUT = "about"


class InferenceError(RuntimeError):
    """Models cannot be loaded or used as asked; the message states why."""


@dataclass(frozen=True)
class Assignment:
    """How well each model fits records.

    Attributes:
        cluster: the model with the smallest mean loss.
        losses: (k,) mean loss of each model: cross entropy, or squared error for real targets.
        records: number of records.
    """

    cluster: int
    losses: tuple[float, ...]
    records: int


class TrainedModels(Sequence[nn.Module]):
    """The models of a run, one per cluster, in evaluation mode. Use :func:`load`.

    A module maps prepared examples, as :meth:`read` returns them, to (n, num_classes) logits; to (n,) numbers for real
    targets; or, if the method clusters records, to (n, clusters) scores.

    Args:
        folder: the folder of the model files.
        cards: the card of each model.
        modules: the models.
        sites: cluster of each client of the run, as far as it is known.
    """

    def __init__(
        self, folder: Path, cards: Sequence[ModelCard], modules: Sequence[nn.Module], sites: Mapping[int, int]
    ) -> None:
        self.folder, self.cards, self.sites = folder, tuple(cards), dict(sites)
        self._modules = tuple(modules)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        """Return the model of a cluster."""
        return self._modules[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    @property
    def card(self) -> ModelCard:
        """The card of the first model; the others differ in ``cluster`` only."""
        return self.cards[0]

    @property
    def clusters_records(self) -> bool:
        """Whether the method clusters records, so that there is one module, which labels them."""
        return self.card.encoder is not None

    @cached_property
    def schema(self) -> TableSchema | None:
        """The schema by which the models' tables are read; None without one.

        Raises:
            SchemaError: the text in the card is not a schema.
        """
        return TableSchema.parse(self.card.table_schema) if self.card.table_schema else None

    def read(
        self, file: str | Path, schema: str | Path | None = None, *, ids: str | None = None, held_out: bool = False
    ) -> LocalRecords:
        """Read records and prepare them for the models; labels may be missing.

        Args:
            file: an archive, a table or a folder of images, in the formats of a client's own data. If the run has a
                schema, a table in the units of the schema.
            schema: a file of the same schema that describes how this table is written; None: as those of the run.
            ids: column that names each record, or its patient; only of a table with a schema.
            held_out: read only the records on which a client with this file tests.

        Raises:
            DataError: the file cannot be read, or a record does not match the models.
            InferenceError: the schema is another one than the models'.
        """
        card, table_schema = self.card, self.schema
        if schema is not None:
            given = TableSchema.load(schema)
            if table_schema is None or given.fingerprint != table_schema.fingerprint:
                raise InferenceError(f"{schema} is not the schema of these models; only [file] and ignore may differ")
            table_schema = given
        columns = None if table_schema else card.columns
        facts = Facts(card.kind, card.shape, self.task, table_schema, columns=columns)
        return local_records(Path(file), facts, networks.features(card.features), ids, held_out=held_out)

    @cached_property
    def task(self) -> Task:
        """What the models predict.

        Raises:
            TaskError: the card contradicts itself.
        """
        task = self.schema.task if self.schema else named_task(self.card.task or "auto", self.card.num_classes)
        weights, outputs = self.card.weights or (), self.card.num_classes
        if task.num_outputs != outputs or len(weights) not in (0, outputs):
            raise TaskError(f"{outputs} outputs and {len(weights)} weights, but {task}")
        return replace(task, weights=weights)

    def outputs(self, x: npt.NDArray[Any], cluster: int) -> npt.NDArray[np.float32]:
        """Return the outputs of one model for (n, ...) prepared examples.

        Raises:
            InferenceError: there is no such cluster.
        """
        if not 0 <= cluster < len(self):
            some = "there is one model, of cluster 0" if len(self) == 1 else f"clusters are 0 to {len(self) - 1}"
            raise InferenceError(f"cluster {cluster} does not exist: {some}")
        module = self._modules[cluster]
        with torch.no_grad():
            parts = [module(chunk) for chunk in torch.split(torch.as_tensor(x), _CHUNK)] if len(x) else []
        return np.asarray(torch.cat(parts).float().numpy() if parts else np.zeros((0, 0), np.float32))

    def predict(self, x: npt.NDArray[Any], cluster: int) -> npt.NDArray[Any]:
        """Return the (n,) predicted classes, or numbers for real targets, of prepared examples.

        If the method clusters records, the "class" is the record's cluster.

        Raises:
            InferenceError: there is no such cluster.
        """
        outputs = self.outputs(x, cluster)
        return np.asarray(outputs.argmax(axis=1)) if self.clusters_records else self.task.predicted(outputs)

    def positive(self, name: str | None = None) -> int | None:
        """Return the class whose probability is compared with a threshold, by its name; None: there is none.

        Without a name, it is the second of two classes.

        Raises:
            InferenceError: there is no such class.
        """
        if name is None:
            return 1 if self.task.num_classes == 2 else None
        if not self.task.num_classes or self.clusters_records:
            raise InferenceError(f"positive is {name!r}, but the models do not predict classes")
        if name not in self.class_names:
            raise InferenceError(f"positive is {name!r}; the classes are {few(self.class_names, _SHOWN_CLASSES)}")
        return self.class_names.index(name)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; its number where the card has none."""
        return tuple(self.card.classes or map(str, range(self.card.num_classes)))

    def evaluate(
        self,
        records: LocalRecords,
        cluster: int,
        *,
        positive: str | None = None,
        threshold: float | None = None,
        weights: npt.NDArray[np.float64] | None = None,
    ) -> Performance:
        """Return the metrics of a model on labelled records, those of real targets in the unit of the table.

        They are exact functions of the records: keep them at the site.

        Args:
            records: with labels.
            cluster: whose model is evaluated.
            positive: class that is compared with all others; None: the second of two.
            threshold: least probability of the positive class at which it is predicted; None: 0.5 of two classes,
                otherwise the most probable class.
            weights: (n,) of the records; None: 1.

        Raises:
            InferenceError: the records have no labels, the method clusters records, or there is no such class.
        """
        return self.evaluation(records, cluster, positive=positive, threshold=threshold)(weights)

    def evaluation(
        self, records: LocalRecords, cluster: int, *, positive: str | None = None, threshold: float | None = None
    ) -> Measure:
        """Return a function of weights of the records that computes :meth:`evaluate`; the model runs once."""
        if self.clusters_records:
            raise InferenceError(f"{self.card.strategy} clusters records and predicts no labels")
        if records.y is None or not len(records.y):
            raise InferenceError(f"{records.where} has no labelled records, on which a model could be evaluated")
        one, labels, outputs = self.positive(positive), records.y, self.outputs(records.x, cluster)
        if threshold is not None:
            self.check_threshold(threshold, one)
        return self.task.measure(labels, outputs, one, threshold)

    def check_threshold(self, threshold: float, positive: int | None) -> None:
        """Check the least probability of the positive class.

        Raises:
            InferenceError: it is no probability, or there is no positive class.
        """
        if positive is None:
            raise InferenceError("a threshold requires a positive class: name it, or use models of two classes")
        if not 0 <= threshold <= 1:
            raise InferenceError(f"threshold is {threshold:g}; must be a probability, from 0 to 1")

    def assign(self, records: LocalRecords) -> Assignment:
        """Find the model with the smallest mean loss on labelled records, as clients do in training.

        Raises:
            InferenceError: the records have no labels, or the method clusters records.
        """
        if self.clusters_records:
            raise InferenceError(f"{self.card.strategy} clusters records, not sites: use predict")
        if records.y is None or not len(records.y):
            raise InferenceError(f"{records.where} has no labelled records, from which a cluster could be chosen")
        losses = []
        for cluster in range(len(self)):
            outputs = torch.as_tensor(self.outputs(records.x, cluster))
            loss = float(self.task(outputs, torch.as_tensor(records.y)).double().mean())
            losses.append(loss if math.isfinite(loss) else math.inf)
        return Assignment(int(np.argmin(losses)), tuple(losses), len(records.y))

    def personalised(self, records: LocalRecords, cluster: int, method: str = "last-layer") -> TrainedModels:
        """Return these models, with that of a cluster fitted to labelled records of one site (client/personal.py).

        The result says more of these records than the released models do: it belongs to the site alone. Equal records
        give an equal result.

        Args:
            records: of the site, with labels.
            cluster: whose model is fitted.
            method: "last-layer", "prior", or "all" or "mixture", which take the step size from the run folder.

        Raises:
            InferenceError: the method is unknown, the records have no labels, the run's method clusters records, or
                the network or the targets do not support the method.
        """
        if method not in PERSONAL_METHODS:
            raise InferenceError(f"personalize is {method!r}; it must be {', '.join(PERSONAL_METHODS)}")
        if self.clusters_records:
            raise InferenceError(f"{self.card.strategy} clusters records and trains no model that a site could fit")
        if records.y is None or not len(records.y):
            raise InferenceError(f"{records.where} has no labelled records, to which a model could be fitted")
        self.outputs(records.x[:0], cluster)  # there is such a cluster
        module = copy.deepcopy(self._modules[cluster])
        for name in networks.trainable(_network(self.cards[cluster])):
            module.get_parameter(name).requires_grad_()
        parameters = networks.float32_arrays(module)
        layout = Layout.of(parameters)
        released = layout.flatten(parameters)
        shard = Shard(0, 0, records.x, records.y, TestSet(records.x, records.y))
        training = replace(self._training(method), task=self.task)
        rng = np.random.default_rng(0)
        try:
            own = personalised(module, layout, released[None], [shard], method, training, [rng], self._initial)
        except networks.ModelError as error:
            raise InferenceError(str(error)) from None
        networks.set_trainable(own.network, own.layout.split(own.models[0]))
        module = own.network.eval().requires_grad_(False)
        additive = isinstance(module, Additive)
        modules = [module if index == cluster else other for index, other in enumerate(self._modules)]
        cards = [replace(card, additive=additive) if card.cluster == cluster else card for card in self.cards]
        return TrainedModels(self.folder, cards, modules, self.sites)

    def _initial(self) -> npt.NDArray[np.float32]:
        """Return the public parameters from which a client trains alone.

        Raises:
            InferenceError: they are those of a file, which the models' files do not hold.
        """
        if self.card.pretrained is not None:
            raise InferenceError(
                f"the run started from a file with SHA-256 {self.card.pretrained}, which is not beside the models; set "
                "personalize to last-layer, prior or all"
            )
        parameters = networks.initialise(self.card.network, self.input_shape, self.card.num_classes, 0)
        return Layout.of(parameters).flatten(parameters)

    def _training(self, method: str) -> LocalTrainingConfig:
        """Return the hyper-parameters of the run's clients, if a method trains with them."""
        if method not in ("all", "mixture"):
            return LocalTrainingConfig(1, 1, 1.0)
        try:
            values = flat(read_config(self.folder.parent)["config"])
            training = TrainingSettings(**{key: values[f"training.{key_of(key)}"] for key in ("lr", "batch_size")})
        except (FileError, KeyError, ConfigError) as error:
            raise InferenceError(
                f"personalize = {method!r} takes lr and batch-size from config.toml of the run folder, which cannot be "
                f"read ({error}); set it to last-layer or prior"
            ) from None
        return LocalTrainingConfig(1, training.batch_size, training.lr)

    def cluster_of(self, site: int) -> int:
        """Return the cluster of a client of the run, given by its number.

        Raises:
            InferenceError: it is not known.
        """
        if len(self) == 1:
            return 0
        if site in self.sites:
            return self.sites[site]
        if self.card.unit == "client":
            raise InferenceError(
                f"the cluster of site {site} is not released under client-level privacy; use the site's labelled "
                "records: coterie assign"
            )
        hint = f"known sites: {', '.join(map(str, sorted(self.sites)[:10]))}" if self.sites else "no site is known"
        raise InferenceError(f"the cluster of site {site} is not in result.json ({hint}); use coterie assign")

    def export_onnx(self, folder: str | Path) -> list[Path]:
        """Write ``cluster-<j>.onnx`` for every model, with adapters merged and the card as metadata.

        Requires ``coterie[onnx]``.

        The input is ``examples``, float32 (n, ...) prepared examples; the output is ``outputs``.

        Raises:
            InferenceError: the extra is missing, or PyTorch cannot export the network of a user.
        """
        try:
            import onnx
            import onnxscript  # noqa: F401 (torch.onnx requires it)
        except ImportError as error:
            raise InferenceError(f"ONNX export requires {error.name}: pip install 'coterie[onnx]'") from None
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for cluster, module in enumerate(self):
            proto = self._onnx(merged(module))
            onnx.helper.set_model_props(proto, {"coterie": json.dumps(self.cards[cluster].to_json())})
            written.append(target / f"cluster-{cluster}.onnx")
            written[-1].write_bytes(proto.SerializeToString())
        return written

    def _onnx(self, module: nn.Module) -> Any:
        """Return a module as a protocol buffer of ONNX, for any number of examples."""
        example = torch.zeros(2, *self.input_shape, dtype=torch.int64 if self.card.kind == "tokens" else None)
        try:
            program = torch.onnx.export(
                _Sum(list(module.children())).eval() if isinstance(module, Additive) else module,
                (example,),
                dynamo=True,
                verbose=False,
                input_names=["examples"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("n")},),
            )
            assert program is not None
            proto = program.model_proto
        except Exception as error:  # of the exporter, about a user's code
            while error.__cause__ is not None:
                error = error.__cause__  # type: ignore[assignment]
            raise InferenceError(
                f"PyTorch cannot export model '{self.card.model}' to ONNX: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:500]}"
            ) from error
        if proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param != "n":
            raise InferenceError(
                f"model '{self.card.model}' would only take {len(example)} examples at once in ONNX, since its code "
                "computes with their number: use x.shape[0] in place of len(x)"
            )
        return proto

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a prepared example."""
        return _prepared_shape(self.card)


def load(run: str | Path, *, site: int | None = None, trust_code: bool = False) -> TrainedModels:
    """Load the models of a run.

    Args:
        run: a run folder, or a folder with its model files only.
        site: number of the client whose personal layers complete the models, for methods that have them
            (FedPer). Their state must be in the run folder, as after a simulation.
        trust_code: import a network or features given as ``module:function`` or by an entry point. The name is taken
            from the model file: allow it for files of a source that you trust.

    Raises:
        InferenceError: there are no models, or a file is damaged or does not fit its card.
    """
    folder = Path(run).expanduser()
    files = _files(folder)
    loaded = [_read(file) for file in files]
    cards = [card for card, _ in loaded]
    expected = cards[0].clusters if cards[0].encoder is None else 1
    if [card.cluster for card in cards] != list(range(expected)):
        raise InferenceError(f"{files[0].parent} does not contain the models of all {expected} clusters")
    for card in cards:
        foreign = sorted({card.model} - networks.MODELS.keys() | {card.features} - networks.FEATURES.keys())
        if foreign and not trust_code:
            raise InferenceError(
                f"the models need code that is not Coterie's: {', '.join(map(repr, foreign))}; allow its import with "
                "--trust-code (trust_code=True) if you trust the source of these files"
            )
    site_state = None if site is None else (folder / "clients", site)
    shared = _constants(files[0].parent, cards[0])
    modules = []
    for file, (card, tensors) in zip(files, loaded, strict=True):
        try:
            modules.append(_module(card, tensors, site_state, shared))
        except InferenceError:
            raise
        except (networks.ModelError, ValueError, RuntimeError) as error:
            raise InferenceError(f"{file} does not fit its card: {' '.join(str(error).split())}") from None
    models = TrainedModels(files[0].parent, cards, modules, _sites(folder))
    try:
        _ = models.task
    except (TaskError, DataError) as error:
        raise InferenceError(f"{files[0]} does not fit its card: {error}") from None
    return models


def _files(folder: Path) -> list[Path]:
    """Return the model files by cluster."""
    for location in (folder / "models", folder):
        numbered = {int(end): f for f in location.glob("cluster-*.safetensors") if (end := f.stem[8:]).isdecimal()}
        if numbered:
            return [numbered[cluster] for cluster in sorted(numbered)]
    what = "is an unfinished run" if (folder / "config.toml").exists() else "does not exist" * (not folder.exists())
    raise InferenceError(
        f"{folder} {what or 'is not a run folder'}: it has no models/cluster-0.safetensors; give the folder of a "
        "finished run"
    )


def _read(file: Path) -> tuple[ModelCard, dict[str, npt.NDArray[Any]]]:
    try:
        os.close(open_regular(file))
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            if _ABOUT not in metadata:
                raise CardError("it has no card")
            return ModelCard.parse(metadata[_ABOUT]), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except CardError as error:
        raise InferenceError(f"{file} is no model of this version of Coterie: {error}") from None
    except (FileError, SafetensorError, OSError) as error:
        raise InferenceError(f"{file} cannot be read: {error}") from None


def _constants(folder: Path, card: ModelCard) -> dict[str, Tensor] | None:
    """Return the constants of the models in a folder; None: there are none, or their file is not there."""
    file = folder / CONSTANTS_FILE
    if card.constants is None or not file.exists():
        return None
    try:
        os.close(open_regular(file))
        found: dict[str, Tensor] = load_file(file)
    except (FileError, SafetensorError, OSError) as error:
        raise InferenceError(f"{file} cannot be read: {error}") from None
    if networks.fingerprint(found) != card.constants:
        raise InferenceError(f"{file} is damaged, or of another run than the models beside it")
    return found


def _set_constants(card: ModelCard, network: nn.Module, values: Mapping[str, Tensor] | None) -> None:
    """Give a network the constants of its run; without their file, those that its function builds must be the same."""
    own = networks.constants(network)
    if values is None:
        if networks.fingerprint(own) != card.constants:
            raise InferenceError(
                f"model '{card.model}' has other frozen parameters or buffers here than in the run: put "
                f"{CONSTANTS_FILE} of the run's models beside these, or use the code and files of the run"
            )
        return
    for name in {**own, **values}:
        kinds = [(of[name].shape, of[name].dtype) if name in of else None for of in (own, values)]
        if kinds[0] != kinds[1]:
            raise networks.ModelError(f"{name} of {CONSTANTS_FILE} is no frozen parameter or buffer of the network")
        if networks.differing({name: own[name]}, {name: values[name]}):
            own[name].copy_(values[name])


def _module(
    card: ModelCard,
    tensors: Mapping[str, npt.NDArray[Any]],
    site: tuple[Path, int] | None,
    constants: Mapping[str, Tensor] | None,
) -> nn.Module:
    # A card may come from anyone: sizes are compared before a parameter of Coterie's networks is allocated.
    with torch.device("meta") if card.model in networks.MODELS else nullcontext():
        layout = Layout.of(networks.trainable(_network(card)))
    parameters = dict(tensors)
    if personal := [name for name in layout.names if name not in parameters]:
        parameters |= _personal(layout, personal, card, site)
    expected = dict(zip(layout.names, layout.shapes, strict=True))
    for name, values in parameters.items():
        if expected.get(name) != values.shape:
            raise networks.ModelError(f"{name} has shape {values.shape}, expected {expected.get(name, 'no such name')}")
    module = _network(card)
    networks.set_trainable(module, parameters)
    if card.encoder is None:
        for part in module.children() if card.additive else [module]:
            _set_constants(card, part, constants)
    return module.eval().requires_grad_(False)


def _network(card: ModelCard) -> nn.Module:
    shape = _prepared_shape(card)
    if card.encoder is not None:
        from coterie.models.autoencoder import Labeller

        return Labeller(shape, card.clusters, card.encoder)
    if card.additive:
        return Additive(*(networks.build(card.network, shape, card.num_classes) for _ in range(2)))
    return networks.build(card.network, shape, card.num_classes)


def _personal(
    layout: Layout, names: Sequence[str], card: ModelCard, site: tuple[Path, int] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the personal layers of a site, from its state file."""
    if site is None:
        raise InferenceError(
            f"the layers {', '.join(names)} of {card.strategy} are personal: name a site, whose state is in the run "
            "folder (--site N, site=N)"
        )
    folder, number = site
    try:
        state = KeptStates(folder).of(number).read()
    except (ClientError, FileError) as error:
        raise InferenceError(str(error)) from None
    if OWN not in state:
        raise InferenceError(
            f"{folder} contains no personal layers of site {number}: it did not train, or its layers are on its machine"
        )
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    personal_layout = Layout(tuple(names), tuple(shapes[name] for name in names))
    if state[OWN].shape != (personal_layout.size,):
        raise InferenceError(f"the personal layers of site {number} in {folder} do not fit the network")
    return personal_layout.split(state[OWN])


class _Sum(nn.Module):
    """`Additive` with names of submodules that the exporter can use in Python code, where "global" is a keyword."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all outputs."""
        return torch.stack([module(x) for module in self.parts]).sum(dim=0)


def _prepared_shape(card: ModelCard) -> tuple[int, ...]:
    """Return the shape of an example after the fixed features."""
    if math.prod(card.shape) > MAX_EXAMPLE:
        raise networks.ModelError(f"examples of shape {card.shape} are too large")
    if card.kind != "images":
        return card.shape
    return networks.features(card.features)(np.zeros((1, *card.shape), np.float32)).shape[1:]


def _sites(folder: Path) -> dict[int, int]:
    """Return cluster by client, as far as result.json states them."""
    try:
        outcome = Outcome.read(folder)
    except FileError as error:
        raise InferenceError(f"{error}; restore it from a copy, or remove it") from None
    sites = outcome.sites if outcome else ()
    return {site.client: site.cluster for site in sites if site.cluster is not None}
