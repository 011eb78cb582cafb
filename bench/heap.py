"""What a process's memory is made of, to tell a leak from an allocator that keeps what was freed.

``snapshot`` counts; ``Containers`` names dicts, lists, sets and caches that grew between two moments.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import deque
from typing import Any

import psutil
import torch

MIB = 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_LIBC.mallinfo2.restype = _Mallinfo2


def _collect() -> None:
    gc.unfreeze()  # vLLM freezes what its start leaves, and frozen objects are not listed
    gc.collect()


def snapshot() -> dict[str, float]:
    """Resident MiB, MiB that malloc has handed out and holds free, Python objects, tensors and their MiB.

    ``in_use`` is what a leak in C or of tensors would raise, ``objects`` (containers) and ``blocks`` (all of
    Python's small objects) one in Python; ``free`` is what glibc keeps for later.
    """
    _collect()
    info, storages, tensors = _LIBC.mallinfo2(), {}, 0
    objects = gc.get_objects()
    for one in objects:
        if issubclass(type(one), torch.Tensor):  # isinstance would make lazy modules import
            tensors += 1
            if one.layout == torch.strided and not one.is_meta:
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return {
        "rss": round(psutil.Process().memory_info().rss / MIB, 1),
        "in_use": round((info.uordblks + info.hblkhd) / MIB, 2),
        "free": round(info.fordblks / MIB, 2),
        "objects": len(objects),
        "blocks": sys.getallocatedblocks(),
        "tensors": tensors,
        "tensor_mib": round(sum(storages.values()) / MIB, 2),
        "threads": psutil.Process().num_threads(),
    }


def trim() -> dict[str, float]:
    """Resident MiB before and after malloc_trim: the difference was free memory, not a leak."""
    _collect()
    before = psutil.Process().memory_info().rss
    _LIBC.malloc_trim(0)
    after = psutil.Process().memory_info().rss
    return {"before": round(before / MIB, 1), "after": round(after / MIB, 1)}


class Containers:
    """Sizes of all containers and caches now; ``grown`` compares with a later moment."""

    def __init__(self) -> None:
        self.sizes = {id(one): size for one, size in _containers()}

    def grown(self, least: int) -> list[str]:
        """Containers, alive then and now, that grew by ``least`` entries or more, most first."""
        found = []
        for one, size in _containers():
            before = self.sizes.get(id(one), size)
            if size - before >= least:
                found.append((size - before, f"{_name(one)}: {before} -> {size}"))
        return [text for _, text in sorted(found, reverse=True)[:20]]


def _containers() -> list[tuple[Any, int]]:
    _collect()
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), (dict, list, set, deque)):  # as above
            found.append((one, len(one)))
        elif type(one).__name__ == "_lru_cache_wrapper":
            found.append((one, one.cache_info().currsize))
    return found


def _name(one: Any) -> str:
    """A container by the attribute or variable that holds it."""
    if type(one).__name__ == "_lru_cache_wrapper":
        return f"lru_cache {one.__module__}.{one.__qualname__}"
    for holder in gc.get_referrers(one):
        if isinstance(holder, dict):
            names = [key for key, value in holder.items() if value is one and isinstance(key, str)]
            if names:
                owner = holder.get("__name__") or next(
                    (type(o).__qualname__ for o in gc.get_referrers(holder) if hasattr(o, "__dict__")), "?"
                )
                return f"{type(one).__name__} {owner}.{names[0]}"
        else:
            for key in _attributes(holder):
                if getattr(holder, key, None) is one:
                    return f"{type(one).__name__} {type(holder).__qualname__}.{key}"
    sample = repr(next(iter(one), None))[:60]
    return f"{type(one).__name__} of {sample}"


def _attributes(holder: Any) -> list[str]:
    return list(getattr(holder, "__dict__", {})) + [
        name for cls in type(holder).__mro__ for name in getattr(cls, "__slots__", ())
    ]
