"""Runs a model on tensors that have a shape and no values, and take no memory.

What depends on values is answered as the largest case: masks select everything, and a number read from a tensor is 1.
Small tensors that were made outside, such as a camera, keep their values. Compiled kernels cannot run on such tensors:
code that calls one asks :func:`lacks_values`, and takes a null backend instead, which allocates what the kernels of
:func:`kernel_device` would.

Torch's own fake tensors would do for most of it, but take three times as long and load torch's compiler.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
FEW = 4096
"""Tensors with at most this many numbers keep their values, unless they have none."""
READS = (aten._local_scalar_dense, aten.is_nonzero, aten.equal)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)


class ShapeTensor(Tensor):
    """A tensor without values. It says that it is on the CPU, so that autocast and all code takes it for one."""

    meta: Tensor
    """A tensor of the same shape on torch's meta device, whose operators compute shapes only."""

    @staticmethod
    def of(meta: Tensor) -> "ShapeTensor":
        """Wraps a tensor of the meta device."""
        result = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            ShapeTensor, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=CPU
        )
        result.meta = meta
        return result

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the storage that views share."""
        return self.meta.untyped_storage()

    def data_ptr(self) -> int:
        """Returns a number that tensors of the same storage share."""
        return self.untyped_storage()._cdata

    def tolist(self) -> Any:
        """Returns numbers as they are read one by one."""
        return [part.tolist() for part in self] if self.dim() else self.item()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Returns ones: what is read from a tensor without values."""
        return np.ones(self.shape, str(self.dtype).removeprefix("torch."))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class DispatchMode(TorchDispatchMode):
    """A mode that is not hidden from torch's compiler: hiding it would import the compiler, which plans do not use."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _LargestCase(DispatchMode):
    """Answers what depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list_tensors(args)
        if tensors and not any(isinstance(tensor, ShapeTensor) for tensor in tensors):
            if all(tensor.numel() <= FEW for tensor in tensors):
                return function(*args, **kwargs)
        operator = function.overloadpacket
        if operator in READS:
            return torch.ones((), dtype=args[0].dtype).item() if operator is aten._local_scalar_dense else True
        first: Any = args[0] if args else None
        if operator is aten.nonzero:
            return _empty((first.numel(), first.dim()), torch.int64)
        if operator is aten.masked_select:
            return _empty(first.numel(), first.dtype)
        if operator in (aten._unique2, aten._unique, aten.unique_consecutive):
            index = _empty(first.numel(), torch.int64)
            return _empty(first.numel(), first.dtype), index, index
        if operator is aten.bincount:
            return _empty(kwargs.get("minlength", (*args, None, 0)[2]) or first.numel(), torch.int64)
        if operator in INDEXING and any(_is_mask(index) for index in args[1]):
            args = (args[0], _replace_masks(args[1]), *args[2:])
        return _run(function, args, kwargs)


class _Planned:
    """The arguments of the innermost :func:`shapes_only`."""

    device_type = "cpu"
    arrays = True


@contextmanager
def shapes_only(device_type: str = "cpu", *, arrays: bool = True) -> Iterator[None]:
    """While this is entered, new tensors have no values.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``, where the real tensors would be; see :func:`kernel_device`.
        arrays: whether :func:`null_array` has a size; no for comparisons with torch's allocator, which sees no numpy.
    """
    before = _Planned.device_type, _Planned.arrays
    _Planned.device_type, _Planned.arrays = device_type, arrays
    try:
        with _LargestCase():
            yield
    finally:
        _Planned.device_type, _Planned.arrays = before


def lacks_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape only: a :class:`ShapeTensor`, or one of torch's meta or fake tensors."""
    return isinstance(tensor, ShapeTensor) or tensor.is_meta or hasattr(tensor, "fake_mode")


def kernel_device(tensor: Tensor) -> str:
    """Returns the type of the device whose kernels the real tensor would be given to."""
    return _Planned.device_type if isinstance(tensor, ShapeTensor) or tensor.is_meta else tensor.device.type


def fits_numba(*tensors: Tensor) -> bool:
    """Returns whether numba's kernels are for these tensors: float32, on the CPU."""
    return all(kernel_device(tensor) == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def run_kernel(kernel: Callable[..., None], *arguments: Any) -> None:
    """Runs one of numba's kernels on the arrays of tensors and on other arguments, unless a tensor lacks values."""
    if not any(isinstance(value, Tensor) and lacks_values(value) for value in arguments):
        kernel(*(value.detach().contiguous().numpy() if isinstance(value, Tensor) else value for value in arguments))


def chunks(rows: Tensor, size: int) -> list[slice]:
    """Returns consecutive chunks of the rows of a tensor; without values the first one, which stands for all.

    That is right for work that frees the memory of a chunk before the next.
    """
    end = min(size, len(rows)) if lacks_values(rows) else len(rows)
    return [slice(start, start + size) for start in range(0, end, size)]


def null_array(size_bytes: int) -> Tensor:
    """Returns a tensor in place of an array that a numba kernel allocates by numpy."""
    return torch.empty(size_bytes if _Planned.arrays else 0, dtype=torch.uint8)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the meta device."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # or views of tensors that were made before it could not be wrapped
            return _run(function, args, kwargs)
    wrapped: dict[int, Tensor] = {}
    placed = _unwrap(args, wrapped)
    keywords = {name: _unwrap(value, wrapped) for name, value in kwargs.items()}
    if not wrapped:
        if function.namespace != "aten":
            return function(*args, **kwargs)  # such as the profiler's marks
        keywords["device"] = META
    if "generator" in keywords:
        keywords["generator"] = None
    if not _makes_new(function):
        return _wrap(function(*placed, **keywords), wrapped)
    # Many of torch's shape functions are in Python, and a step calls them with the same shapes as the step before.
    key = (function, _key(placed), _key(list(keywords.items())))
    if key not in _results:
        result = function(*placed, **keywords)
        made = result if isinstance(result, tuple) else (result,)
        given, found = ({_storage(one) for one in some if one is not None} for some in (wrapped.values(), made))
        if given & found or len(found) < sum(one is not None for one in made):
            return _wrap(result, wrapped)  # some operators share memory, and their schema does not say so
        _results[key] = [one if one is None else (one.shape, one.stride(), one.dtype) for one in made]
    layouts = _results[key]
    results = [layout and ShapeTensor.of(_empty_strided(*layout)) for layout in layouts]
    return tuple(results) if len(layouts) > 1 else results[0]


_results: dict[Any, list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]] = {}
"""Shape, strides and type of results, by operator and arguments; None for a gradient that nobody wants."""


@functools.cache
def _makes_new(function: Any) -> bool:
    """Whether the results of an operator are new tensors."""
    schema = function._schema
    types = {str(result.type) if result.alias_info is None else "shared" for result in schema.returns}
    return types == {"Tensor"} and not schema.is_mutable


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _key(value: Any) -> Any:
    """What a result depends on: of tensors their layout, of numbers the type too, as 1 and 1.0 are equal."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _unwrap(value: Any, wrapped: dict[int, Tensor]) -> Any:
    """Replaces tensors by those of the meta device, and notes whose they are."""
    if isinstance(value, Tensor):
        meta = value.meta if isinstance(value, ShapeTensor) else _meta(value)
        wrapped[id(meta)] = value
        return meta
    if isinstance(value, (list, tuple)):
        return [_unwrap(item, wrapped) for item in value]
    return META if isinstance(value, torch.device) else value


def _wrap(value: Any, wrapped: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        changed = wrapped.get(id(value))  # in place
        return ShapeTensor.of(value) if changed is None else changed
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(item, wrapped) for item in value)
    return value


def _meta(tensor: Tensor) -> Tensor:
    return _empty_strided(tensor.shape, tensor.stride(), tensor.dtype)


def _empty_strided(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)


def _empty(shape: Any, dtype: torch.dtype) -> ShapeTensor:
    return ShapeTensor.of(torch.empty(shape, dtype=dtype, device=META))


def list_tensors(values: Any) -> list[Tensor]:
    """Returns the tensors in nested lists and tuples, in order."""
    result: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, (tuple, list)):
            result += list_tensors(value)
    return result


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _replace_masks(indices: Any) -> list[Tensor | None]:
    """Replaces masks by the rows that they select: all."""
    rows: list[Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            rows += [_empty(index.numel(), torch.int64)] * index.dim()
        else:
            rows.append(index)
    return rows
