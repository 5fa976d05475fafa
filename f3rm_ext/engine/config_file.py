"""Reads config.yml without running anything that it names.

Nerfstudio reads it with a YAML loader that imports and calls whatever the file names. Here, values come from an allow
list: config dataclasses and enums of nerfstudio and of installed methods (filled in, never called), paths, tuples and
plain values. A class or function is accepted only where the installed config has one of the same kind by default.
"""

import dataclasses
import enum
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_origin

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from f3rm_ext.compat import method_packages
from f3rm_ext.errors import ConfigError

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig

HINT = "give the config.yml of a run, made by a method that is installed here"

_YAML = "tag:yaml.org,2002:"
_TUPLE, _NAME, _OBJECT, _CALL = (f"{_YAML}python/{kind}" for kind in ("tuple", "name:", "object:", "object/apply:"))
_PLAIN = {_YAML + kind for kind in ("null", "bool", "int", "float", "str", "binary", "timestamp")}
_GETATTR = "builtins.getattr"
_PATHS = {
    f"{module}.{name}"
    for module in ("pathlib", "pathlib._local")
    for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
}
_GENERIC = f"{_CALL}_operator.getitem"
"""How a class with a type parameter is written: `VanillaDataManager[DepthDataset]`."""
_OPTIMIZERS = "torch.optim"
"""The only module of another package whose classes configs name."""


class _Unfit(Exception):
    """The file is not the config of a run; the message completes "is not understood (...)"."""


class _UnsafeConfig(Exception):
    """The file names something that is not on the allow list; the message completes "is refused, because ..."."""


class _Place(NamedTuple):
    owner: type
    name: str
    default: Any
    """Its default in the installed class; ``dataclasses.MISSING`` if there is none."""


def read_config(path: Path) -> "TrainerConfig":
    """Reads the options of a run, without calling what the file names or importing foreign modules.

    Options that the file lacks, as files of older runs do, get their defaults. Options that no longer exist are left
    out.

    Raises:
        ConfigError: there is no such file, it is not such a config, or it names what belongs to no config of nerfstudio
            or of an installed method.
    """
    from nerfstudio.engine.trainer import TrainerConfig

    if not path.is_file():
        what = f"{path} is a folder" if path.is_dir() else f"There is no file {path}"
        raise ConfigError(f"{what}: give the config.yml that ns-train wrote for a run.")
    try:
        node = yaml.compose(path.read_text("utf8"), Loader=yaml.SafeLoader)
        config = None if node is None else _Builder(method_packages()).build(node)
        if not isinstance(config, TrainerConfig):
            raise _Unfit("it holds no options of a training")
    except _UnsafeConfig as error:
        raise ConfigError(f"{path} is refused, because {error}: {HINT}.") from None
    except (_Unfit, OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Unfit) else type(error).__name__
        raise ConfigError(f"{path} is not understood ({reason}): {HINT}.") from error
    return config


class _Builder:
    """Builds values from YAML nodes.

    Args:
        packages: top-level packages whose config classes may be used.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages
        self._plain = SafeConstructor()
        self._built: dict[int, Any] = {}
        self._unfinished: set[int] = set()

    def build(self, node: Node, place: _Place | None = None) -> Any:
        """Returns the value of a node; the same object for all its aliases.

        Args:
            node: a node of the file, which must outlive the builder.
        """
        if node.tag == _GENERIC or node.tag.startswith(_NAME):
            value = self._resolve(node, place)  # depends on the place, so it is built anew for each alias
        elif id(node) in self._built:
            value = self._built[id(node)]
        elif id(node) in self._unfinished:
            raise _Unfit(f"line {_line(node)} contains itself")
        else:
            self._unfinished.add(id(node))
            value = self._built[id(node)] = self._value(node)
        if place is not None:
            self._check_kind(node, value, place)
        return value

    def _value(self, node: Node) -> Any:
        if isinstance(node, ScalarNode) and node.tag in _PLAIN:
            return self._scalar(node)
        if isinstance(node, SequenceNode):
            if node.tag == f"{_YAML}seq":
                return [self.build(item) for item in node.value]
            if node.tag == _TUPLE:
                return tuple(self.build(item) for item in node.value)
            if node.tag.startswith(_CALL):
                return self._path_or_enum(node)
        if isinstance(node, MappingNode):
            if node.tag == f"{_YAML}map":
                return {self._key(key): self.build(value) for key, value in node.value}
            if node.tag == f"{_YAML}set":
                return {self._key(key) for key, _ in node.value}
            if node.tag.startswith(_OBJECT):
                return self._config(node)
        self._refuse(node)

    def _scalar(self, node: Node) -> Any:
        try:
            return self._plain.construct_object(node)
        except (ConstructorError, ValueError, LookupError, ArithmeticError) as error:
            raise _Unfit(f"line {_line(node)} has no value") from error

    def _key(self, node: Node) -> Any:
        if not isinstance(node, ScalarNode) or node.tag not in _PLAIN:
            self._refuse(node)
        return self._scalar(node)

    # --- objects -----------------------------------------------------------------------------------------------------

    def _config(self, node: MappingNode) -> Any:
        """Returns an instance of a config class, filled in as unpickling would do, but with declared fields only."""
        kind = self._lookup(node, node.tag[len(_OBJECT) :])
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and self._is_config(kind)):
            self._refuse(node)
        nodes: dict[str, Node] = {}
        for key, value in node.value:
            name = self._key(key)
            if not isinstance(name, str):
                raise _Unfit(f"line {_line(key)} is no option")
            nodes[name] = value
        config = object.__new__(kind)
        for field in dataclasses.fields(kind):
            default = _default(field)
            if field.name in nodes:
                default = self.build(nodes.pop(field.name), _Place(kind, field.name, default))
            elif default is dataclasses.MISSING:
                raise _Unfit(f"line {_line(node)} lacks {field.name}")
            object.__setattr__(config, field.name, default)  # frozen ones too
        for value in nodes.values():  # options that no longer exist are checked too, and left out
            self.build(value)
        return config

    def _is_config(self, kind: type) -> bool:
        from nerfstudio.configs.base_config import PrintableConfig

        package = _package(kind.__module__)
        return package in self._packages and (package != "nerfstudio" or issubclass(kind, PrintableConfig))

    def _path_or_enum(self, node: SequenceNode) -> Any:
        name = node.tag[len(_CALL) :]
        if name == _GETATTR:
            return self._member(node)
        values = [self._key(item) for item in node.value]
        if name in _PATHS:
            if not all(isinstance(part, str) for part in values):
                raise _Unfit(f"line {_line(node)} is no path")
            return Path(*values)
        kind = self._enum(node, name)
        known = {member.value: member for member in kind if isinstance(member.value, str | int | float)}
        if len(values) != 1 or values[0] not in known:
            raise _Unfit(f"line {_line(node)} is no {kind.__name__}")
        return known[values[0]]

    def _member(self, node: SequenceNode) -> enum.Enum:
        """Returns the member of an enumeration in the words of Python 3.11.0 to 3.11.3: its class and its name."""
        if len(node.value) != 2 or not node.value[0].tag.startswith(_NAME):
            self._refuse(node)
        kind, name = self._enum(node, node.value[0].tag[len(_NAME) :]), self._key(node.value[1])
        if name not in kind.__members__:
            raise _Unfit(f"line {_line(node)} is no {kind.__name__}")
        return kind.__members__[name]

    def _enum(self, node: Node, name: str) -> type[enum.Enum]:
        kind = self._lookup(node, name)
        if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and _package(kind.__module__) in self._packages):
            self._refuse(node)
        return kind

    # --- classes and functions ---------------------------------------------------------------------------------------

    def _resolve(self, node: Node, place: _Place | None) -> Any:
        """Returns a class or function, if the installed config has one of its kind in the same place."""
        if node.tag != _GENERIC:
            value = self._class_or_function(node)
            if place is None or not (value is place.default or self._is_related(value, place.default)):
                self._refuse(node, where=place)
            return value
        if not (isinstance(node, SequenceNode) and len(node.value) == 2 and node.value[0].tag.startswith(_NAME)):
            self._refuse(node)
        generic, parameter = node.value
        origin = self._resolve(generic, place)
        inner = parameter.value if parameter.tag == _TUPLE else [parameter]
        if not (isinstance(origin, type) and all(part.tag.startswith(_NAME) for part in inner)):
            self._refuse(node)
        parameters = tuple(self._class_or_function(part) for part in inner)
        try:
            return origin[parameters]  # type: ignore[index]
        except TypeError as error:
            raise _Unfit(f"line {_line(node)} is no class") from error

    def _class_or_function(self, node: Node) -> Any:
        if not isinstance(node, ScalarNode) or node.value:
            self._refuse(node)
        value = self._lookup(node, node.tag[len(_NAME) :])
        if not callable(value) or not self._is_known(getattr(value, "__module__", None)):
            self._refuse(node)
        return value

    def _is_related(self, value: Any, default: Any) -> bool:
        """Returns whether a class derives from a known base of the default: of nerfstudio, a method or torch.optim."""
        default = get_origin(default) or default
        if not (isinstance(value, type) and isinstance(default, type)):
            return False
        return any(issubclass(value, parent) for parent in default.__mro__ if self._is_known(parent.__module__))

    def _check_kind(self, node: Node, value: Any, place: _Place) -> None:
        """Checks that a config stands where one of its kind does by default, because its ``setup`` will be called."""
        from nerfstudio.configs.base_config import InstantiateConfig, PrintableConfig

        default = place.default
        if not dataclasses.is_dataclass(default) or isinstance(default, type) or value is None:
            return
        parents = {kind for kind in type(default).__mro__ if self._is_known(kind.__module__)}
        if not isinstance(value, tuple(parents - {InstantiateConfig, PrintableConfig})):  # every config is one of these
            raise _Unfit(f"line {_line(node)} is no value of {place.name}")

    def _lookup(self, node: Node, name: str) -> Any:
        """Returns what a dotted name stands for; imports our and nerfstudio's modules, others must be imported."""
        module_name, _, attribute = name.rpartition(".")
        if not self._is_known(module_name):
            self._refuse(node)
        if module_name not in sys.modules and _package(module_name) in ("nerfstudio", _package(__name__)):
            try:
                importlib.import_module(module_name)
            except ImportError as error:
                raise _Unfit(_describe_missing(node, name)) from error
        module = sys.modules.get(module_name)
        if module is None or not hasattr(module, attribute):
            raise _Unfit(_describe_missing(node, name))
        return getattr(module, attribute)

    def _is_known(self, module: Any) -> bool:
        if not isinstance(module, str):
            return False
        return _package(module) in self._packages or module == _OPTIMIZERS or module.startswith(f"{_OPTIMIZERS}.")

    def _refuse(self, node: Node, where: _Place | None = None) -> NoReturn:
        name = node.tag.removeprefix(f"{_YAML}python/").rpartition(":")[2]
        place = f" as {where.name} of {where.owner.__name__}" if where is not None else ""
        raise _UnsafeConfig(
            f"line {_line(node)} asks for {_printable(name)}{place}, which no config of nerfstudio or of an installed "
            "method has there and which could run any code"
        )


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _package(module: str) -> str:
    return module.partition(".")[0]


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def _describe_missing(node: Node, name: str) -> str:
    """Says that a class or function is not installed; classes of this package had other names before."""
    text = f"line {_line(node)} names {_printable(name)}, which is not here"
    if _package(name) == _package(__name__):
        text += "; an earlier version of f3rm_ext may have trained the run: install that version, or train again"
    return text


def _printable(name: str) -> str:
    """Returns a name from the file for the terminal: short, on one line, without control characters."""
    return (name if name.isprintable() else ascii(name))[:100]
