"""Access to the arrays of a `State` from kernels, through one pointer.

Passing two dozen arrays from kernel to kernel, and counting references to them, costs several times what the model
itself does. So kernels get a record of addresses, the *handle*, and accessors like ``slot_at(s, index)`` return the
record at an index. The arrays belong to the Python `State`, which outlives every call. With ``NUMBA_DISABLE_JIT=1``
the handle is the `State` itself and an accessor is a plain look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from fleetpilot.cluster.state import ARRAY_DTYPES, State, as_records
from fleetpilot.fleet.jit import UNCOMPILED

HANDLE = np.dtype([(name, "i8") for name in ARRAY_DTYPES], align=True)


def handle(state: State) -> Any:
    """What kernels take as their first argument `s`. Valid as long as the state's arrays are."""
    if UNCOMPILED:
        return as_records(state)
    addresses = np.zeros(1, HANDLE)
    for name in ARRAY_DTYPES:
        addresses[name] = getattr(state, name).ctypes.data
    return addresses[0]


def _base(context: Any, builder: Any, s: Any, name: str) -> Any:
    """The address of an array, loaded from the handle."""
    word = context.get_value_type(types.int64)
    offset = list(ARRAY_DTYPES).index(name) * HANDLE.itemsize // len(ARRAY_DTYPES)
    pointer_add: Any = cgutils.pointer_add
    return builder.load(pointer_add(builder, s, offset, return_type=word.as_pointer()))


def _accessor(name: str) -> Callable[[Any, int], Any]:
    """``accessor(s, index)``: the record at `index` of the array `name`."""
    if UNCOMPILED:
        return lambda s, index: getattr(s, name)[index]
    dtype = ARRAY_DTYPES[name]
    record = numba.from_dtype(dtype)

    def access(typingctx: Any, s: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = _base(context, builder, args[0], name)
            word = base.type
            offset = builder.mul(context.cast(builder, args[1], signature.args[1], types.int64), word(dtype.itemsize))
            return builder.inttoptr(builder.add(base, offset), context.get_value_type(record))

        return record(s, index), codegen

    return cast(Callable[[Any, int], Any], intrinsic(access))


def _whole(name: str) -> Callable[[Any, int], Any]:
    """``whole(s, size)``: the array `name` itself, for functions that are shared with the dispatcher."""
    if UNCOMPILED:
        return lambda s, size: getattr(s, name)
    dtype = ARRAY_DTYPES[name]
    array_type = types.Array(numba.from_dtype(dtype), 1, "C")

    def access(typingctx: Any, s: Any, size: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = _base(context, builder, args[0], name)
            word = base.type
            array = context.make_array(array_type)(context, builder)
            context.populate_array(
                array,
                data=builder.inttoptr(base, array.data.type),
                shape=[context.cast(builder, args[1], signature.args[1], types.intp)],
                strides=[word(dtype.itemsize)],
                itemsize=word(dtype.itemsize),
                meminfo=None,
            )
            return array._getvalue()

        return array_type(s, size), codegen

    return cast(Callable[[Any, int], Any], intrinsic(access))


def _prefetcher() -> Callable[[Any], None]:
    """``prefetch(record)``: let the CPU fetch a record's cache lines while it goes on."""
    if UNCOMPILED:
        return lambda record: None

    def fetch(typingctx: Any, record: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer_add: Any = cgutils.pointer_add
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            for offset in (*range(0, record.size - 1, 64), record.size - 1):
                line = pointer_add(builder, args[0], offset, return_type=byte)
                builder.call(function, [line, word(0), word(3), word(1)])  # to read, into all caches, data
            return context.get_dummy_value()

        return types.none(record), codegen

    return cast(Callable[[Any], None], intrinsic(fetch))


prefetch = _prefetcher()

env_at = _accessor("env")
row_at = _accessor("row")
node_at = _accessor("node")
slot_at = _accessor("slot")
engine_at = _accessor("engine")
instance_at = _accessor("instance")
next_at = _accessor("next_boundary")
batch_at = _accessor("batch")
residue_at = _accessor("residues")
residency_at = _accessor("residency")
poll_at = _accessor("poll")
released_at = _accessor("released")
deadline_at = _accessor("deadline")
target_at = _accessor("target")
view_instance_at = _accessor("view_instance")
view_request_at = _accessor("view_request")
view_fleet_at = _accessor("view_fleet")
log_at = _accessor("log")
sample_at = _accessor("sample")
counts_at = _accessor("counts")
migration_at = _accessor("migration")
migration_log_at = _accessor("migration_log")
failure_at = _accessor("failure")
transfer_at = _accessor("transfer")
shared_at = _accessor("shared")
update_at = _accessor("update")
itl_at = _accessor("itl")

released_heap = _whole("released")
deadline_heap = _whole("deadline")
node_array = _whole("node")
indexed_array = _whole("indexed")
