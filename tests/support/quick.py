"""What makes compiling quicker in every process of the tests, and changes nothing that is compiled or computed."""

from __future__ import annotations

import gc

from torch._dynamo import guards
from torch._inductor import config


def quicken() -> None:
    """Leave out what a run of many compilations has no use for."""
    # Tracing makes ten thousands of objects that live on: looking for garbage among them every 700 finds next to none.
    gc.set_threshold(20_000)
    # Dynamo times the guards of each graph, for its log, behind a flush of the processor's caches: 30 to 50 ms.
    guards.profile_guard_manager = lambda *_: 0.0
    # Inductor compiles and runs a program to see that instructions work which the processor names: seven seconds.
    config.cpp.vec_isa_ok = True
