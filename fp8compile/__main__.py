"""`python -m fp8compile`: the command line (`fp8compile/insight/command_line.py`)."""

from __future__ import annotations

import sys

from fp8compile.insight.command_line import main

if __name__ == "__main__":
    sys.exit(main())
