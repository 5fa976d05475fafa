"""Reading JSON that anybody may have written: it has the shape that its reader states as a type, or is refused."""

import json
from typing import Any, TypeVar, is_typeddict

import msgspec

T = TypeVar("T")


def parse_json(data: bytes | str, kind: type[T] | Any) -> T:
    """Returns the value of a JSON text.

    Args:
        data: the text; bytes are UTF-8, UTF-16 or UTF-32.
        kind: type of the value, such as ``dict[str, Any]``, a ``TypedDict``, or a dataclass, which is then made.
            Unknown keys stay in a ``TypedDict`` and are left out of a dataclass. A range, in which NaN never is, is
            ``Annotated[float, msgspec.Meta(gt=0)]``.

    Raises:
        ValueError: the text is no JSON, or its value is of another shape; the message says where.

    >>> parse_json('{"step": "one"}', dict[str, int])
    Traceback (most recent call last):
    ValueError: Expected `int`, got `str` - at `$[...]`
    """
    try:
        return convert_json(json.loads(data), kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def convert_json(value: Any, kind: type[T] | Any) -> T:
    """Returns a value of JSON as a type, as :func:`parse_json` does.

    Raises:
        ValueError: the value is of another shape; the message says where.
    """
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return value if is_typeddict(kind) else converted
