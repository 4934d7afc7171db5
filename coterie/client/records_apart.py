"""Networks that treat records apart: what is computed for a record depends on this record and the parameters alone.

What a network computes for a record is *defined* by a batch of this record alone. A batch of several records computes
the same if each operation does. :func:`traced` runs a network once on a symbol for a batch, whose first dimension are
the records, and accepts nothing but layers and functions that are known to compute row i of the output from row i of
the input. A condition on values or on the number of records, and an operation that is not known, end the trace.

A traced network computes by its trace, not by its code: what the code does in a later call, such as counting calls,
has no effect. Any other network computes each record in a batch of its own (:func:`apart`), by a copy that is made for
this call (:func:`fresh`), so that buffers and attributes carry nothing from one record to the next.
"""

from __future__ import annotations

import copy
import math
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import TracerBase
from torch.nn import functional

from coterie.client.backend import Examples
from coterie.client.chains import chain_kind

Arguments: TypeAlias = Sequence[Any]
Keywords: TypeAlias = Mapping[str, Any]
#: Whether a function with these arguments treats records apart.
Rule: TypeAlias = Callable[[Arguments, Keywords], bool]

# Records of the example that tells the shapes of all values of a trace.
_RECORDS = 3
_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)

# Attributes of a tensor that are equal for any number of records.
_SAME_FOR_ALL = ("ndim", "dim", "dtype", "device", "is_cuda", "is_floating_point")


class _UntraceableError(Exception):
    """An operation is not known to treat records apart."""


def traced(network: nn.Module, examples: Examples) -> nn.Module | None:
    """Return a network that computes by its symbolic trace; None if it is not known to treat records apart.

    Each trainable parameter of a traced network belongs to one layer that is known, and is used by this layer alone.

    Args:
        network: A network on the device of the examples. It is changed: its ``forward`` becomes the trace.
        examples: Shape, type and device of its examples.
    """
    layers = {path: layer for path, layer in network.named_modules() if _is_known(layer)}
    owned = [id(value) for layer in layers.values() for value in layer.parameters() if value.requires_grad]
    trains = {id(value) for value in network.parameters() if value.requires_grad}
    if len(owned) > len(set(owned)) or set(owned) != trains or any(map(_has_hooks, network.modules())):
        return None
    if rule := _rule_of(network):  # it is one layer
        return network if "" in layers and rule(network, 1 + len(examples.shape)) else None
    tracer = _Tracer(layers)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward = tracer.trace(network, examples)
    except Exception:  # of the tracer, or of a user's code that does not expect a symbol
        return None
    vars(network)["forward"] = forward
    return network


def fresh(network: nn.Module) -> nn.Module:
    """Return a copy of a network as it was built. Whatever a call writes into it is not read by the next call."""
    lone = copy.deepcopy(network)
    vars(lone).pop("forward", None)  # that of `apart`
    return lone


@lru_cache(maxsize=8)
def apart(model: nn.Module, examples: Examples) -> nn.Module:
    """Return a network whose outputs for a record are those of ``model`` for a batch of this record alone.

    Args:
        model: Any network. It is left unchanged.
        examples: Shape, type and device of its examples.
    """
    network = traced(copy.deepcopy(model).to(examples.device), examples)
    if network is not None:
        return model if chain_kind(model, len(examples.shape)) else network
    network = copy.deepcopy(model).to(examples.device)
    for forward in (_mapped, _looped):
        vars(network)["forward"] = MethodType(forward, network)
        try:
            with torch.no_grad():
                network(torch.zeros(_RECORDS, *examples.shape, dtype=examples.x, device=examples.device))
            break
        except Exception:  # a user's code; if no batch of one works either, the first evaluation says why
            continue
    return network


def _mapped(network: nn.Module, x: Tensor) -> Any:
    """Compute all records at once, each of them in a batch of its own."""
    lone = fresh(network)
    with quiet_vmap():
        return vmap(lambda record: lone(record[None])[0])(x)


def _looped(network: nn.Module, x: Tensor) -> Any:
    """Compute one record after the other, each of them in a batch of its own."""
    return torch.cat([fresh(network)(record[None]) for record in x])


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Ignore the warning of ``torch.func.vmap`` about operations that it computes one after the other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


# ---- the trace ------------------------------------------------------------------------------------------------------


class _Value(Proxy):
    """A value in a trace: a tensor whose first dimension are the records, a tuple of these, or the number of records.

    Attributes:
        sample: The value for :data:`_RECORDS` records; an integer for the number of records.
    """

    sample: Any
    tracer: _Tracer

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of records as a value of the trace, and the other sizes."""
        return (self.tracer.count(self), *self.sample.shape[1:])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sample, name) if name in _SAME_FOR_ALL else super().__getattr__(name)

    def __len__(self) -> int:
        if not isinstance(self.sample, tuple):
            raise _UntraceableError("len")
        return len(self.sample)

    def __iter__(self) -> Iterator[Proxy]:
        return iter(
            [self.tracer.create_proxy("call_function", operator.getitem, (self, i), {}) for i in range(len(self))]
        )

    def __bool__(self) -> bool:
        raise _UntraceableError("a condition on values")

    def __iadd__(self, operand: Any) -> Proxy:
        self.tracer.overwritten.append(self)
        return self.tracer.create_proxy("call_function", operator.add, (self, operand), {})

    def _refuse_in_place(self, operand: Any) -> Proxy:
        """Refuse an operation in place: without this method, Python would compute a new value in the trace."""
        raise _UntraceableError("an operation in place")

    __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _refuse_in_place
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _refuse_in_place


class _Hidden(dict[str, Any]):
    """Trainable parameters, which no code but that of their layer may use."""

    def __getitem__(self, key: str) -> Any:
        raise _UntraceableError(key)

    def get(self, *_: Any) -> Any:
        raise _UntraceableError("parameters")

    items = values = get


class _Tracer(TracerBase):
    """Records what a network computes from a symbol for a batch, as long as it is known to treat records apart.

    Attributes:
        overwritten: Values that the network changes in place. The trace computes new ones instead.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.graph = Graph(tracer_cls=None)
        self.overwritten: list[_Value] = []
        self._layers = layers
        self._values: list[_Value] = []
        self._constants: dict[str, Tensor] = {}

    def trace(self, network: nn.Module, examples: Examples) -> Callable[[Tensor], Any]:
        """Return the network's computation as a function."""
        owners = [module for layer in self._layers.values() for module in layer.modules()]
        parameters = [(module, module._parameters) for module in owners]
        batch = torch.zeros(_RECORDS, *examples.shape, dtype=examples.x, device=examples.device)
        x = self._add("placeholder", "x", (), {}, batch)
        try:
            for path, layer in self._layers.items():
                vars(layer)["forward"] = partial(self._call_layer, path, layer, parameters)
            _switch(parameters, hidden=True)
            outputs = network(x)
        finally:
            _switch(parameters, hidden=False)
            for layer in self._layers.values():
                vars(layer).pop("forward", None)
        if not _is_rows(outputs) or any(map(self._is_read_again, self.overwritten)):
            raise _UntraceableError("outputs")
        self.graph.output(outputs.node)
        root = GraphModule({**self._constants, **self._layers}, self.graph)
        forward: Callable[[Tensor], Any] = root.forward
        return forward

    def count(self, value: _Value) -> _Value:
        """Return the number of records as a value of the trace."""
        result = self.proxy(self.graph.create_node("call_method", "size", (value.node, 0), {}))
        result.sample = _RECORDS
        return result

    def _is_read_again(self, value: _Value) -> bool:
        """Whether the former numbers of a value that is changed in place are used elsewhere."""
        shared = Counter(storage for other in self._values for storage in _storages(other.sample))
        return len(value.node.users) != 1 or any(shared[storage] > 1 for storage in _storages(value.sample))

    def _call_layer(self, path: str, layer: nn.Module, parameters: _Parameters, /, *args: Any, **kwargs: Any) -> _Value:
        rule = _rule_of(layer)
        if len(args) != 1 or kwargs or not _is_rows(args[0]) or not (rule and rule(layer, args[0].ndim)):
            raise _UntraceableError(path)
        _switch(parameters, hidden=False)
        try:
            with torch.no_grad():
                sample = type(layer).forward(layer, args[0].sample)
        finally:
            _switch(parameters, hidden=True)
        # Records are not the first dimension of a recurrent layer's state.
        return self._add("call_module", path, args, {}, (sample[0], None) if isinstance(sample, tuple) else sample)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> _Value:
        """Add an operation.

        Raises:
            _UntraceableError: It is not known to treat records apart.
        """
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
            self.overwritten.append(args[0])
        rule = _METHODS.get(target) if kind == "call_method" else _FUNCTIONS.get(target)
        if rule is None or kwargs.get("out") is not None or not rule(args, kwargs):
            raise _UntraceableError(str(target))
        samples: Any = map_aggregate((args, kwargs), lambda value: value.sample if isinstance(value, _Value) else value)
        with torch.no_grad():
            (owner, *rest), named = samples
            sample = target(*samples[0], **named) if kind == "call_function" else getattr(owner, target)(*rest, **named)
        return self._add(kind, target, args, kwargs, sample)

    def _add(self, kind: str, target: Any, args: Arguments, kwargs: Keywords, sample: Any) -> _Value:
        results = [item for item in _parts(sample) if item is not None]
        rows = all(isinstance(item, Tensor) and item.shape[:1] == (_RECORDS,) for item in results)
        lowered = any(torch.is_autocast_enabled(item.device.type) for item in results)
        if not rows or lowered or not torch.is_grad_enabled():  # the trace does not hold these contexts
            raise _UntraceableError(str(target))
        arguments = self.create_arg(tuple(args)), self.create_arg(dict(kwargs))
        value = self.proxy(self.graph.create_node(kind, target, *arguments))
        value.sample = tuple(sample) if isinstance(sample, list) else sample
        self._values.append(value)
        return value

    def proxy(self, node: Node) -> _Value:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        """Return an argument as the graph holds it; tensors are constants, without gradients."""
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        if a.requires_grad:
            raise _UntraceableError("a parameter outside of its layer")
        name = next((name for name, value in self._constants.items() if value is a), f"constant{len(self._constants)}")
        self._constants[name] = a
        return self.graph.create_node("get_attr", name, (), {})


_Parameters: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]


def _switch(parameters: _Parameters, hidden: bool) -> None:
    for module, named in parameters:
        trains = hidden and any(value is not None and value.requires_grad for value in named.values())
        vars(module)["_parameters"] = _Hidden(named) if trains else named


def _storages(sample: Any) -> list[int]:
    return [item.untyped_storage().data_ptr() for item in _parts(sample) if isinstance(item, Tensor)]


def _parts(sample: Any) -> Sequence[Any]:
    return sample if isinstance(sample, tuple | list) else [sample]


def _has_hooks(module: nn.Module) -> bool:
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, name) for name in hooks)


# ---- layers -----------------------------------------------------------------------------------------------


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer is exactly of a type that is known, and no code of its own is in the place of the type's."""
    replaced = any(isinstance(vars(layer).get(name), Tensor) for name in ("weight", "bias"))
    return _rule_of(layer) is not None and "forward" not in vars(layer) and not replaced


def _rule_of(layer: nn.Module) -> Callable[[Any, int], bool] | None:
    """Return what tells whether a layer treats records apart whose tensor has this many dimensions."""
    recurrent = sys.modules.get("opacus.layers")  # seconds to import; without it, no network has these layers
    if recurrent and type(layer) in (recurrent.DPRNN, recurrent.DPGRU, recurrent.DPLSTM):
        return lambda layer, ndim: layer.batch_first and ndim == 3 and (layer.dropout == 0 or not layer.training)
    return _LAYERS.get(type(layer))


_LAYERS: dict[type, Callable[[Any, int], bool]] = {
    **dict.fromkeys((nn.Linear, nn.GroupNorm, nn.PReLU), lambda layer, ndim: ndim > 1),
    nn.Embedding: lambda layer, ndim: layer.max_norm is None and not layer.scale_grad_by_freq,
    **dict.fromkeys(  # with one dimension less, the records are channels
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        lambda layer, ndim: ndim == len(layer.kernel_size) + 2,
    ),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), lambda layer, ndim: len(layer.normalized_shape) < ndim),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        lambda layer, ndim: ndim > 1 and not layer.training and layer.running_mean is not None,
    ),
    nn.Dropout: lambda layer, ndim: layer.p == 0 or not layer.training,
}

# ---- functions ----------------------------------------------------------------------------------------------


def _is_rows(value: Any) -> bool:
    return isinstance(value, _Value) and isinstance(value.sample, Tensor)


def _is_count(value: Any) -> bool:
    return isinstance(value, _Value) and isinstance(value.sample, int)


def _flat(values: Any) -> list[Any]:
    """Return values, and those in tuples and lists among them, in one list."""
    return [item for value in values for item in (_flat(value) if isinstance(value, tuple | list) else [value])]


def _whole_numbers(values: Any) -> bool:
    return all(type(value) is int for value in values)


def _are_plain(values: Any) -> bool:
    """Whether values are numbers and the like, none of which the trace computes."""
    return all(isinstance(value, _PLAIN) for value in _flat(values))


def _by_number(args: Arguments, kwargs: Keywords) -> bool:
    """Operands broadcast: all records have the same dimensions, and constants have none of records."""
    operands = [*args, *kwargs.values()]
    ndims = {value.ndim for value in operands if _is_rows(value)}
    if len(ndims) != 1:
        return False
    (ndim,) = ndims
    return all(
        operand.ndim == ndim
        if _is_rows(operand)
        else (operand.ndim < ndim or operand.shape[0] == 1)
        if isinstance(operand, Tensor)
        else operand is not True and isinstance(operand, _PLAIN)
        for operand in operands
    )


def _along(position: int, default: Any = None, key: str = "dim", added: int = 0) -> Rule:
    """Return the rule of a function of dimensions, which must not be that of the records.

    Args:
        position: Index of the argument that names dimensions.
        default: Its default; None if that means all dimensions, or is none.
        key: Name of the argument.
        added: Dimensions that the function adds.
    """

    def rule(args: Arguments, kwargs: Keywords) -> bool:
        dims = kwargs.get(key, args[position] if len(args) > position else default)
        rest = [*args[:position], *args[position + 1 :], *(kwargs[name] for name in kwargs.keys() - {key})]
        return _apart_along(dims if isinstance(dims, tuple | list) else [dims], rest, added)

    return rule


def _along_each(args: Arguments, kwargs: Keywords) -> bool:
    """All arguments but the first are dimensions."""
    return not kwargs and _apart_along(args[1:], args[:1])


def _apart_along(dims: Sequence[Any], rest: Arguments, added: int = 0) -> bool:
    ndims = {value.ndim for value in _flat(rest) if _is_rows(value)}
    plain = _whole_numbers(dims) and _are_plain(value for value in _flat(rest) if not _is_rows(value))
    return len(dims) > 0 and len(ndims) == 1 and plain and all(dim % (max(ndims) + added) for dim in dims)


def _reshape(args: Arguments, kwargs: Keywords) -> bool:
    """The first size is that of the records: the others hold the numbers of one record."""
    first, *rest = _flat(args[1:])
    if kwargs or not _is_rows(args[0]) or not _whole_numbers(rest):
        return False
    return _is_count(first) or (first == -1 and math.prod(rest) == args[0].sample[0].numel())


def _flatten(args: Arguments, kwargs: Keywords) -> bool:
    one_number = _is_rows(args[0]) and args[0].sample[0].numel() == 1 and _are_plain([*args[1:], *kwargs.values()])
    return one_number or _along(1, key="start_dim")(args, kwargs)


def _permute(args: Arguments, kwargs: Keywords) -> bool:
    dims = _flat([args[1:], list(kwargs.values())])
    return _is_rows(args[0]) and _whole_numbers(dims) and len(dims) > 0 and dims[0] % args[0].ndim == 0


def _index(args: Arguments, kwargs: Keywords) -> bool:
    """Every record, and of its numbers those at constant positions; or an item of a tuple."""
    value, index = args
    if isinstance(value, _Value) and isinstance(value.sample, tuple):
        return type(index) is int
    indices = index if isinstance(index, tuple) else (index,)
    items = _flat([item.start, item.stop, item.step] if isinstance(item, slice) else item for item in indices)
    plain = all(item is None or item is ... or type(item) is int for item in items)
    if not _is_rows(value) or not indices or not plain:
        return False
    if indices[0] is ...:
        return bool(sum(position is not None for position in indices[1:]) < value.ndim)
    return isinstance(indices[0], slice) and indices[0] == slice(None)


def _spatial(*ndims: int) -> Rule:
    """Return the rule of a function of the last dimensions, which takes tensors of so many dimensions."""
    return lambda args, kwargs: (
        _is_rows(args[0]) and args[0].ndim in ndims and _are_plain([*args[1:], *kwargs.values()])
    )


# Names in torch, torch.Tensor, torch.nn.functional and operator. They are what the networks of coterie.models, of
# torchvision and of the examples call; a network that calls others computes in batches of one.
_BY_NUMBER = (
    "abs", "add", "sub", "mul", "div", "truediv", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "log", "log1p",
    "sin", "cos", "tanh", "sigmoid", "logsigmoid", "erf", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu",
    "mish", "hardtanh", "hardswish", "hardsigmoid", "softplus", "clamp", "minimum", "maximum", "round", "eq", "ne",
    "lt", "le", "gt", "ge", "masked_fill", "contiguous", "clone", "detach", "float", "to", "zeros_like",
)  # fmt: skip
_ALONG_FIRST = ("mean", "sum", "amax", "amin", "argmax", "logsumexp", "softmax", "log_softmax", "unbind", "max", "min")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_BY_NUMBER, _by_number),
    **dict.fromkeys(_ALONG_FIRST, _along(1)),
    "cat": _along(1, 0),
    **dict.fromkeys(("chunk", "split"), _along(2, 0)),
    "unsqueeze": _along(1, added=1),
    **dict.fromkeys(("squeeze", "transpose"), _along_each),
    **dict.fromkeys(("reshape", "view"), _reshape),
    "flatten": _flatten,
    "permute": _permute,
    "getitem": _index,
    "matmul": lambda args, kwargs: all(map(_is_rows, args)) and args[0].ndim == args[1].ndim >= 3,
    **{
        f"{name}_pool{rank}d": _spatial(rank + 2)
        for name in ("max", "avg", "adaptive_max", "adaptive_avg")
        for rank in (1, 2, 3)
    },
    "interpolate": _spatial(3, 4, 5),
}
_METHODS = {name: rule for name, rule in _RULES.items() if hasattr(Tensor, name)}
_FUNCTIONS: dict[Any, Rule] = {
    getattr(module, name): rule
    for module in (torch, functional, operator)
    for name, rule in _RULES.items()
    if hasattr(module, name)
}
