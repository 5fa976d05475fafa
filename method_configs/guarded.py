"""Registration that cannot break another method.

Nerfstudio loads every registered method in every `ns-*` command, unguarded. If ours cannot be built here, its place is
taken by a method of the same name that says why as soon as it is used.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.plugins.types import MethodSpecification

from f3rm_ext.compat import join_help_lines, quiet_known_warnings, shorten_registration
from f3rm_ext.errors import ConfigError, install_excepthook
from f3rm_ext.utils.ffmpeg import provide_ffmpeg
from f3rm_ext.utils.libusb import provide_libusb


@dataclass
class BrokenMethodConfig(TrainerConfig):
    """Stands in for a method whose parts cannot be imported."""

    _target: type = field(default_factory=lambda: object)
    reason: str = ""
    """Why the method cannot be used."""

    def setup(self, **kwargs: object) -> object:
        """Says why, instead of training; :meth:`save_config` does, too, before a folder is made.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"The method {self.method_name} cannot be used here, because {self.reason}: "
            "run `f3rm-ext doctor` to see what is missing."
        )

    def save_config(self) -> None:
        self.setup()


def prepare_command() -> None:
    """Prepares a command of nerfstudio, which imports the methods before anything else of ours; safe to call twice."""
    install_excepthook()
    quiet_known_warnings()
    join_help_lines()
    shorten_registration()
    provide_ffmpeg()
    provide_libusb()


def guarded_method(name: str, description: str) -> MethodSpecification:
    """A feature field's specification, or a stand-in that explains itself.

    Args:
        name: of the method.
        description: one sentence for `ns-train -h`.
    """

    def make() -> TrainerConfig:
        from f3rm_ext.method_configs.presets import make_config

        return make_config(name)

    return _guarded(name, description, make)


def guarded_splat_method(name: str, description: str) -> MethodSpecification:
    """A splatting method's specification, or a stand-in that explains itself; see :func:`guarded_method`."""

    def make() -> TrainerConfig:
        from f3rm_ext.method_configs.splat_presets import make_splat_config

        return make_splat_config(name)

    return _guarded(name, description, make)


def _guarded(name: str, description: str, make: Callable[[], TrainerConfig]) -> MethodSpecification:
    try:
        return MethodSpecification(config=make(), description=description)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return MethodSpecification(
            config=BrokenMethodConfig(method_name=name, reason=reason), description=f"(not usable: {reason})"
        )
