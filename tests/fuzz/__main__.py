"""`python -m tests.fuzz`: see run.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    from tests.fuzz.run import main

    sys.exit(main())
