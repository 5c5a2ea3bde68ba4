"""PTX as C++: one statement an instruction, over registers that are local variables of a thread's function.

An instruction is found in `RULES` by its name, whose first parts are those of an opcode and whose others are options.
What a statement calls is in `machine.hpp`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_WIDTHS = {"pred": "bool", "b8": "u8", "b16": "u16", "b32": "u32", "f32": "u32", "b64": "u64"}
_COMMENT = re.compile(r"//.*$", re.MULTILINE)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
_GUARD = re.compile(r"@(!?)([%\w]+)\s+(.*)", re.DOTALL)
_IGNORED = (
    "prefetch.", "setmaxnreg.", "fence.", "griddepcontrol.", "membar.", "wgmma.fence", "cp.async.bulk.prefetch",
)  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "hi": ">"}


class NotEmulated(Exception):
    """An instruction that no rule knows."""


def translate(ptx: str) -> str:
    """The C++ of the only kernel of a module. Raises NotEmulated."""
    text = _COMMENT.sub("", ptx)
    symbols = re.findall(r"\.extern \.shared [^;]*?(\w+)\[\];", text)
    head, body = re.split(r"^\{$", text, maxsplit=1, flags=re.MULTILINE)
    parameters = re.findall(r"\.param \.\w+ (\w+)", head)
    scopes, names, out = [0], [{}], []
    variables: list[str] = []
    blocks, line = 0, text[: text.index(body)].count("\n") + 1
    pieces = re.split(r"([;{}:\n])", body)
    translator = _Translator(parameters, symbols)
    depth, held = 0, ""
    for piece in pieces:
        if piece == "\n":
            line += 1
            held += " "
            continue
        if piece == "{" and not held.strip():  # a scope, and no list of registers
            blocks += 1
            scopes.append(blocks)
            names.append({})
            held = ""
        elif piece == "}" and depth == 0:
            scopes.pop()
            names.pop()
            held = ""
        elif piece == ":" and re.fullmatch(r"\s*[$\w]+\s*", held):
            out.append(f"{_label(held.strip(), scopes[-1])}:;")
            held = ""
        elif piece == ";":
            statement = " ".join(held.split())
            held = ""
            if not statement:
                continue
            if declared := _REGISTERS.fullmatch(statement + ";"):
                for name, count in _declared(declared[2]):
                    known = name if not name.startswith("%") else name[1:]
                    for register in [known] if count is None else [f"{known}{i}" for i in range(count)]:
                        unique = f"{register}_{scopes[-1]}"
                        names[-1][("%" if name.startswith("%") else "") + register] = unique
                        variables.append(f"{_WIDTHS[declared[1]]} {unique}")
                continue
            if statement.startswith("."):
                continue  # .pragma, .loc
            known = {key: value for scope in names for key, value in scope.items()}
            out.append(translator.statement(statement, known, scopes[-1], line))
        else:
            depth += (piece == "{") - (piece == "}")
            held += piece
    used = "\n".join(out)
    live = [v for v in variables if re.search(rf"\b{v.split()[1]}\b", used)]
    declarations = "\n".join(f"    {v} = ({v.split()[0]})UNSET;" for v in live)
    return f'#include "machine.hpp"\n\nvoid kernel(Thread& t) {{\n{declarations}\n{used}\n}}\n'


def _declared(names: str) -> list[tuple[str, int | None]]:
    found = []
    for name in names.split(","):
        match = re.fullmatch(r"\s*([%\w]+)(?:<(\d+)>)?\s*", name)
        assert match, name
        found.append((match[1], int(match[2]) if match[2] else None))
    return found


def _label(name: str, scope: int) -> str:
    # Labels of inline assembly repeat; those of the compiler do not, and are jumped to from everywhere.
    return name.replace("$", "") if name.startswith("$") else f"{name}_{scope}"
