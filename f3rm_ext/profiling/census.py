"""Counts the tensors of a run: each storage once, in the category of its owner.

Owners are asked by reference, since flags of a tensor do not tell: a parameter that has a gradient stays a parameter,
its gradient is a tensor of its own, and moments are the optimiser's. What no owner names is found by a scan of Python's
objects and counts as "other".
"""

import gc
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import FunctionType, MethodType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

Category = Literal["parameters", "gradients", "optimizer", "buffers", "images", "features", "other"]
"""Those of :data:`f3rm_ext.memory.estimate.Category` that outlive a step, and "other": tensors without an owner."""
CATEGORIES: tuple[Category, ...] = get_args(Category)

_KINDS: tuple[tuple[str, str], ...] = (
    ("harmonics", r"features_(dc|rest)\b"),
    ("points", r"gauss_params\.(free_)?means\b"),
    ("scales", r"gauss_params\.(free_)?scales\b"),
    ("quaternions", r"gauss_params\.(free_)?quats\b"),
    ("vertices", r"gauss_params\.vertices\b"),
    ("turns", r"gauss_params\.turns\b"),
    ("opacities", r"gauss_params\.opacities\b"),
    ("hash tables", r"\.table\b|encoding\.params\b"),
    ("camera poses", r"camera_optimizer|pose_adjustment"),
    ("appearance", r"appearance|embedding"),
    ("feature heads", r"heads?\."),
    ("MLPs", r"\.(weight|bias)\b"),
)
"""Named tensors, by a part of the name of their parameter; the first that fits."""
REST = "rest"
_WALKED = ("f3rm_ext", "nerfstudio")
_NOT_WALKED = ("f3rm_ext.engine", "nerfstudio.engine", "nerfstudio.viewer")
"""Elements of the viewer lead to the trainer, and so to everything."""
_MOST_OBJECTS = 100_000


class TensorStorage(NamedTuple):
    """A storage, by the first tensor that was found on it."""

    name: str
    """Path from its owner, such as ``gradient of gauss_params.means``."""
    category: Category
    kind: str
    """Name of its parameter's group, such as "harmonics"; "rest" for all others."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Size of the storage."""
    device: str
    """Type of its device."""


def parameter_group(name: str) -> str:
    """Returns the group that a parameter belongs to, by its name.

    >>> parameter_group("gauss_params.features_rest"), parameter_group("field.grid.table")
    ('harmonics', 'hash tables')
    """
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), REST)


class Census:
    """Tensors found so far."""

    def __init__(self) -> None:
        self.storages: list[TensorStorage] = []
        self._seen: set[tuple[str, int]] = set()

    def add(self, tensor: Tensor, name: str, category: Category, kind: str = REST) -> None:
        """Counts a tensor, unless its storage was counted before or it has none."""
        key = storage_key(tensor)
        if key is None or key in self._seen:
            return
        self._seen.add(key)
        dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.untyped_storage().nbytes()
        self.storages.append(TensorStorage(name, category, kind, dtype, tuple(tensor.shape), size, tensor.device.type))

    def add_strays(self) -> None:
        """Counts tensors that Python holds and no owner has named."""
        is_tensor: dict[type, bool] = {}
        for item in gc.get_objects():
            # Not isinstance, which asks objects for their class: dead weak proxies raise an error then.
            kind = type(item)
            known = is_tensor.get(kind)
            if known is None:
                known = is_tensor[kind] = issubclass(kind, Tensor)
            if known:
                self.add(item, f"unnamed {str(item.dtype).removeprefix('torch.')} {list(item.shape)}", "other")


def storage_key(tensor: Tensor) -> tuple[str, int] | None:
    """Returns what identifies the memory of a tensor; None if it has no memory of its own."""
    if isinstance(tensor, FakeTensor):
        return None
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse or without storage
        return None
    return (str(tensor.device), address) if address else None


def take_census(
    model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], datamanager: object
) -> list[TensorStorage]:
    """Lists all tensors of a run, and those of Python's objects that nothing of it holds."""
    census, names = Census(), {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        census.add(parameter, name, "parameters", parameter_group(name))
    for parameter, name in names.items():
        # Packed gradients are attributes of their parameter.
        for part, tensor in reachable({"gradient": parameter.grad, **vars(parameter)}):
            census.add(tensor, f"{part.replace('_', ' ')} of {name}", "gradients", parameter_group(name))
    for group, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            owner = names.get(parameter, group)
            for part, tensor in reachable(state):
                census.add(tensor, f"{part} of {owner}", "optimizer", parameter_group(owner))
    for name, tensor in reachable(datamanager):
        census.add(tensor, name, "features" if "feature" in name or "_sources" in name else "images")
    for name, tensor in reachable(model):
        census.add(tensor, name, "buffers")
    census.add_strays()
    return census.storages


def reachable(root: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that an object holds, with the path to each, nearest first.

    Follows containers and the attributes of modules, of our and nerfstudio's objects and of results of background work;
    no functions, and nothing twice.
    """
    queue: deque[tuple[str, object]] = deque([("", root)])
    seen: set[int] = set()
    while queue and len(seen) < _MOST_OBJECTS:
        path, item = queue.popleft()
        if isinstance(item, Tensor):
            yield path, item
        elif id(item) not in seen:
            seen.add(id(item))
            queue.extend(
                (f"{path}.{name}".strip("."), value)
                for name, value in _parts(item)
                if not isinstance(value, _PLAIN) and value is not None
            )


_PLAIN = (str, bytes, int, float, type, FunctionType, MethodType)


def _parts(item: object) -> Iterable[tuple[object, object]]:
    if isinstance(item, Mapping):
        return [(key if isinstance(key, str) else index, value) for index, (key, value) in enumerate([*item.items()])]
    if isinstance(item, list | tuple | set | deque):
        return list(enumerate([*item]))
    if isinstance(item, Future):
        loaded = item.done() and not item.cancelled() and item.exception() is None
        return [("loaded", item.result())] if loaded else []
    module = type(item).__module__
    if isinstance(item, nn.Module) or (module.startswith(_WALKED) and not module.startswith(_NOT_WALKED)):
        attributes = dict(getattr(item, "__dict__", {}))
        for name in ("_parameters", "_buffers", "_modules"):
            attributes |= attributes.pop(name, None) or {}
        return list(attributes.items())
    return []
