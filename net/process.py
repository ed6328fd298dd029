"""The first lines of every child process: harden, read the boot document, and a voice for its own faults.

    harden()                 before anything else: not dumpable, no new privileges, no core
    keep_in_memory()         for those that hold secrets: no swap, where that is permitted
    boot = read_boot(fd, Boot)   one JSON object from an inherited descriptor, into a strict dataclass
    complain(...)            one line on stderr: never a local variable, never foreign exception text

No key travels by argv or environment: argv holds one descriptor number, the rest is read from it (RULINGS 1.2-1.4).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import structlog

MAX_BOOT = 1 << 20

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


class BootError(Exception):
    """The process cannot start as it was asked to. str() names a field, never a value."""


def harden() -> None:
    """Make this process unreadable for others of its uid. Raises BootError where the kernel refuses.

    RLIMIT_CORE alone does not stop a reader of /proc/PID/mem; PR_SET_DUMPABLE does (tried, RULINGS 1.2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise BootError("the kernel refused to harden the process")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def keep_in_memory() -> bool:
    """Keep every page of this process, now and later, out of swap (mlockall(2)); False where that is not permitted.

    Only where no limit is set on locked memory: under a limit a later allocation would fail instead. Pages are locked
    as they are touched, so that nothing is read in that nobody uses.
    """
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) == 0)


def read_boot[T](fd: int, boot: type[T]) -> T:
    """Read JSON from `fd` to its end, close it, and return it as the dataclass `boot`.

    Unknown, missing and repeated keys and values of another type raise BootError. Supported field types: str, int,
    float, bool, bytes (hex in JSON), tuple[X, ...], Mapping[str, X], X | None, dict/Any as they are, and dataclasses.
    """
    raw = bytearray()
    with os.fdopen(fd, "rb", closefd=True) as stream:
        while piece := stream.read(65536):
            raw += piece
            if len(raw) > MAX_BOOT:
                raise BootError("the boot document is too long")
    try:
        document = json.loads(bytes(raw), object_pairs_hook=_no_duplicates)
    except ValueError:
        raise BootError("the boot document is not JSON") from None
    finally:
        raw[:] = bytes(len(raw))
    result: T = _build(boot, document, "boot")
    return result


def complain(process: str, what: str, error: BaseException | None = None) -> None:
    """Write one line of key=value pairs to stderr: when, which process, and `what`, a fixed sentence.

    Of `error` only its class and where it was raised. Tracebacks with locals, and messages of foreign exceptions, may
    hold secrets (RULINGS 1.6), so no processor that renders exceptions is in the chain.
    """
    values = {"process": process}
    if error is not None:
        values |= {"error": type(error).__name__, "where": _where(error)}
    with contextlib.suppress(OSError, ValueError):  # nobody listens; a fault report must not become a fault
        structlog.wrap_logger(structlog.WriteLogger(sys.stderr), _PROCESSORS).error(what[:500], **values)


_PROCESSORS = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    structlog.processors.LogfmtRenderer(
        key_order=("at", "level", "process", "event", "error", "where"), drop_missing=True
    ),
)


def quiet_hooks(process: str) -> None:
    """Replace the interpreter's traceback printers by `complain`, so that no unhandled error shows source or values."""

    def on_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        complain(process, "stopped by an unexpected error", error.with_traceback(trace))

    def on_unraisable(args: sys.UnraisableHookArgs) -> None:
        complain(process, "an error in a finaliser", args.exc_value)

    sys.excepthook = on_error
    sys.unraisablehook = on_unraisable


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        raise ValueError("a key occurs twice")
    return seen


def _build(wanted: Any, value: Any, at: str) -> Any:
    """Return `value` as `wanted`, or raise BootError naming `at`."""
    if wanted is Any:
        return value
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (only,) = [part for part in arguments if part is not type(None)]
        return _build(only, value, at)
    if origin is typing.Literal:
        if value in arguments and type(value) in {type(part) for part in arguments}:
            return value
        raise BootError(f"{at} is not one of its values")
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis and isinstance(value, list):
        return tuple(_build(arguments[0], item, f"{at}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _build(arguments[1], item, f"{at}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type) and isinstance(value, dict):
        return _build_dataclass(wanted, value, at)
    if wanted is bytes and isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise BootError(f"{at} is not hexadecimal") from None
    if wanted is float and type(value) in (int, float):
        return float(value)
    if wanted in (str, int, bool, dict, list) and type(value) is wanted:
        return value
    raise BootError(f"{at} has a wrong type")


def _build_dataclass(wanted: type, value: dict[str, Any], at: str) -> Any:
    hints = typing.get_type_hints(wanted)
    fields = {field.name: field for field in dataclasses.fields(wanted) if field.init}
    if unknown := sorted(value.keys() - fields.keys()):
        raise BootError(f"{at} has an unknown field: {unknown[0][:40]!r}")
    made: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            made[name] = _build(hints[name], value[name], f"{at}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise BootError(f"{at}.{name} is missing")
    return wanted(**made)
