#!/usr/bin/env python3
"""Registers, stack, spills and shared memory of every CUDA kernel, and how many of its blocks a
multiprocessor holds, as a Markdown table.

    .ci/cuda_resources.py BUILD [--architecture 90] [--all]

Reads what .ci/keep_ptxas kept beside the objects of the build. A line is a kernel, with the range
over its instances (types, elements a load); with --all it is an instance. Fails where a kernel
spills registers, or where nothing was kept.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from cuda_objects import cuda_objects

# Of a multiprocessor, by architecture: threads, blocks, KB of shared memory. All have 65,536
# registers, given to warps by 256.
MACHINES = {
    "75": (1024, 16, 64), "80": (2048, 32, 164), "86": (1536, 16, 100), "89": (1536, 24, 100),
    "90": (2048, 32, 228), "100": (2048, 32, 228), "120": (1536, 24, 100)
}
THREADS = 256
# Kernels that are launched otherwise, for D 256, 20 private draws, beams of 10 and 64 codewords:
# threads of a block, bytes of dynamic shared memory. By name, and with the type of elements where
# it matters.
LAUNCHED = {
    "pair_input_grad_kernel": (64, 0), "beam_search_kernel": (256, 13_000),
    "midx_exact_kernel": (256, 512), "midx_private_kernel": (32, 1024),
    "hierarchical_softmax_kernel": (128, 0), "path_edges_kernel": (128, 0),
    "midx_pick_kernel": (96, 1024), "clear_pending_kernel": (1, 0), "shortlist_kernel": (128, 0),
    "warp_queries_kernel": (64, 45_000), "warp_rows_kernel": (128, 2_000),
    "path_edge_kernel": (128, 0), "write_kernel": (64, 0), "midx_plan_kernel": (64, 0),
    ("warp_queries_kernel", "bfloat16"): (128, 45_000), ("warp_queries_kernel", "float16"): (128,
                                                                                             45_000)
}


def kept(build: Path, arch: str):
    """Mangled name of a kernel -> figures."""
    kernels, name, current = {}, None, False
    for one, folder in cuda_objects(build).items():
        path = Path(f"{one}.ptxas")
        if not path.exists():  # its kernels would be missing from the check of spills
            raise SystemExit(f"cuda_resources: {path} was not kept (.ci/keep_ptxas)")
        for line in path.read_text().splitlines():
            if found := re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'", line):
                name, current = found[1], found[2] == arch
                if current:
                    kernels[name] = {"folder": folder}
            elif not current:
                continue
            elif found := re.search(
                    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) "
                    r"bytes spill loads", line):
                # More than one line where functions are called.
                kernels[name]["stack"] = max(kernels[name].get("stack", 0), int(found[1]))
                kernels[name]["spills"] = kernels[name].get("spills", 0) + int(found[2]) + int(
                    found[3])
            elif found := re.search(r"Used (\d+) registers", line):
                shared = re.search(r"(\d+)(\+\d+)? bytes smem", line)
                kernels[name] |= {
                    "registers": int(found[1]), "shared": int(shared[1]) if shared else 0
                }
    return {name: figures for name, figures in kernels.items() if "registers" in figures}


def names(mangled):
    """Yields demangled names without namespaces, types of parameters and casts of integers."""
    plain = subprocess.run(["c++filt"], input="\n".join(mangled), check=True, capture_output=True,
                           text=True).stdout.splitlines()
    for name in plain:
        name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
        depth, end = 0, len(name)
        # the parameters begin at the first bracket outside of template arguments
        for i, character in enumerate(name):
            depth += (character == "<") - (character == ">")
            if character == "(" and depth == 0:
                end = i
                break
        name = re.sub(r"\((?:int|long|bool|unsigned int)\)|\b(?:xsoftmax|cuda|c10|at)::", "",
                      name[:end])
        yield name.replace("BFloat16", "bfloat16").replace("Half", "float16")


def blocks(figures, name: str, arch: str):
    """Blocks that a multiprocessor holds, and the share of its threads that they fill."""
    most_threads, max_blocks, shared = MACHINES[arch]
    kernel, element = re.match(r"(\w+)<?(\w*)", name).groups()
    threads, dynamic = LAUNCHED.get((kernel, element)) or LAUNCHED.get(kernel, (THREADS, 0))
    warps = -(-threads // 32)
    of_warp = -(-max(figures["registers"], 1) * 32 // 256) * 256
    held = min(
        most_threads // (warps * 32),
        max_blocks,
        65536 // of_warp // warps,
        # the system takes 1 KB of each block
        shared * 1024 // (figures["shared"] + dynamic + 1024))
    return threads, held, held * warps * 32 / most_threads


def text(values, form="{}"):
    """A value, or from and to."""
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--architecture", default="90")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    arch = args.architecture
    kernels = kept(args.build, arch)
    if not kernels:
        print(f"cuda_resources: nothing is kept under {args.build} for architecture {arch}",
              file=sys.stderr)
        return 1
    rows = {}
    for name, figures in zip(names(kernels), kernels.values()):
        short = name.partition("<")[0]
        rows.setdefault(
            (figures["folder"], name if args.all else short),
            []).append(figures
                       | dict(zip(("threads", "blocks", "occupancy"), blocks(figures, name, arch))))
    print(f"| folder | kernel, at {arch[:-1]}.{arch[-1]} | instances | registers | stack | "
          "spills | shared memory | threads | blocks per SM | occupancy |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (folder, name), found in sorted(rows.items()):
        columns = [
            text([figures[key] for figures in found])
            for key in ("registers", "stack", "spills", "shared", "threads", "blocks")
        ]
        print(f"| {folder} | `{name}` | {len(found)} | {' | '.join(columns)} | "
              f"{text([figures['occupancy'] for figures in found], '{:.0%}')} |")
    spilling = [
        name for (_, name), found in rows.items() if any(figures["spills"] > 0 for figures in found)
    ]
    for name in spilling:
        print(f"cuda_resources: {name} spills registers", file=sys.stderr)
    return int(bool(spilling))


if __name__ == "__main__":
    sys.exit(main())
