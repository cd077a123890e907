"""Writes a program that runs every C++ block of the documentation: `documented.py OUTPUT`.

A block with `int main` becomes a function in a namespace; any other block becomes the body of one.
A program with arguments is called without any. Blocks of a page do not share names. Tutorials are
notebooks and have their own tests.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    includes, parts, calls = ["#include <torch/torch.h>", "#include <xsoftmax/xsoftmax.h>"], [], []
    for path in sorted(DOCS.rglob("*.md")):
        if {"tutorials", "generated"} & set(path.relative_to(DOCS).parts):
            continue
        for number, block in enumerate(
                re.findall(r"^```cpp\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)):
            name = re.sub(r"\W", "_", f"{path.relative_to(DOCS).with_suffix('')}_{number}")
            includes += re.findall(r"^#include .*$", block, re.MULTILINE)
            block = re.sub(r"^#include .*\n", "", block, flags=re.MULTILINE)
            block = block.replace("int main(int argc, char** argv)",
                                  "int main_(int argc = 1, char** argv = nullptr)")
            body = block.replace(
                "int main(", "void main_("
            ) if "int main" in block else f"[[maybe_unused]] void main_() {{\n{block}}}\n"
            parts.append(f"namespace {name} {{\n{body}}}\n")
            calls.append(f'  std::cout << "{path.relative_to(DOCS)}, block {number}\\n";\n'
                         f"  {name}::main_();\n")
    text = "\n".join(dict.fromkeys(includes)) + "\n#include <iostream>\n\n" + "\n".join(
        parts) + f"\nint main() {{\n{''.join(calls)}}}\n"
    if not calls:
        sys.exit("documented.py: no C++ block in the documentation")
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
