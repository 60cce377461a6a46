"""What every command shares: flags of its own, help with examples, one line for an error, the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vit_tpu import plain
from vit_tpu.errors import OutOfMemoryError, UserError, WorkerError, nearest


def execute(
    define: Callable[[Any, Any], None],
    run: Callable[..., int],
    doc: str | None,
    arguments: list[str] | None,
    files: str | None = None,
) -> int:
    """Parses flags into a FlagValues of its own, runs the command and returns its exit code.

    The flags belong to this call, not to absl's global registry: commands can be imported, reloaded and called from a
    notebook or a test.

    Args:
      define: gets absl's flags module and the FlagValues to define on.
      run: gets the parsed values; returns the exit code.
      doc: shown by --help above the flags.
      arguments: the command line without the program; sys.argv's if None.
      files: what may follow besides flags ("SRC DST"); `run` then gets these texts as a list after the values.

    Returns:
      What `run` returned, or 2 for wrong use and 1 for a failed run, with one line on standard error.
    """
    from absl import flags

    values = flags.FlagValues()
    define(flags, values)
    flags.DEFINE_boolean("help", False, "show this help", short_name="h", flag_values=values)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        rest = values(["vit_tpu", *given])[1:]
    except flags.UnrecognizedFlagError as error:
        return _wrong(f"unknown flag --{error.flagname}{nearest(error.flagname, list(values))}; --help lists them")
    except flags.Error as error:
        return _wrong(" ".join(str(error).split()))
    if values.help:
        print((doc or "").strip() + "\n\nFlags:\n" + _describe(values))
        return 0
    if rest and files is None:
        return _wrong(f'"{rest[0]}" is not a flag: write --name=value (--help lists them)')
    try:
        return run(values) if files is None else run(values, rest)
    except UserError as error:
        return _wrong(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except WorkerError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return error.code
    except (FloatingPointError, OutOfMemoryError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else 1


class _OutOfMemory(int):
    """Exit code 1, of a process that cannot be trusted to end in order."""


OUT_OF_MEMORY = _OutOfMemory(1)
INTERRUPTED = 75  # and saved: the same command goes on


def leave(code: int) -> None:
    """Ends the process with an exit code.

    After a failed allocation at once: XLA may free memory twice when the interpreter takes itself down. After a stop at
    once, too: all is saved, and whoever sent the signal may not give TensorFlow the seconds to free its graphs.
    """
    if isinstance(code, _OutOfMemory) or code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))
    sys.exit(code)


def check_file(flag: str, path: str | None) -> None:
    """Raises UserError if the file of a flag can clearly not be written, before minutes of computing."""
    if not path:
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UserError(f"--{flag}={path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise UserError(f"--{flag}={path} is a folder: name a file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"--{flag}={path} cannot be written (no permission): choose another place")


def write_json(path: str, facts: Any) -> None:
    """Writes the facts of a result for machines."""
    try:
        with open(path, "w") as file:
            json.dump(plain.finite(facts), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UserError(f"--json={path} cannot be written ({error.strerror})") from None


def _wrong(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _describe(values: Any) -> str:
    lines = []
    for name in sorted(values):
        flag = values[name]
        if name != flag.name:
            continue
        shown = f"--[no]{name}" if flag.boolean else f"--{name}"
        lines.append(f"  {shown:<24} {' '.join((flag.help or '').split())}")
    return "\n".join(lines)
