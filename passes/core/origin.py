"""Where a node comes from, in the user's terms: the module's path and the line of source."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from fp8compile.source_digest import HERE

# files whose lines say nothing of a model: `explain`, and what torch puts around functions under a default device
NOBODYS = (f"{HERE}/insight/", f"{Path(torch.__file__).parent}/utils/_device.py")


def module_path(node: fx.Node) -> str:
    """Return the path of the module whose forward made `node`, as model.named_modules() spells it; "" if unknown."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack")
    return clean_path(next(reversed(stack.values()))[0]) if stack else ""


def clean_path(path: str) -> str:
    """Return a module path without the compiler's decoration: "L['self'].layers[0].fc" → "layers.0.fc"."""
    path = re.sub(r"""^L\[['"]args['"]\]\[0\]""", "", path)  # the self of a forward that is decorated
    path = re.sub(r"""^[LG]\[['"][^\]]*['"]\]""", "", path)
    path = re.sub(r"""\[['"]?([^'"\]]+)['"]?\]""", r".\1", path)
    path = re.sub(r"^.*\.__closure__\.\d+\.cell_contents\b", "", path)  # a model that an inner function holds
    path = re.sub(r"(^|\.)(__dict__|_modules|_parameters|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)", "", path)
    return path.strip(".")


def source_line(node: fx.Node) -> str:
    """Return the user's line that made `node`, "file:line  code"; "" if unknown."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*([^\n]+)', trace)
    frames = [frame for frame in frames if not frame[0].startswith(NOBODYS)]
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}  {code.strip()}"
