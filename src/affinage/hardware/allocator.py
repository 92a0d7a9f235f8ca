"""Make the C library keep freed memory, because XLA:CPU takes its temporary buffers anew every step.

XLA's CPU backend allocates one buffer for all temporaries of a step and frees it at the end. glibc gives buffers of
that size back to the kernel, so each step faults its pages in again, one by one, zeroed: at small sizes that is more
than half of the time of a step. Told to keep what is freed, and to serve all threads from the one main heap (which is
the only one that can keep more than 64 MiB), it hands out the same warm pages again. The price is that the process
stays at its peak memory.
"""

import ctypes
import os
import platform
import threading

from affinage.hardware.present import accelerator_is_here

# From glibc's malloc.h: parameter, value.
_TRIM_THRESHOLD = (-1, -1)  # free memory at the top of the heap before it is given back; -1: never
_TOP_PAD = (-2, 2**26)  # bytes asked for beyond a request when the heap must grow, so that it grows seldom
_MMAP_THRESHOLD = (-3, 2**30)  # requests below this come from the heap, never from a mapping of their own
_MMAP_MAX = (-4, 0)  # and no request gets a mapping of its own
_ARENA_MAX = (-8, 1)  # one heap for all threads; without this the others change nothing

_SMALLEST_HOLE = 2**11  # bytes; smaller ones malloc finds without looking

_kept = threading.Event()


def keep_freed_memory() -> bool:
    """Set glibc's allocator for XLA:CPU; returns whether it was done.

    Call it before JAX is imported: a thread that already has a heap of its own keeps it. Does nothing where the C
    library is not glibc, or where an accelerator will do the work.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc" or not _work_is_for_the_processor():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = (_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX)
    if sum(mallopt(*option) for option in options) == len(options):
        _kept.set()
    return _kept.is_set()


def freed_memory_is_kept() -> bool:
    """Whether `keep_freed_memory` was called in this process, and was done."""
    return _kept.is_set()


def give_back_freed_memory() -> None:
    """Give what is free in the heap back to the kernel, once: the next steps fault their buffers in again.

    For after work that leaves holes as large as the weights, which would add up otherwise. Does nothing where the C
    library is not glibc.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def close_holes() -> None:
    """Give back what is free, and take what lies free between what is in use out of the heap, for good.

    For after a compilation. It leaves some ten thousand holes of all sizes, and malloc would look among them for each
    of the buffers that a step's products are packed into: steps of 60 ms take 5 to 13 % longer, until the process ends.
    What a step that is computed meanwhile gives back would be taken, too. Only addresses are lost, as the pages have
    gone back. Where freed memory is not kept, as beside an accelerator, holes stay.
    """
    give_back_freed_memory()
    if not freed_memory_is_kept():
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.mallinfo2.restype = _HeapFacts
    facts = libc.mallinfo2()
    end = libc.sbrk(0) - facts.keepcost  # of what is or was in use: above it all is free
    size = facts.fordblks - facts.keepcost
    while size >= _SMALLEST_HOLE:
        found = libc.malloc(size)
        if found is None or found >= end:  # no hole is so large
            libc.free(found)
            size = size * 3 // 4


class _HeapFacts(ctypes.Structure):
    """What `mallinfo2` tells, all in bytes; from glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _work_is_for_the_processor() -> bool:
    """Whether JAX will come up on the CPU, judged without importing it."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    return chosen.split(",")[0] == "cpu" if chosen else not accelerator_is_here()
