"""Looking at what the compiler did: it reads plans and graphs, and decides nothing.

Its source is left out of the compile caches' keys (`fp8compile/source_digest.py` reads only the modules that compile),
so that a better table compiles nothing anew.
"""
