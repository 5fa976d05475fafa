"""Imports made shorter, or put off until they are used: planning uses little of what nerfstudio's trainer imports."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any


class _Later(ModuleType):
    """A module whose code runs when it is asked for a name that it does not have."""

    def __getattr__(self, name: str) -> Any:
        assert self.__spec__ is not None and self.__spec__.loader is not None
        folders = self.__spec__.submodule_search_locations
        if name == "__path__" and folders is None:
            raise AttributeError(name)  # asked of every module that something is imported from
        self.__class__ = ModuleType  # type: ignore[assignment]
        if folders is not None:
            self.__path__ = folders
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_later(
    name: str, *, names: Mapping[str, Any] | None = None, submodule: str | None = None, path: bool = False
) -> None:
    """Has a module import nothing before it is used, unless it is imported already or is not there.

    Args:
        names: what may be imported from it, or called, without importing the rest; see :func:`_defer`.
        submodule: of a package, imported at once without the rest of the package.
        path: whether other submodules may be imported without the package, too. ``from package import name`` asks for
            the path first, so names of a package can only be imported from it with this.
    """
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # whoever needs it will say so
        spec = None
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    module.__dict__.update(names or {})
    if submodule is not None:
        importlib.import_module(f"{name}.{submodule}")
    if not path:
        module.__dict__.pop("__path__", None)
    module.__class__ = _Later


def shorten_imports() -> None:
    """Leaves out what plans do not use: the viewer, splatfacto for it, tensorboard, torchvision's models and torch's
    compiler, which optimisers load to tell it what not to compile.

    Must be called before nerfstudio's trainer is imported. What is used all the same is imported then.
    """
    for module, name in (
        ("nerfstudio.viewer.viewer", "Viewer"),
        ("nerfstudio.viewer_legacy.server.viewer_state", "ViewerLegacyState"),
        ("torch.utils.tensorboard", "SummaryWriter"),
    ):
        import_later(module, names={name: _defer(module, name)}, path=module.startswith("torch"))
    import_later("torchvision", submodule="utils")
    import_later("requests")
    import_later("torch._dynamo", names={"disable": lambda fn, *_, **__: fn, "graph_break": lambda *_, **__: None})


def shorten_registration() -> None:
    """Spares every command of nerfstudio 2 to 3 s of reading source while its methods are registered.

    For each of the 26 methods that it can install it asks for the names of its callers by ``inspect.stack``, which
    looks for the module and the lines of each of them. Safe to call twice.
    """
    from nerfstudio.configs import external_methods

    if getattr(external_methods, "inspect", None) is inspect:
        external_methods.inspect = SimpleNamespace(stack=_callers)  # type: ignore[assignment]


def _callers() -> list[SimpleNamespace]:
    """The names of the caller's function and those around it, as ``inspect.stack`` has them, without their source."""
    frame, callers = sys._getframe(1), []
    while frame is not None:
        callers.append(SimpleNamespace(function=frame.f_code.co_name))
        frame = frame.f_back
    return callers


def _defer(module: str, name: str) -> Callable[..., Any]:
    """Returns a stand-in for a class of a module that is imported later: calling it imports the module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        vars(sys.modules[module]).pop(name)
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call
