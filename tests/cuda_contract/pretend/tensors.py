"""CUDA tensors without CUDA: they say they are on a GPU, and hold their numbers in the memory of the CPU.

Where torch's FakeTensorMode has shapes and types only, these have values too, so that what CUDA code computes can be
compared with the truth. Operators on tensors of both devices and numpy views of CUDA tensors fail as they do on a GPU.

What torch's core is told about the device decides what can be had besides:

- ``autocast``: the core believes in CUDA, so that CUDA's autocast is at work. There is no backward pass: autograd asks
  CUDA's driver for its streams.
- ``backward``: the core believes in the CPU, and Python code in CUDA. Whole steps of training run, with backward pass
  and optimisers, in float32.

Tensors of more than ``most_values`` numbers may have a shape only: then steps of full size take seconds. Masks select
everything there, and numbers read from there are 1.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from f3rm_ext.memory.shapes import list_tensors
from pretend.ledger import note_launch, note_operator, note_wait, uncounted

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
GIB = 1 << 30
BOTH_DEVICES = (aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""Operators that take tensors of both devices."""
on_the_cpu = _disable_current_modes
"""While this is entered, plain tensors have nothing to do with what is pretended: for truths to compare with."""
Told = Literal["autocast", "backward"]


class _State:
    page_locked: dict[int, torch.Tensor] = {}  # noqa: RUF012  # by address; kept, so that no other tensor gets it
    generators: dict[int, str] = {}  # noqa: RUF012  # type of device by the address of torch's core
    entered = 0
    told = CUDA
    most_values: int | None = None


class PretendCuda(torch.Tensor):
    """A tensor that says it is on ``cuda:0``."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "PretendCuda":
        """Makes one around a CPU tensor, or around a meta tensor where only the shape counts."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=_State.told
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Always the same."""
        return CUDA

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        """Index of the device."""
        return 0

    def numpy(self, *, force: bool = False) -> Any:
        """What torch says of real ones."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        """Values, as of real ones."""
        note_wait("copy to the host")
        return _ones(self.held).tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendCuda({self.held!r})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers in Python what torch's core would answer by the device that it was told."""
        if function is torch.Tensor.backward:
            # Not inside the context, which would also hold for the code of backward passes.
            return _backward(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if function == _SET_DATA:
                args[0].held = args[1].held
            if function in _MOVES and _State.told == CPU:
                return _MOVES[function](*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator on what the tensors hold."""
        return _run(function, args, kwargs or {})


class PretendCudaMode(TorchDispatchMode):
    """While this is entered, tensors can be made on and moved to ``cuda``."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator on what the tensors hold."""
        return _run(function, args, kwargs or {})


# --- moves between the devices, where torch's core believes that there is only one -----------------------------------


class _Download(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        note_wait("copy to the host")
        return _ones(tensor.held).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return PretendCuda(grads[0])


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if "other" in kwargs or (args and isinstance(args[0], torch.Tensor)):
        other = kwargs.pop("other", None)
        other = args[0] if other is None else other
        device, dtype = other.device, other.dtype
    else:
        copy = kwargs.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        kwargs["copy"] = copy
        device = tensor.device if device is None else device
    options = {name: kwargs[name] for name in ("non_blocking", "copy") if name in kwargs}
    if isinstance(tensor, PretendCuda) and device.type == "cpu":
        found = _Download.apply(tensor)
        return found if dtype is None else torch.Tensor.to(found, dtype)
    if isinstance(tensor, PretendCuda):
        return torch.Tensor.to(tensor, tensor.dtype if dtype is None else dtype, **options)
    return torch.Tensor.to(tensor, device, tensor.dtype if dtype is None else dtype, **options)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda tensor, **_: _to(tensor, "cpu"),
    torch.Tensor.cuda: lambda tensor, *_, **__: _to(tensor, CUDA),
    torch.Tensor.type_as: _to,
    torch.Tensor.new_tensor: lambda tensor, data, *, dtype=None, device=None, **_: torch.tensor(
        data, dtype=tensor.dtype if dtype is None else dtype, device=tensor.device if device is None else device
    ),
}


# --- operators -------------------------------------------------------------------------------------------------------


def _mapped(change: Any, value: Any) -> Any:
    """Arguments or results with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, item) for item in value)
    return value


def _held(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.held if isinstance(leaf, PretendCuda) else leaf


def _ones(held: torch.Tensor) -> torch.Tensor:
    """Values, 1 where there is only a shape."""
    return torch.ones(held.shape, dtype=held.dtype) if held.is_meta else held


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator, on the CPU; its results are on CUDA where its tensors are or where it is told so."""
    tensors = list_tensors(args)
    if kwargs:
        tensors += list_tensors(tuple(kwargs.values()))
    there = [isinstance(leaf, PretendCuda) for leaf in tensors]
    operator = function.overloadpacket
    if any(there) and operator not in BOTH_DEVICES:
        # As on a GPU, a single number on the CPU goes with everything.
        if any(not here and leaf.dim() for leaf, here in zip(tensors, there, strict=True)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {function} got cuda:0 and cpu.")
    wanted = kwargs.get("device")
    if wanted is None:
        on_cuda = there[0] if operator is aten.copy_ else any(there)
    else:
        on_cuda = torch.device(wanted).type == "cuda" or _in_formula()
        kwargs = {**kwargs, "device": CPU}
    page_locked = bool(kwargs.get("pin_memory"))
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": False}
    if kwargs.get("generator") is not None:
        _check_generator(kwargs["generator"], on_cuda)
    if operator is aten._to_copy and wanted is not None and there[0] and on_cuda:
        held = tensors[0].held  # type: ignore[attr-defined]
        if kwargs.get("dtype", held.dtype) == held.dtype:
            return PretendCuda(held)
    if any(there) or on_cuda:
        _note(function, args, kwargs, tensors, there, on_cuda)
    inputs: dict[int, PretendCuda] = {id(leaf.held): leaf for leaf in tensors if isinstance(leaf, PretendCuda)}
    held_args, held_kwargs = _mapped(_held, args), {name: _mapped(_held, value) for name, value in kwargs.items()}
    if _State.most_values is not None and on_cuda | any(there):
        found = _sized(function, held_args, held_kwargs, inputs)
    else:
        found = function(*held_args, **held_kwargs)
    if not on_cuda:
        return _lock(found) if page_locked else _mapped(_ones, found)
    # An operator that changes its input gives that very input back.
    return _mapped(lambda leaf: _found(leaf, inputs), found)


def _check_generator(generator: torch.Generator, on_cuda: bool) -> None:
    place, wanted = _State.generators.get(generator._cdata, "cpu"), "cuda" if on_cuda else "cpu"  # type: ignore[attr-defined]
    if place != wanted:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{place}'")


def _lock(tensor: torch.Tensor) -> torch.Tensor:
    _State.page_locked[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if isinstance(tensor, PretendCuda):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor if is_page_locked(tensor) else _lock(tensor.clone())


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the CPU is in page-locked memory, from which a GPU copies by itself."""
    return tensor.untyped_storage().data_ptr() in _State.page_locked


def _in_formula() -> bool:
    """Whether a formula of autograd asks for a new tensor: where its gradient is, which it takes for the CPU."""
    if _State.told != CPU:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith((__file__, "_dynamo/eval_frame.py", "_compile.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("autograd/graph.py")


def _found(held: torch.Tensor, inputs: dict[int, PretendCuda]) -> PretendCuda:
    return inputs[id(held)] if id(held) in inputs else PretendCuda(held)


def _note(function: Any, args: Any, kwargs: Any, tensors: list[Any], there: list[bool], on_cuda: bool) -> None:
    operator = function.overloadpacket
    moves = operator in (aten.copy_, aten._to_copy) and (not all(there) or not on_cuda)
    if moves:
        waits = not kwargs.get("non_blocking", len(args) > 2 and operator is aten.copy_ and args[2])
        if on_cuda and not waits:
            source = args[1] if operator is aten.copy_ else args[0]
            # The host itself copies from other memory, whatever it is told.
            waits = not is_page_locked(source)
        # A single number is handed over with the kernel.
        if operator is aten.copy_ and on_cuda and args[1].dim() == 0:
            waits = False
        if waits:
            note_wait("copy to the GPU" if on_cuda else "copy to the host")
        note_launch("copy to the GPU" if on_cuda else "copy to the host")
        return
    masks = any(
        here and leaf.dtype in (torch.bool, torch.uint8) for leaf, here in zip(tensors[1:], there[1:], strict=True)
    )
    note_operator(function, args, masks)


# --- shapes without values -------------------------------------------------------------------------------------------


def _sized(function: Any, args: Any, kwargs: Any, inputs: dict[int, PretendCuda]) -> Any:
    """Runs an operator on meta tensors where one of its tensors is one or where its result is large."""
    leaves = list_tensors((args, tuple(kwargs.values())))
    most = _State.most_values or 0
    if not any(leaf.is_meta for leaf in leaves):
        large = any(leaf.numel() > most for leaf in leaves)
        if not large:
            tried = _on_meta(function, args, kwargs, {}) if not leaves else None
            if tried is None or all(leaf.numel() <= most for leaf in list_tensors((tried,))):
                return function(*args, **kwargs)
    return _on_meta(function, args, kwargs, inputs)


def _on_meta(function: Any, args: Any, kwargs: dict[str, Any], inputs: dict[int, PretendCuda]) -> Any:
    operator = function.overloadpacket
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    kwargs = {name: None if name == "generator" else value for name, value in kwargs.items() if name != "pin_memory"}

    def sized(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or (leaf.dim() == 0 and id(leaf) not in inputs):
            return leaf
        empty = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        if id(leaf) in inputs:
            inputs[id(empty)] = inputs[id(leaf)]
            kept.append(empty)
        return empty

    kept: list[torch.Tensor] = []
    with uncounted():
        first = args[0] if args else None
        if operator is aten._local_scalar_dense:
            return torch.ones((), dtype=first.dtype).item()
        if operator in (aten.nonzero,):
            return torch.empty(first.numel(), max(first.dim(), 1), dtype=torch.int64, device="meta")
        if operator in (aten.masked_select,):
            return torch.empty(first.numel(), dtype=first.dtype, device="meta")
        if operator is aten._unique2:
            index = torch.empty(first.numel(), dtype=torch.int64, device="meta")
            return torch.empty(first.numel(), dtype=first.dtype, device="meta"), index, index
        args, kwargs = _mapped(sized, args), {name: _mapped(sized, value) for name, value in kwargs.items()}
        if operator in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices: list[Any] = []
            for index in args[1]:
                if index is not None and index.dtype == torch.bool:
                    row = torch.empty(index.numel(), dtype=torch.int64, device="meta")
                    indices += [row] * index.dim()
                else:
                    indices.append(index)
            args = (args[0], indices, *args[2:])
            if operator is not aten.index:
                return args[0] if function._schema.name.endswith("_") else torch.empty_like(args[0])
        return function(*args, **kwargs)


# --- the GPU ---------------------------------------------------------------------------------------------------------


class _Generator(torch.Generator):
    """A generator of any device, whose numbers are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls)
        made.place = torch.device(device)  # type: ignore[attr-defined]
        # Operators are given another Python object of the same generator.
        _State.generators[made._cdata] = made.place.type  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self.place.type == "cuda" else self.place  # type: ignore[attr-defined]


class _Stream:
    """A stream or an event: everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> "_Stream":
        return _Stream()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait("synchronize")

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...


def _run_thread(thread: threading.Thread) -> None:
    torch._C._set_only_lift_cpu_tensors(True)  # each thread has its own
    with PretendCudaMode():
        _THREAD_RUN(thread)


def _enter_inference(mode: Any) -> None:
    """Takes ``no_grad`` instead: wrappers of tensors cannot be made in inference mode."""
    mode.instead = torch.no_grad()
    mode.instead.__enter__()


def _exit_inference(mode: Any, *error: Any) -> None:
    mode.instead.__exit__(*error)


def _grouped(lists: Any, with_indices: bool = False) -> Any:
    """Groups tensors as torch does, by the device that they say."""
    groups = _GROUPED(lists, with_indices)
    pretended = any(isinstance(tensor, PretendCuda) for tensor in lists[0])
    return {(CUDA if pretended else device, dtype): found for (device, dtype), found in groups.items()}


_GROUPED = torch.optim.Optimizer._group_tensors_by_device_and_dtype
_FOREACH: list[Any] = [sys.modules["torch.optim.optimizer"], sys.modules["torch.utils._foreach_utils"]]
_THREAD_RUN = threading.Thread.run
_DRIVER = {
    "Event": _Stream,
    "Stream": _Stream,
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "device": lambda *_: nullcontext(),
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_device_capability": lambda *_: (8, 9),
    "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8),
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,
    "max_memory_allocated": lambda *_: GIB,
    "max_memory_reserved": lambda *_: GIB,
    "mem_get_info": lambda *_: (20 * GIB, 24 * GIB),
    "memory_stats_as_nested_dict": lambda *_: {
        f"{kind}_bytes": {"all": {"current": GIB, "peak": GIB}} for kind in ("active", "allocated", "reserved")
    },
    "memory_stats": lambda *_: {},
    "memory_allocated": lambda *_: GIB,
    "memory_reserved": lambda *_: GIB,
    "reset_peak_memory_stats": lambda *_: None,
    "set_device": lambda *_: None,
    "set_rng_state": lambda *_: None,
    "stream": lambda *_: nullcontext(),
    "synchronize": lambda *_: note_wait("synchronize"),
}


@contextmanager
def pretended(told: Told = "autocast", most_values: int | None = None) -> Iterator[torch.device]:
    """A CUDA device that is none, with 20 of 24 GiB free.

    Args:
        told: what torch's core is to do, see above; gradients are off with ``autocast``.
        most_values: tensors with more numbers have a shape only; None for none.
    """
    torch._C._ensureCUDADeviceGuardSet()
    lifted = torch._C._only_lift_cpu_tensors()
    before = _State.told, _State.most_values
    _State.entered += 1
    _State.told, _State.most_values = (CUDA if told == "autocast" else CPU), most_values
    gradients = torch.no_grad() if told == "autocast" else nullcontext()
    with mock.patch.object(torch, "Generator", _Generator), gradients, PretendCudaMode(), ExitStack() as stack:
        # As FakeTensorMode does: torch is not to look for a driver.
        torch._C._set_only_lift_cpu_tensors(True)
        patches: list[Any] = [
            mock.patch.object(torch.Tensor, "pin_memory", _pin),
            mock.patch.object(torch.Tensor, "record_stream", lambda tensor, *_: None),
            # Optimisers take their form for many tensors for torch's own classes only.
            mock.patch.object(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(_grouped)),
            mock.patch.object(torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", _grouped),
            *(
                mock.patch.object(module, "_foreach_supported_types", [*module._foreach_supported_types, PretendCuda])
                for module in _FOREACH
            ),
            mock.patch.object(torch.autograd, "has_torch_function", lambda *_: False),
            mock.patch.object(torch.inference_mode, "__enter__", _enter_inference),
            mock.patch.object(torch.inference_mode, "__exit__", _exit_inference),
            mock.patch.object(threading.Thread, "run", _run_thread),
            # A module that is moved gets new parameters: the old ones would only take over the device.
            mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True),
        ]
        if not torch.cuda.is_available():
            patches += [mock.patch.object(torch.cuda, name, value) for name, value in _DRIVER.items()]
        for patch in patches:
            stack.enter_context(patch)
        try:
            yield CUDA
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            _State.told, _State.most_values = before
            _State.entered -= 1
            if not _State.entered:
                _State.page_locked.clear()


def is_pretended() -> bool:
    """Whether there is a pretended GPU at present."""
    return _State.entered > 0


@contextmanager
def autocast(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """``torch.autocast("cuda")``, which torch turns off where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
