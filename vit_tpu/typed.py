"""Values from YAML and the command line, taken as an annotated type or refused."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from vit_tpu.errors import UserError


def typed(value: Any, hint: Any, where: str) -> Any:
    """Returns `value` as the annotated type: whole numbers are taken for floats, lists for tuples, "1e-3" for a number.

    Args:
      value: from YAML.
      hint: a type, a tuple of types, or a union of them.
      where: named in the error.

    Raises:
      UserError: the value is of another type.
    """
    if (
        isinstance(value, float | str)
        and str(value).strip(".+-").lower() in ("nan", "inf", "infinity")
        and float in (typing.get_args(hint) or (hint,))
    ):
        raise UserError(f"{where} is {value}: it must be a finite number")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:  # an exact match first, so that 1 stays an int where both are allowed
        if option is type(None) and value is None:
            return None
        if isinstance(option, type) and type(value) is option:
            return value
    for option in options:
        if option is str and isinstance(value, bool):
            return "on" if value else "off"  # YAML 1.1 reads these words as truth values
        if option is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)  # YAML 1.1 reads 1e-3 as text
            except ValueError:
                continue
        if option is int and isinstance(value, (str, float)) and _is_whole(value):
            return int(float(value))
        if typing.get_origin(option) is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            if not isinstance(parts, (list, tuple)):
                continue
            inner = typing.get_args(option)
            if inner[-1] is Ellipsis:
                return tuple(typed(part, inner[0], where) for part in parts)
            if len(parts) == len(inner):
                return tuple(typed(part, kind, where) for part, kind in zip(parts, inner))
    wanted = " or ".join(_name_of(option) for option in options)
    raise UserError(f"{where} is {value!r}: it must be {wanted}")


def _is_whole(value: str | float) -> bool:
    try:
        return float(value) == int(float(value))
    except (ValueError, OverflowError):
        return False


def _name_of(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        return "a list of texts" if inner[-1] is Ellipsis else f"{len(inner)} numbers"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names[hint]


def plain(value: Any) -> Any:
    """Returns nested mappings and tuples as the dicts and lists that YAML and JSON hold."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value
