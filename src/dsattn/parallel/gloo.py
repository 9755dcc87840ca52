"""Gloo groups with one thread each: with two, collectives in flight together can corrupt the process's memory.

torch (2.11 and 2.13, of those looked at) starts two threads for each gloo group. Each notes the name of the
collective that it ended in one string of the group, without a lock (`ProcessGroupGloo::runLoop`), so that two at the
same moment may free that string twice. docs/decisions/014 has a program that dies of it. torch hands no options to
gloo's groups; so their constructor is replaced.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def one_thread_a_group() -> Iterator[None]:
    """Gloo groups that torch makes inside the `with` have one thread, which ends their collectives one by one.

    Those of `init_process_group`, `new_group` and device meshes. Nothing where torch has no gloo.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        yield
        return
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_with_one_thread(group: Any, *given: Any, timeout: datetime.timedelta | None = None, **named: Any) -> None:
        if timeout is None:  # it has options of its own
            make(group, *given, **named)
            return
        options = gloo._Options()
        options._devices, options._timeout, options._threads = _devices(gloo), timeout, 1
        make(group, *given, options, **named)

    gloo.__init__ = make_with_one_thread
    try:
        yield
    finally:
        gloo.__init__ = make


def _devices(gloo: Any) -> list[Any]:
    """Those that torch takes: of the interfaces in GLOO_SOCKET_IFNAME, else of the address that the host name has."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
