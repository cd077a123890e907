"""Translates a CUDA source into one for a C++ compiler.

    python translate.py SOURCE RESULT

Two parts of CUDA C++ are syntax that no header can supply; emulator/language.h supplies the rest:

    K<<<grid, block, shared, stream>>>(a, b)  becomes a call of ::emulator::Launch
    __shared__ float tile[32][33];            becomes a reference to memory of the block, which
                                              the emulator fills, guards and frees
    extern __shared__ float tile[];           becomes a pointer to the bytes of the launch

Line numbers do not change, so that messages of the compiler and the emulator refer to the source.
"""

import re
import sys
from pathlib import Path

APART = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
SHARED = re.compile(
    r"(?P<extern>\bextern\s+)?(?:\bstatic\s+)?(?P<align>\balignas\s*\((?:[^()]|\([^()]*\))*\)\s*)?\b__shared__\s+(?P<what>[^;{}]+);"
)
NAME = re.compile(r"(?P<name>\w+)\s*(?:\[[^\]]*\]\s*)*$")
OPENING, CLOSING = "([{<", ")]}>"


def without_comments(text: str) -> str:
    """Returns the text with comments and literals blanked out; positions do not change."""
    return APART.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def kernel_begin(code: str, end: int) -> int:
    """Returns where the kernel's name that ends before `end` begins. The name is an identifier with
    its namespaces and template arguments."""
    at = len(code[:end].rstrip())
    if code[at - 1] == ">":
        depth = 0
        while True:
            at -= 1
            depth += (code[at] == ">") - (code[at] == "<")
            if depth == 0:
                break
    return re.search(r"[\w:]+\s*$", code[:at]).start()


def config_end(code: str, at: int) -> int:
    """Returns the position of the ">>>" that matches the "<<<" which ends at `at`."""
    depth = 0
    while depth or not code.startswith(">>>", at):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        at += 1
    return at


def split(code: str) -> list[str]:
    """Splits a declaration at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in code:
        depth += (character in OPENING) - (character in CLOSING)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def launches(code: str):
    for found in re.finditer("<<<", code):
        begin, end = kernel_begin(code, found.start()), config_end(code, found.end())
        kernel, config = code[begin:found.start()].strip(), code[found.end():end]
        label = re.sub(r"\s+", " ", kernel)
        yield begin, end + 3, (
            f'::emulator::Launch(::emulator::Where::current(), "{label}", {config})'
            f".of([](const auto&... launched) {{ {kernel}(launched...); }})")


def shared_variables(code: str):
    for number, found in enumerate(SHARED.finditer(code)):
        what, align = found["what"], found["align"] or ""
        names = [NAME.search(part.rstrip())["name"] for part in split(what)]
        if found["extern"]:
            kind = re.sub(r"\balignas\s*\(.*\)|\b__align__\s*\(.*?\)", "",
                          what[:NAME.search(what.rstrip()).start()])
            result = (f"auto* const {names[0]} = static_cast<{kind.strip()}*>("
                      "::emulator::dynamic_shared());")
        else:
            # A struct takes any declaration: arrays, alignment, several names.
            kind = f"EmulatedShared{number}"
            result = (f"struct {kind} {{ {align}{what}; }}; auto& emulated{number} = "
                      f"::emulator::shared<{kind}>(\"{', '.join(names)}\"); ")
            result += " ".join(f"auto& {name} = emulated{number}.{name};" for name in names)
        yield found.start(), found.end(), result


def translate(text: str) -> str:
    code = without_comments(text)
    for begin, end, result in sorted([*launches(code), *shared_variables(code)], reverse=True):
        result += "\n" * (text.count("\n", begin, end) - result.count("\n"))
        text = text[:begin] + result + text[end:]
    return text


if __name__ == "__main__":
    source, result = map(Path, sys.argv[1:])
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(f'#line 1 "{source}"\n' + translate(source.read_text()))
