"""Reads PTX: the statements of one kernel, with the scopes of their names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Statement:
    """An instruction or a declaration, in the line of the PTX and in the scope where it stands."""

    text: str
    line: int
    scope: int


@dataclass(frozen=True)
class Label:
    name: str
    scope: int


@dataclass
class Kernel:
    """`parents` are the scopes around a scope. `shared` are the names of arrays in shared memory, with their alignment
    and bytes, 0 for that of which a launch gives the size."""

    name: str
    parameters: list[str]
    ctas_per_sm: int
    body: list[Statement | Label] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)


_SHARED = re.compile(r"(?:\.\w+ )*\.shared (?:\.align (\d+) )?\.[bufs](\d+) ([\w$]+)(?:\[(\d*)\])?$")


def read(text: str, name: str) -> Kernel:
    """The kernel `name` of `text`. Raises ValueError where there is none, or what cannot be read."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(rf"\.entry {name}\s*\((.*?)\)([^{{]*)\{{", text, re.DOTALL)
    if entry is None:
        raise ValueError(f"the PTX has no kernel {name}")
    parameters = re.findall(r"\.param \.\w+ ([\w$]+)", entry[1])
    if len(parameters) != entry[1].count(".param"):
        raise ValueError(f"the parameters of {name} are not all numbers: {entry[1]}")
    per_sm = re.search(r"\.minnctapersm (\d+)", entry[2])
    kernel = Kernel(name, parameters, int(per_sm[1]) if per_sm else 1)
    head = re.sub(r"\.(version|target|address_size) .*", "", text[: entry.start()])
    for declaration in re.findall(r"^\.[^;{}]*;", head, re.MULTILINE):
        if " .shared " in declaration or declaration.startswith(".shared"):
            _note_shared(kernel, " ".join(declaration.rstrip(";").split()))
        else:
            raise ValueError(f"the emulator does not know this variable of a module: {declaration}")
    _read_body(kernel, text, entry.end())
    return kernel


def _note_shared(kernel: Kernel, declaration: str) -> None:
    found = _SHARED.match(declaration)
    if found is None:
        raise ValueError(f"the emulator does not know this variable: {declaration}")
    align, bits, name, count = found.groups()
    size = int(bits) // 8 * (1 if count is None else int(count or 0))
    kernel.shared[name] = (int(align or int(bits) // 8), size)


def _read_body(kernel: Kernel, text: str, at: int) -> None:
    line = text.count("\n", 0, at) + 1
    scope, words, begun = 0, "", line
    for char in text[at:]:
        if not words.strip():
            words, begun = "", line
        if char == ";":
            statement = " ".join(words.split())
            if statement.startswith(".shared"):
                _note_shared(kernel, statement)
            else:
                kernel.body.append(Statement(statement, begun, scope))
            words = ""
        elif char == "{" and not words:
            kernel.parents.append(scope)
            scope = len(kernel.parents) - 1
        elif char == "}" and not words:
            if scope == 0:
                return
            scope = kernel.parents[scope]
        elif char == ":" and re.fullmatch(r"[\w$]+", words.strip()):
            kernel.body.append(Label(words.strip(), scope))
            words = ""
        else:
            words += char
        line += char == "\n"
    raise ValueError(f"the PTX of {kernel.name} does not end")
