"""What makes compiling quicker in every process of the tests, and changes nothing that is compiled or computed."""

from __future__ import annotations

import gc

from torch._dynamo import guards
from torch._inductor import config
from torch._logging._internal import trace_log


def quicken() -> None:
    """Leave out what a run of many compilations has no use for."""
    # Tracing makes ten thousands of objects that live on: looking for garbage among them every 700 finds next to none,
    # and among what has been imported none at all.
    gc.freeze()
    gc.set_threshold(100_000)
    # torch prints graphs for its structured log if anyone listens, and pytest listens to loggers that do not propagate.
    trace_log.propagate = True
    # Dynamo times the guards of each graph, for its log, behind a flush of the processor's caches: 30 to 50 ms.
    guards.profile_guard_manager = lambda *_: 0.0
    # Inductor compiles and runs a program to see that instructions work which the processor names: seven seconds.
    config.cpp.vec_isa_ok = True
