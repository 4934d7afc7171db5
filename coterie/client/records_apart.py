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
from types import EllipsisType, MethodType
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

    @property
    def ndim(self) -> int:
        return int(self.sample.ndim)

    def dim(self) -> int:
        return self.ndim

    @property
    def dtype(self) -> Any:
        return self.sample.dtype

    @property
    def device(self) -> Any:
        return self.sample.device

    @property
    def is_cuda(self) -> bool:
        return bool(self.sample.is_cuda)

    def is_floating_point(self) -> bool:
        return bool(self.sample.is_floating_point())

    @property
    def mT(self) -> Proxy:  # noqa: N802 - the name of PyTorch
        return self.tracer.create_proxy("call_method", "transpose", (self, -2, -1), {})

    @property
    def values(self) -> Proxy:
        """The first of two results, such as those of ``max`` over a dimension."""
        return self.result(0)

    @property
    def indices(self) -> Proxy:
        return self.result(1)

    def __len__(self) -> int:
        if not isinstance(self.sample, tuple):
            raise _UntraceableError("len")
        return len(self.sample)

    def __iter__(self) -> Iterator[Proxy]:
        return iter([self.result(i) for i in range(len(self))])

    def result(self, index: int) -> Proxy:
        """Return an item of a tuple."""
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __bool__(self) -> bool:
        raise _UntraceableError("a condition on values")

    def _overwrite(self, function: Callable[..., Any], operand: Any) -> Proxy:
        self.tracer.overwritten.append(self)
        return self.tracer.create_proxy("call_function", function, (self, operand), {})

    def __iadd__(self, operand: Any) -> Proxy:
        return self._overwrite(operator.add, operand)

    def __isub__(self, operand: Any) -> Proxy:
        return self._overwrite(operator.sub, operand)

    def __imul__(self, operand: Any) -> Proxy:
        return self._overwrite(operator.mul, operand)

    def __itruediv__(self, operand: Any) -> Proxy:
        return self._overwrite(operator.truediv, operand)


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
            _hide(parameters)
            outputs = network(x)
        finally:
            _reveal(parameters)
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
        _reveal(parameters)
        try:
            with torch.no_grad():
                sample = type(layer).forward(layer, args[0].sample)
        finally:
            _hide(parameters)
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
            function = target if kind == "call_function" else partial(_call_method, target)
            sample = function(*samples[0], **samples[1])
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


def _hide(parameters: _Parameters) -> None:
    for module, named in parameters:
        trains = any(value is not None and value.requires_grad for value in named.values())
        vars(module)["_parameters"] = _Hidden(named) if trains else named


def _reveal(parameters: _Parameters) -> None:
    for module, named in parameters:
        vars(module)["_parameters"] = named


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


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
        return _recurrent
    return _LAYERS.get(type(layer))


def _recurrent(layer: Any, ndim: int) -> bool:
    return bool(layer.batch_first) and ndim == 3 and (layer.dropout == 0 or not layer.training)


def _embedding(layer: nn.Embedding, ndim: int) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq


def _convolution(layer: nn.Conv2d, ndim: int) -> bool:
    return ndim == len(layer.kernel_size) + 2  # with one less, the records are channels


def _statistics(layer: nn.BatchNorm2d, ndim: int) -> bool:
    return ndim > 1 and not layer.training and layer.running_mean is not None


def _instance_norm(rank: int) -> Callable[[nn.InstanceNorm2d, int], bool]:
    return lambda layer, ndim: ndim == rank and not layer.track_running_stats


def _vectors(layer: nn.Module, ndim: int) -> bool:
    return ndim > 1


def _last_dimensions(layer: nn.LayerNorm, ndim: int) -> bool:
    return len(layer.normalized_shape) < ndim


_LAYERS: dict[type, Callable[[Any, int], bool]] = {
    nn.Linear: _vectors,
    nn.Embedding: _embedding,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    **dict.fromkeys((nn.GroupNorm, nn.PReLU), _vectors),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _last_dimensions),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _statistics),
    nn.InstanceNorm1d: _instance_norm(3),
    nn.InstanceNorm2d: _instance_norm(4),
    nn.InstanceNorm3d: _instance_norm(5),
}

# ---- functions ----------------------------------------------------------------------------------------------


def _is_rows(value: Any) -> bool:
    return isinstance(value, _Value) and isinstance(value.sample, Tensor)


def _is_count(value: Any) -> bool:
    return isinstance(value, _Value) and isinstance(value.sample, int)


def _flat(values: Any) -> list[Any]:
    """Return values, and those in tuples and lists among them, in one list."""
    return [item for value in values for item in (_flat(value) if isinstance(value, tuple | list) else [value])]


def _ndims(values: Any) -> set[int]:
    return {value.ndim for value in _flat(values) if _is_rows(value)}


def _whole_numbers(values: Any) -> bool:
    return all(type(value) is int for value in values)


def _are_plain(values: Any) -> bool:
    """Whether values are numbers and the like, none of which the trace computes."""
    return all(isinstance(value, _PLAIN) for value in _flat(values))


def _by_number(args: Arguments, kwargs: Keywords) -> bool:
    """Operands broadcast: all records have the same dimensions, and constants have none of records."""
    operands = [*args, *kwargs.values()]
    ndims = _ndims(operands)
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


def _where(args: Arguments, kwargs: Keywords) -> bool:
    return len(args) + len(kwargs) == 3 and _by_number(args, kwargs)  # with one argument, it counts records


def _along(position: int, default: Any = None, added: int = 0) -> Rule:
    """Return the rule of a function of dimensions, which must not be that of the records.

    Args:
        position: Index of the argument that names dimensions.
        default: Its default; None if that means all dimensions, or is none.
        added: Dimensions that the function adds.
    """

    def rule(args: Arguments, kwargs: Keywords) -> bool:
        named = {key: kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs}
        dims = next(iter(named.values()), args[position] if len(args) > position else default)
        dims = list(dims) if isinstance(dims, tuple | list) else [dims]
        rest = [*args[:position], *args[position + 1 :], *(kwargs[key] for key in kwargs.keys() - named)]
        return _whole_numbers(dims) and _apart_along(dims, rest, added)

    return rule


def _apart_along(dims: Sequence[int], rest: Arguments, added: int = 0) -> bool:
    ndims = _ndims(rest)
    plain = _are_plain(value for value in _flat(rest) if not _is_rows(value))
    return len(dims) > 0 and len(ndims) == 1 and plain and all(dim % (max(ndims) + added) for dim in dims)


def _along_each(args: Arguments, kwargs: Keywords) -> bool:
    """All arguments but the first are dimensions."""
    dims = _flat([args[1:], list(kwargs.values())])
    return _whole_numbers(dims) and _apart_along(dims, args[:1])


def _select_by_constant(args: Arguments, kwargs: Keywords) -> bool:
    return len(args) == 3 and isinstance(args[2], Tensor) and type(args[1]) is int and _apart_along(args[1:2], args[:1])


def _reshape(args: Arguments, kwargs: Keywords) -> bool:
    """The first size is that of the records: the others hold the numbers of one record."""
    if kwargs or not _is_rows(args[0]) or not (sizes := _flat(args[1:])):
        return False
    numbers, rest = args[0].sample[0].numel(), sizes[1:]
    if not _whole_numbers(rest) or not numbers:
        return False
    if _is_count(sizes[0]) and rest.count(-1) == 1:
        return True
    return (_is_count(sizes[0]) or sizes[0] == -1) and math.prod(rest) == numbers and -1 not in rest


def _flatten(args: Arguments, kwargs: Keywords) -> bool:
    defaults = {"start_dim": 0, "end_dim": -1}
    dims = {**defaults, **dict(zip(defaults, args[1:], strict=False)), **kwargs}
    if not _is_rows(args[0]) or not _whole_numbers(dims.values()):
        return False
    start, end = (dim % args[0].ndim for dim in dims.values())
    return bool(start > 0 or math.prod(args[0].sample.shape[1 : end + 1]) == 1)


def _transpose(args: Arguments, kwargs: Keywords) -> bool:
    dims = [*args[1:], *kwargs.values()]
    return len(dims) == 2 and _whole_numbers(dims) and _apart_along(dims, args[:1])


def _permute(args: Arguments, kwargs: Keywords) -> bool:
    dims = _flat([args[1:], list(kwargs.values())])
    return _is_rows(args[0]) and _whole_numbers(dims) and len(dims) > 0 and dims[0] % args[0].ndim == 0


def _expand(args: Arguments, kwargs: Keywords) -> bool:
    sizes = _flat(args[1:])
    first = sizes and (_is_count(sizes[0]) or sizes[0] == -1)
    return bool(first) and not kwargs and _is_rows(args[0]) and len(sizes) == args[0].ndim and _whole_numbers(sizes[1:])


def _repeat(args: Arguments, kwargs: Keywords) -> bool:
    sizes = _flat(args[1:])
    return not kwargs and _is_rows(args[0]) and _whole_numbers(sizes) and len(sizes) == args[0].ndim and sizes[0] == 1


def _new(args: Arguments, kwargs: Keywords) -> bool:
    """Equal rows, as many as there are records."""
    sizes = _flat(args[1:])
    plain = _are_plain([*sizes[1:], *kwargs.values()])
    return _is_rows(args[0]) and len(sizes) > 0 and _is_count(sizes[0]) and plain


def _index(args: Arguments, kwargs: Keywords) -> bool:
    """Every record, and of its numbers those at constant positions."""
    value, index = args
    if isinstance(value, _Value) and isinstance(value.sample, tuple):
        return type(index) is int
    indices = list(index) if isinstance(index, tuple) else [index]
    by_list = [position for position in indices if isinstance(position, Tensor | list)]
    items = [[item.start, item.stop, item.step] if isinstance(item, slice) else item for item in indices]
    plain = all(isinstance(item, (Tensor, EllipsisType, *_PLAIN)) for item in _flat(items))
    if not _is_rows(value) or not indices or not plain:
        return False
    if by_list:  # beside numbers, the selected dimension could become the first one
        rest = [position for position in indices[1:] if position is not by_list[0]]
        single = len(by_list) == 1 and all(isinstance(position, slice | None) for position in rest)
        return single and isinstance(indices[0], slice) and indices[0] == slice(None)
    if indices[0] is ...:
        return bool(sum(position is not None for position in indices[1:]) < value.ndim)
    return isinstance(indices[0], slice) and indices[0] == slice(None)


def _matmul(args: Arguments, kwargs: Keywords) -> bool:
    left, right = args
    if _is_rows(left) and _is_rows(right):
        return bool(left.ndim == right.ndim >= 3)
    if _is_rows(left):
        return isinstance(right, Tensor) and left.ndim >= 2 and right.ndim <= 2
    return isinstance(left, Tensor) and _is_rows(right) and right.ndim >= 3 and left.ndim <= 2


def _einsum(args: Arguments, kwargs: Keywords) -> bool:
    """The first letter of all records, and of the result, is that of the records, and no other operand has it."""
    (inputs, _, output), operands = args[0].replace(" ", "").partition("->"), _flat(args[1:])
    terms = list(zip(operands, inputs.split(","), strict=True))
    letters = {term[:1] for operand, term in terms if _is_rows(operand)}
    once = all(term.count(letter) == _is_rows(operand) for operand, term in terms for letter in letters)
    tensors = all(_is_rows(operand) or isinstance(operand, Tensor) for operand in operands)
    return tensors and once and letters == {output[:1]} and output.count(output[:1]) == 1 and "." not in args[0]


def _linear(args: Arguments, kwargs: Keywords) -> bool:
    constants = [*args[1:], *kwargs.values()]
    constant = all(item is None or isinstance(item, Tensor) for item in constants)
    return _is_rows(args[0]) and args[0].ndim >= 2 and constant


def _spatial(least: int, most: int = 99) -> Rule:
    """Return the rule of a function of the last dimensions, which takes tensors of so many dimensions."""

    def rule(args: Arguments, kwargs: Keywords) -> bool:
        rest = [*args[1:], *kwargs.values()]
        return _is_rows(args[0]) and least <= args[0].ndim <= most and _are_plain(rest)

    return rule


def _pad(args: Arguments, kwargs: Keywords) -> bool:
    rest = [*args[1:], *kwargs.values()]
    if not _is_rows(args[0]) or not rest or not _are_plain(rest):
        return False
    padded = len(_flat(rest[:1])) // 2
    return bool(padded < args[0].ndim if "constant" in rest else padded + 2 == args[0].ndim)


def _normalise_last(args: Arguments, kwargs: Keywords) -> bool:
    rest = [*args[1:], *kwargs.values()]
    plain = all(isinstance(item, (*_PLAIN, Tensor)) for item in _flat(rest))
    return _is_rows(args[0]) and len(args) > 1 and len(_flat(args[1:2])) < args[0].ndim and plain


def _attend(args: Arguments, kwargs: Keywords) -> bool:
    inputs = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)), **kwargs}
    mask, ndims = inputs.pop("attn_mask", None), _ndims(inputs.values())
    rows = [inputs.pop(key, None) for key in ("query", "key", "value")]
    if not all(map(_is_rows, rows)) or len(ndims) != 1 or max(ndims) < 3 or inputs.pop("dropout_p", 0.0) != 0:
        return False
    constant = isinstance(mask, Tensor) and (mask.ndim < max(ndims) or mask.shape[0] == 1)
    return _are_plain(inputs.values()) and (mask is None or constant or (_is_rows(mask) and mask.ndim == max(ndims)))


def _drop(args: Arguments, kwargs: Keywords) -> bool:
    inputs = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    return _is_rows(inputs["input"]) and (inputs.get("p") == 0 or inputs.get("training") is False)


def _one_hot(args: Arguments, kwargs: Keywords) -> bool:
    classes = [*args[1:], *kwargs.values()]
    return _is_rows(args[0]) and _whole_numbers(classes) and len(classes) == 1 and classes[0] > 0


# Names in torch, torch.Tensor, torch.nn.functional and operator.
_BY_NUMBER = (
    "abs", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "floordiv",
    "floor_divide", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log1p",
    "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "sigmoid", "logit", "erf", "erfc", "sinc", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu",
    "silu", "mish", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "tanhshrink", "hardshrink",
    "softshrink", "logsigmoid", "threshold", "clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "lerp",
    "addcmul", "addcdiv", "round", "floor", "ceil", "trunc", "frac", "sign", "sgn", "remainder", "fmod", "mod",
    "hypot", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "and_",
    "or_", "xor", "invert", "isnan", "isfinite", "isinf", "nan_to_num", "masked_fill", "zeros_like", "ones_like",
    "full_like", "contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "long", "int", "bool", "to",
    "type_as", "xlogy",
)  # fmt: skip
_ALONG_FIRST = (
    "mean", "sum", "prod", "amax", "amin", "argmax", "argmin", "all", "any", "logsumexp", "std", "var", "softmax",
    "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "unbind", "select", "narrow", "median",
    "max", "min", "unflatten", "gather",
)  # fmt: skip
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_BY_NUMBER, _by_number),
    **dict.fromkeys(_ALONG_FIRST, _along(1)),
    "cat": _along(1, 0),
    **dict.fromkeys(("sort", "argsort", "glu"), _along(1, -1)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), _along(2, 0)),
    **dict.fromkeys(("roll", "norm", "vector_norm", "repeat_interleave"), _along(2)),
    **dict.fromkeys(("topk", "diff"), _along(2, -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), _along(2, 1)),
    "where": _where,
    "stack": _along(1, 0, added=1),
    "unsqueeze": _along(1, added=1),
    **dict.fromkeys(("flip", "squeeze"), _along_each),
    "index_select": _select_by_constant,
    **dict.fromkeys(("reshape", "view"), _reshape),
    "flatten": _flatten,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    "permute": _permute,
    "expand": _expand,
    "repeat": _repeat,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _new),
    "getitem": _index,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "einsum": _einsum,
    "linear": _linear,
    **{
        f"{name}{rank}d": _spatial(rank + 2, rank + 2)
        for name in ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool")
        for rank in (1, 2, 3)
    },
    **dict.fromkeys(("interpolate", "upsample", "local_response_norm"), _spatial(3)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), _spatial(4)),
    "unfold": _spatial(4, 4),
    "pad": _pad,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalise_last),
    "scaled_dot_product_attention": _attend,
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), _drop
    ),
    "one_hot": _one_hot,
}
# Only the method unfold(dim, size, step) and the function of this name differ.
_METHODS = {name: rule for name, rule in _RULES.items() if hasattr(Tensor, name) and name != "unfold"}
_FUNCTIONS: dict[Any, Rule] = {
    getattr(module, name): rule
    for module in (torch, functional, torch.linalg, operator)
    for name, rule in _RULES.items()
    if hasattr(module, name)
}
