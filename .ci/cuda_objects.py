"""The CUDA objects of a build, which are compiled in batches (cmake/sources.cmake)."""

import json
import re
from pathlib import Path


def cuda_objects(build: Path) -> dict[Path, str]:
    """Returns the folder of csrc whose sources each object has."""
    build = build.resolve()
    if not (build / "compile_commands.json").exists():
        raise SystemExit(f"{build}: expected a folder that CMake has configured")
    batches = [
        Path(one["file"]) for one in json.loads((build / "compile_commands.json").read_text())
        if one["file"].endswith(".cu")
    ]
    return {
        build / "CMakeFiles/xsoftmax.dir" / batch.relative_to(build).with_suffix(".cu.o"): re.
        search('#include "(.+)/', batch.read_text())[1]
        for batch in batches
    }
