"""Errors a user can mend, and how they reach the terminal: one sentence, an exit code (mostly 2), no traceback."""

import pickle
import sys
from types import TracebackType

from f3rm_ext import events

EXIT_CODE = 2


class UserError(Exception):
    """Something the user can put right.

    The message is one sentence that says what is wrong, why, and what to do about it.
    """

    exit_code = EXIT_CODE
    """With which the command ends."""


class ConfigError(UserError):
    """An option has a value that cannot work."""


class CaptureError(UserError):
    """The capture (images, poses, transforms.json) cannot be used as it is."""


class DoubtfulPosesError(UserError):
    """A capture was made, but its poses are probably wrong."""

    exit_code = 3


class ExtractorError(UserError):
    """A 2D feature extractor is unknown, broken or cannot be set up."""


class WeightsNotFoundError(ExtractorError):
    """The weights of an extractor are not on this machine and cannot be fetched."""


class FeatureStoreError(UserError):
    """A feature shard or its manifest is damaged, or belongs to another model or to other images."""


class SplatFileError(UserError):
    """A file of Gaussian splats cannot be read, or splats cannot be written as asked."""


class MeshError(UserError):
    """A mesh cannot be read, compared, written, or extracted from a scene."""


class MemoryShortageError(UserError):
    """Memory ran out in training."""


class RankError(UserError):
    """The processes of a run on several devices cannot work together any longer."""


class LedgerError(UserError):
    """The ledger of measured runs cannot be read or written, or has no such entry."""


class CheckpointError(UserError):
    """There is no usable checkpoint at the given place."""


def reason_of(error: BaseException) -> str:
    """Returns the first line of an exception's message without its full stop; its type if there is no message.

    Of a file that torch refuses to unpickle it says so in other words.

    >>> reason_of(OSError("No such device.\\nTry again.")), reason_of(KeyError())
    ('No such device', 'KeyError')
    """
    if isinstance(error, pickle.UnpicklingError):  # PyTorch's message advises to let the file run code
        return "it is damaged or holds more than tensors"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def library_advice(error: BaseException) -> str:
    """Returns how to install a library of the system that an import misses; empty for other errors.

    Libusb is none of them: the package libusb-package brings it.
    """
    if "cannot open shared object file" not in str(error) or "libusb" in str(error):
        return ""
    return "on Debian or Ubuntu, `apt install libegl1 libgl1 libglib2.0-0 libopengl0`"


def report(error: UserError) -> None:
    """Prints an error the way users see it, one line on stderr, and tells it to the program that started this one."""
    events.error(str(error))
    print(f"Error: {error}", file=sys.stderr, flush=True)


def install_excepthook() -> None:
    """Makes an uncaught :class:`UserError` print its sentence and end the process with its exit code.

    Nerfstudio's commands (``ns-train``, ``ns-eval`` ...) do not know our errors; without this they would show
    a traceback. A process that started several others ends with the code of the one that ended first. Every other
    exception goes to the hook that was installed before. Safe to call twice.
    """
    previous = sys.excepthook
    if getattr(previous, "handles_user_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            report(error)
            # CPython honours a SystemExit raised by the hook: handlers at exit still run.
            raise SystemExit(error.exit_code)
        code = getattr(error, "exit_code", None)
        if kind.__name__ == "ProcessExitedException" and isinstance(code, int):
            # From the process of nerfstudio that started those of several GPUs, one of which has ended.
            if code < 0:
                index = getattr(error, "error_index", "?")
                report(RankError(f"Process {index} of this run was killed by signal {-code}: see above how to go on."))
            raise SystemExit(code if code >= 0 else 128 - code)
        previous(kind, error, trace)

    hook.handles_user_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
