"""The TPU compiler behind PJRT's C interface, in a process of its own: `python -m vit_tpu.tpu.pjrt REQUEST.json`.

libtpu aborts the process on an internal error, takes a lock and reads its settings from the environment, so it is never
loaded where anything else lives. This module needs neither TensorFlow nor jax: HLO goes in, figures come out.
The interface only grows at its end, so the positions below hold for every libtpu of this major version.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import sys
from typing import Any

_FIRST_FUNCTION = 5  # in words: struct size, extension pointer and the three words of the version
_MAJOR_VERSION = 0
_POSITIONS = {
    "Error_Destroy": 0,
    "Error_Message": 1,
    "Plugin_Initialize": 3,
    "DeviceDescription_Kind": 26,
    "Executable_SizeOfGeneratedCodeInBytes": 45,
    "Executable_OptimizedProgram": 48,
    "TopologyDescription_Create": 82,
    "TopologyDescription_PlatformVersion": 85,
    "TopologyDescription_GetDeviceDescriptions": 86,
    "Compile": 89,
    "Executable_GetCompiledMemoryStats": 96,
}
_STATS = (
    "generated_code",
    "argument",
    "output",
    "alias",
    "temp",
    "host_generated_code",
    "host_argument",
    "host_output",
    "host_alias",
    "host_temp",
    "peak",
)


class PjrtError(Exception):
    """What the compiler said went wrong, in its own words."""


class Pjrt:
    """One loaded plugin.

    Args:
      library: path of libtpu.so.
    """

    def __init__(self, library: str):
        get = ctypes.CDLL(library).GetPjrtApi
        get.restype = ctypes.POINTER(ctypes.c_void_p)
        self._table = get()
        version = ctypes.cast(ctypes.addressof(self._table.contents) + 32, ctypes.POINTER(ctypes.c_int))
        self.version = (version[0], version[1])
        if version[0] != _MAJOR_VERSION:
            raise PjrtError(f"its interface is PJRT {version[0]}.{version[1]}, this package speaks {_MAJOR_VERSION}.x")
        self.call("Plugin_Initialize")

    def call(self, name: str, *inputs: Any, outputs: int = 0) -> list[int]:
        """Calls a function of the table; every argument struct is its own size, an extension pointer, inputs, outputs.

        Args:
          name: without the PJRT_ prefix.
          inputs: one word each (bytes stand for the pointer to them).
          outputs: number of words the function fills in.

        Returns:
          The words filled in.

        Raises:
          PjrtError: the plugin's message.
        """
        words = (ctypes.c_uint64 * (2 + len(inputs) + outputs))()
        words[0] = ctypes.sizeof(words)
        kept = []
        for index, value in enumerate(inputs):
            if isinstance(value, bytes):
                value = ctypes.create_string_buffer(value, len(value))
            if not isinstance(value, int):
                kept.append(value)
                value = ctypes.addressof(value)
            words[2 + index] = value
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self._table[_FIRST_FUNCTION + _POSITIONS[name]])
        error = function(ctypes.addressof(words))
        if error and name != "Error_Message":
            raise PjrtError(self._message(error))
        return list(words[2 + len(inputs) :])

    def _message(self, error: int) -> str:
        address, size = self.call("Error_Message", error, outputs=2)
        text = ctypes.string_at(address, size).decode(errors="replace")
        self.call("Error_Destroy", error)
        return text

    def text(self, name: str, of: int) -> str:
        address, size = self.call(name, of, outputs=2)
        return ctypes.string_at(address, size).decode(errors="replace")

    def compile(self, topology: int, hlo: bytes, options: bytes) -> int:
        program = (ctypes.c_uint64 * 6)()
        code, kind = ctypes.create_string_buffer(hlo, len(hlo)), ctypes.create_string_buffer(b"hlo", 3)
        program[:] = [48, 0, ctypes.addressof(code), len(hlo), ctypes.addressof(kind), 3]
        return self.call("Compile", topology, program, options, len(options), 0, outputs=1)[0]

    def optimized_program(self, executable: int) -> bytes:
        program = (ctypes.c_uint64 * 6)()
        kind = ctypes.create_string_buffer(64)
        program[:] = [48, 0, 0, 0, ctypes.addressof(kind), 64]
        self.call("Executable_OptimizedProgram", executable, program)  # first call: the size
        code = ctypes.create_string_buffer(program[3])
        program[2] = ctypes.addressof(code)
        self.call("Executable_OptimizedProgram", executable, program)
        return code.raw


def compile_options(replicas: int = 1, partitions: int = 1, dump: str | None = None) -> bytes:
    """Returns a serialized xla CompileOptionsProto.

    Args:
      replicas: copies of the program, each on its own core.
      partitions: cores that one copy is divided over by the sharding annotations in it.
      dump: folder for the compiler's reports, or None.
    """
    columns = [
        _field(3, _field(1, b"".join(_varint(r * partitions + p) for r in range(replicas)))) for p in range(partitions)
    ]
    build = _number(4, replicas) + _number(5, partitions)
    build += _field(9, _number(1, replicas) + _number(2, partitions) + b"".join(columns))
    if partitions > 1:
        build += _number(6, 1) + _field(12, b"\1") + _field(18, b"\1") + _number(19, 0)
    options = _field(3, build)
    for key, value in {"xla_dump_to": dump}.items() if dump else ():
        options += _field(7, _field(1, key.encode()) + _field(2, _field(1, str(value).encode())))
    return options


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def main(path: str) -> None:
    """Compiles as REQUEST.json says and writes the answer beside it; see `compiler.request` for the fields."""
    request = json.loads(pathlib.Path(path).read_text())
    answer: dict[str, Any] = {}
    try:
        api = Pjrt(request["library"])
        answer["pjrt"] = ".".join(map(str, api.version))
        name = request["topology"].encode()
        topology = api.call("TopologyDescription_Create", name, len(name), 0, 0, outputs=1)[0]
        answer["platform"] = api.text("TopologyDescription_PlatformVersion", topology)
        devices, count = api.call("TopologyDescription_GetDeviceDescriptions", topology, outputs=2)
        first = ctypes.cast(devices, ctypes.POINTER(ctypes.c_uint64))[0]
        answer["device"], answer["cores"] = api.text("DeviceDescription_Kind", first), count
        _write(path, ".started", answer)  # read when the process is ended early
        if request.get("hlo"):
            options = compile_options(request["replicas"], request["partitions"], request.get("dump"))
            executable = api.compile(topology, pathlib.Path(request["hlo"]).read_bytes(), options)
            words = api.call("Executable_GetCompiledMemoryStats", executable, outputs=len(_STATS))
            answer["stats"] = {name: ctypes.c_int64(word).value for name, word in zip(_STATS, words)}
            if request.get("program"):
                pathlib.Path(request["program"]).write_bytes(api.optimized_program(executable))
    except (PjrtError, OSError) as error:
        answer["error"] = str(error)
    _write(path, ".answer", answer)


def _write(path: str, suffix: str, answer: dict[str, Any]) -> None:
    partial = pathlib.Path(path).with_suffix(".partial")
    partial.write_text(json.dumps(answer))
    partial.rename(pathlib.Path(path).with_suffix(suffix))


if __name__ == "__main__":
    main(sys.argv[1])
