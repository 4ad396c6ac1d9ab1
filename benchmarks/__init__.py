"""How fast FP8 training is, beside its peers in the same run. `python -m benchmarks.<room>.<file>` runs one.

Examples are scripts whose modules import each other by name; benchmarks train their models, so their folder is on the
path.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))
