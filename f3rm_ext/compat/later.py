"""Imports put off until they are used: planning uses little of what nerfstudio's trainer imports."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
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


def import_later(name: str, *, class_name: str | None = None, submodule: str | None = None) -> None:
    """Has a module import nothing before it is used, unless it is imported already or is not there.

    Args:
        name: of the module.
        class_name: a class of it that may be imported, and counts as used when it is called.
        submodule: of a package, imported at once without the rest of the package.
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
    if class_name is not None:
        setattr(module, class_name, _called(module, class_name))
    if submodule is not None:
        importlib.import_module(f"{name}.{submodule}")
    module.__dict__.pop("__path__", None)  # other submodules need the whole package
    module.__class__ = _Later


def shorten_imports() -> None:
    """Leaves out what plans do not use: the viewer, splatfacto for it, and torchvision's models.

    Must be called before nerfstudio's trainer is imported. What is used all the same is imported then.
    """
    import_later("nerfstudio.viewer.viewer", class_name="Viewer")
    import_later("nerfstudio.viewer_legacy.server.viewer_state", class_name="ViewerLegacyState")
    import_later("torchvision", submodule="utils")


def _called(module: ModuleType, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        module.__dict__.pop(name)
        return getattr(module, name)(*args, **kwargs)

    return call
