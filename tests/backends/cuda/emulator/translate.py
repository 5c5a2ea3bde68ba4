"""PTX as C++: one statement an instruction, over registers that are local variables of a thread's function.

An instruction is found in `RULES` by its name, whose first parts are those of an opcode and whose others are options.
What a statement calls is in `machine.hpp`.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping

_WIDTHS = {"pred": "bool", "b8": "u8", "b16": "u16", "f16": "u16", "b32": "u32", "f32": "u32", "b64": "u64"}
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
            out.append(translator.statement(statement, ChainMap(*reversed(names)), scopes[-1], line))
        else:
            depth += (piece == "{") - (piece == "}")
            held += piece
    used = set(re.findall(r"\w+", " ".join(out)))
    live = [variable for variable in variables if variable.split()[1] in used]
    declarations = "\n".join(f"    {variable} = ({variable.split()[0]})UNSET;" for variable in live)
    body = "\n".join(out)
    return f'#include "machine.hpp"\n\nvoid kernel(Thread& t) {{\n{declarations}\n{body}\n}}\n'


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


class _Translator:
    """What the statements of one kernel have in common."""

    def __init__(self, parameters: list[str], symbols: list[str]) -> None:
        self.parameters, self.symbols = parameters, symbols

    def statement(self, text: str, names: Mapping[str, str], scope: int, line: int) -> str:
        if guard := _GUARD.fullmatch(text):
            condition = self.value(guard[2], names)
            return f"    if ({guard[1]}{condition}) {{ {self.statement(guard[3], names, scope, line).strip()} }}"
        name, _, rest = text.partition(" ")
        if name.startswith(_IGNORED):
            return "    ;"
        call = Instruction(self, name, _operands(rest), names, scope, line)
        for pattern, rule in RULES:
            if match := re.fullmatch(pattern, name):
                return f"    {rule(call, *match.groups())}"
        raise NotEmulated(f"{text!r} at line {line}: expected an instruction that a rule of translate.py knows")

    def value(self, operand: str, names: Mapping[str, str]) -> str:
        if operand in names:
            return names[operand]
        if operand.startswith("%") and (special := _special(operand[1:])):
            return special
        if operand in self.symbols:
            return "t.shared_first"
        if match := re.fullmatch(r"0f([0-9a-fA-F]{8})", operand):
            return f"0x{match[1]}u"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            return f"0x{number % (1 << 64):x}ull" if not 0 <= number < 1 << 31 else f"{number}"
        raise NotEmulated(f"the operand {operand!r}")


def _special(name: str) -> str | None:
    axis = "xyz".find(name[-1])
    return {
        "tid": ("t.tid % t.block[0]", "t.tid / t.block[0] % t.block[1]", "t.tid / t.block[0] / t.block[1]")[axis],
        "ntid": f"t.block[{axis}]", "ctaid": f"t.ctaid[{axis}]", "nctaid": f"t.nctaid[{axis}]",
    }.get(name[:-2]) or {
        "cluster_ctarank": "t.cluster_rank", "cluster_nctarank": "t.cluster_size", "laneid": "t.lane",
    }.get(name)  # fmt: skip


def _operands(text: str) -> list[str]:
    """Parts between commas that are in no braces or brackets."""
    parts, depth, part = [], 0, ""
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return [*parts, part.strip()] if part.strip() else parts


class Instruction:
    """One instruction, and its operands as C++."""

    def __init__(
        self, translator: _Translator, name: str, operands: list[str], names: Mapping[str, str], scope: int, line: int
    ) -> None:
        self._translator, self._names, self._scope = translator, names, scope
        self.name, self.operands, self.line = name, operands, line

    def __len__(self) -> int:
        return len(self.operands)

    def raw(self, which: int) -> str:
        return self.operands[which]

    def __getitem__(self, which: int) -> str:
        return self._translator.value(self.operands[which], self._names)

    def typed(self, which: int, kind: str) -> str:
        """As a number of PTX's type `kind`, such as s32."""
        return f"({_number(kind)}){self[which]}"

    def registers(self, which: int) -> list[str]:
        """Of a list in braces, or one alone."""
        return [self._translator.value(part, self._names) for part in _operands(self.operands[which].strip("{}"))]

    def either(self, which: int) -> tuple[str, str]:
        """The registers of `a|b`."""
        first, _, second = self.operands[which].partition("|")
        return self._translator.value(first, self._names), self._translator.value(second, self._names)

    def address(self, which: int) -> str:
        base, _, offset = self.operands[which].strip("[]").partition("+")
        return f"({self._translator.value(base.strip(), self._names)} + {int(offset or 0)})"

    def parameter(self, which: int) -> str:
        base, _, offset = self.operands[which].strip("[]").partition("+")
        assert not offset, "parameters are scalars"
        return f"t.parameters[{self._translator.parameters.index(base)}]"

    def label(self, which: int) -> str:
        return _label(self.operands[which], self._scope)

    def put(self, value: str, which: int = 0) -> str:
        """To a register, which may be wider or narrower; `_` is none."""
        target = self.operands[which]
        return f"{value};" if target == "_" else f"{self[which]} = {value};"


def _number(kind: str) -> str:
    return {"b": "u", "f": "u", "u": "u", "s": "s"}[kind[0]] + kind[1:]


def _unsigned(kind: str) -> str:
    return "u" + kind[1:]


def _binary(i: Instruction, operation: str, kind: str) -> str:
    if kind == "pred":
        return i.put(f"{i[1]} {operation} {i[2]}")
    return i.put(f"({_unsigned(kind)})({i.typed(1, _unsigned(kind))} {operation} {i.typed(2, _unsigned(kind))})")


def _float(i: Instruction, name: str) -> str:
    return i.put(f"{name}({', '.join(i[n] for n in range(1, len(i)))})")


def _extreme(i: Instruction, name: str, kind: str) -> str:
    a, b = i.typed(1, kind), i.typed(2, kind)
    return i.put(f"({_unsigned(kind)})({a} {'<' if name == 'min' else '>'} {b} ? {a} : {b})")


def _wide(i: Instruction, kind: str, sum_of: bool) -> str:
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    product = f"(u64)(({_number(wide)})({i.typed(1, kind)}) * ({_number(wide)})({i.typed(2, kind)}))"
    return i.put(f"(u{wide[1:]})({product} + {i[3]})" if sum_of else f"(u{wide[1:]}){product}")


def _high(i: Instruction, kind: str) -> str:
    wide = f"{kind[0]}64"
    return i.put(f"(u32)((({wide})({i.typed(1, kind)}) * ({wide})({i.typed(2, kind)})) >> 32)")


def _compare(i: Instruction, how: str, kind: str) -> str:
    if kind == "f32":
        a, b = f"fp32({i[1]})", f"fp32({i[2]})"
        if how.endswith("u") and how != "u":  # or one of them is no number
            return i.put(f"!({a} {_COMPARISONS[_OPPOSITE[how[:-1]]]} {b})")
        if how in ("num", "nan"):
            return i.put(f"({a} == {a} && {b} == {b}) == {int(how == 'num')}")
        return i.put(f"{a} {_COMPARISONS[how]} {b} && {a} == {a} && {b} == {b}")
    return i.put(f"{i.typed(1, kind)} {_COMPARISONS[how]} {i.typed(2, kind)}")


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _move(i: Instruction, kind: str) -> str:
    if i.raw(1).startswith("{"):
        parts = i.registers(1)
        bits = int(kind[1:]) // len(parts)
        terms = (f"(u{kind[1:]})(u{bits}){part} << {bits * n}" for n, part in enumerate(parts))
        return i.put(f"(u{kind[1:]})({' | '.join(terms)})")
    if i.raw(0).startswith("{"):
        parts = i.registers(0)
        bits = int(kind[1:]) // len(parts)
        return " ".join(f"{part} = (u{bits})({i[1]} >> {bits * n});" for n, part in enumerate(parts))
    return i.put(i[1])


def _load(i: Instruction, place: str, count: str | None, kind: str) -> str:
    number, n = _number(kind), int(count or 1)
    width = int(kind[1:]) // 8 * n
    put = " ".join(f"{to} = v.x[{k}];" for k, to in enumerate(i.registers(0)))
    return f"{{ auto v = load<{number}, {n}>({place}(t, {i.address(1)}, {width}, {i.line})); {put} }}"


def _store(i: Instruction, place: str, count: str | None, kind: str) -> str:
    number, n = _unsigned(kind), int(count or 1)
    width = int(kind[1:]) // 8 * n
    values = ", ".join(f"({number}){value}" for value in i.registers(1))
    return f"store<{number}, {n}>({place}(t, {i.address(0)}, {width}, {i.line}), {{{{{values}}}}});"


def _atomic(i: Instruction, place: str, operation: str, kind: str, gives: bool) -> str:
    number, at, by = _number(kind), int(gives), int(gives) + 1
    given = f"({number}){i[by]}"
    change = {
        "add": f"old + {given}", "or": f"old | {given}", "and": f"old & {given}", "exch": given,
        "max": f"old > {given} ? old : {given}", "min": f"old < {given} ? old : {given}",
    }[operation]  # fmt: skip
    width = int(kind[1:]) // 8
    call = (
        f"exchange<{number}>({place}(t, {i.address(at)}, {width}, {i.line}), [&]({number} old) {{ return {change}; }})"
    )
    return i.put(f"({_unsigned(kind)}){call}") if gives else f"(void){call};"


def _place(space: str | None) -> str:
    return {None: "global_at", "global": "global_at", "shared": "shared_at", "shared::cta": "shared_at",
            "shared::cluster": "cluster_shared_at"}[space]  # fmt: skip


def _shuffle(i: Instruction, how: str) -> str:
    direction = {"up": "UP", "down": "DOWN", "bfly": "BUTTERFLY", "idx": "INDEX"}[how]
    to, inside = i.either(0) if "|" in i.raw(0) else (i[0], "unused")
    call = f"{to} = shuffle(t, {direction}, {i[1]}, {i[2]}, {i[3]}, {i[4]}, inside, {i.line});"
    keep = "" if inside == "unused" else f" {inside} = inside;"
    return f"{{ bool inside; {call}{keep} }}"


def _vote(i: Instruction, how: str) -> str:
    found = f"ballot(t, {i[1]}, {i[2]}, {i.line})"
    return i.put({"any": f"{found} != 0", "all": f"{found} == (u32)({i[2]})", "ballot": found}[how])


def _references(registers: list[str]) -> str:
    return ", ".join(f"&{register}" for register in registers)


def _mma(i: Instruction, kind: str) -> str:
    half = {"bf16": "BF16", "f16": "F16"}[kind]
    begin = " ".join(f"u32 s{n} = {value};" for n, value in enumerate(i.registers(3)))
    a, b = (f"const u32 {name}[] = {{{', '.join(i.registers(n))}}};" for name, n in (("a", 1), ("b", 2)))
    call = f"u32* const sums[] = {{&s0, &s1, &s2, &s3}}; multiply(t, {half}, sums, a, b, {i.line});"
    end = " ".join(f"{to} = s{n};" for n, to in enumerate(i.registers(0)))
    return f"{{ {begin} {a} {b} {call} {end} }}"


def _wgmma(i: Instruction, columns: str, kind: str) -> str:
    half = {"bf16": "BF16", "f16": "F16"}[kind]
    held = i.raw(1).startswith("{")
    if [i.raw(4), i.raw(5)] != ["1", "1"] or (not held and i.raw(6) != "0"):
        raise NotEmulated(f"{i.name} with {i.operands[4:]}: expected positive operands, A not turned")
    turned = i[6] if held else i[7]
    a = f"const u32* const a[] = {{{_references(i.registers(1))}}};" if held else "const u32* const* a = nullptr;"
    return (
        f"{{ u32* const sums[] = {{{_references(i.registers(0))}}}; {a} multiply_async(t, {half}, {columns}, sums, a, "
        f"{'0' if held else i[1]}, {i[2]}, {turned}, {i[3]}, {i.line}); }}"
    )


def _bulk(i: Instruction) -> str:
    return f"copy_bulk(t, {i.address(0)}, {i.address(1)}, {i[2]}, {i.address(3)}, {i.line});"


def _give(i: Instruction) -> str:
    words = i.registers(1)
    call = f"store_async(t, {i.address(0)}, words, {len(words)}, {i.address(2)}, {i.line});"
    return f"{{ const u32 words[] = {{{', '.join(words)}}}; {call} }}"


def _matrices(i: Instruction, count: str, turned: bool) -> str:
    to = _references(i.registers(0))
    return f"{{ u32* const to[] = {{{to}}}; load_matrices(t, to, {count}, {int(turned)}, {i.address(1)}, {i.line}); }}"


def _narrow(i: Instruction, relu: bool, kind: str) -> str:
    name = {"bf16x2": "bf16x2_relu_of_f32" if relu else "bf16x2_of_f32", "f16x2": "f16x2_of_f32"}[kind]
    return i.put(f"{name}({i[1]}, {i[2]})")


def _copy_small(i: Instruction, bytes_: str) -> str:
    live = i[3] if len(i) > 3 else bytes_
    return f"copy_small(t, {i.address(0)}, {i.address(1)}, {bytes_}, {live}, {i.line});"


_INT = r"([sub](?:16|32|64))"
_REDUCE = {"add": "ADD", "and": "AND", "or": "OR", "xor": "XOR"}
RULES: list[tuple[str, Callable[..., str]]] = [
    (rf"add\.{_INT}", lambda i, k: _binary(i, "+", k)),
    (rf"sub\.{_INT}", lambda i, k: _binary(i, "-", k)),
    (rf"mul\.lo\.{_INT}", lambda i, k: _binary(i, "*", k)),
    (rf"mul\.wide\.{_INT}", lambda i, k: _wide(i, k, False)),
    (rf"mad\.wide\.{_INT}", lambda i, k: _wide(i, k, True)),
    (r"mul\.hi\.([su]32)", _high),
    (rf"mad\.lo\.{_INT}", lambda i, k: i.put(f"(u{k[1:]})({i[1]} * {i[2]} + {i[3]})")),
    (rf"(min|max)\.{_INT}", _extreme),
    (rf"div\.{_INT}", lambda i, k: i.put(f"divide<{_number(k)}>(t, {i[1]}, {i[2]}, {i.line})")),
    (rf"rem\.{_INT}", lambda i, k: i.put(f"remainder_of<{_number(k)}>(t, {i[1]}, {i[2]}, {i.line})")),
    (rf"neg\.{_INT}", lambda i, k: i.put(f"(u{k[1:]})(0 - {i[1]})")),
    (rf"abs\.{_INT}", lambda i, k: i.put(f"(u{k[1:]})({i.typed(1, k)} < 0 ? 0 - {i[1]} : {i[1]})")),
    (r"and\.(\w+)", lambda i, k: _binary(i, "&", k)),
    (r"or\.(\w+)", lambda i, k: _binary(i, "|", k)),
    (r"xor\.(\w+)", lambda i, k: _binary(i, "^", k)),
    (r"not\.pred", lambda i: i.put(f"!{i[1]}")),
    (r"not\.(b\d+)", lambda i, k: i.put(f"(u{k[1:]})~{i[1]}")),
    (r"shl\.(b\d+)", lambda i, k: i.put(f"shl<u{k[1:]}>({i[1]}, {i[2]})")),
    (rf"shr\.{_INT}", lambda i, k: i.put(f"(u{k[1:]})shr<{_number(k)}>({i.typed(1, k)}, {i[2]})")),
    (r"lop3\.b32", lambda i: _float(i, "lop3")),
    (r"popc\.b32", lambda i: i.put(f"(u32)__builtin_popcount({i[1]})")),
    (r"(brev|clz|prmt|bfi)\.b32", _float),
    (r"bfe\.u32", lambda i: _float(i, "bfe_u32")),
    (r"bfind\.u32", lambda i: _float(i, "bfind")),
    (r"bfind\.shiftamt\.u32", lambda i: _float(i, "bfind_shift")),
    (r"(add|sub|mul)\.(?:rn\.)?f32", lambda i, n: _float(i, f"{n}_f32")),
    (r"(max|min|abs|neg)\.f32", lambda i, n: _float(i, f"{n}_f32")),
    (r"fma\.rn\.f32", lambda i: _float(i, "fma_f32")),
    (r"div\.rn\.f32", lambda i: _float(i, "div_f32")),
    (r"ex2\.approx\.ftz\.f32", lambda i: _float(i, "ex2_ftz")),
    (r"rcp\.approx\.ftz\.f32", lambda i: _float(i, "rcp_ftz")),
    (r"mul\.(?:rn\.)?(bf16x2|f16x2)", lambda i, k: _float(i, f"mul_{k}")),
    (r"setp\.(\w+)\.(\w+)", _compare),
    (r"selp\.(\w+)", lambda i, k: i.put(f"(u{k[1:]})({i[3]} ? {i[1]} : {i[2]})")),
    (r"mov\.pred", lambda i: i.put(i[1])),
    (r"mov\.([busf]\d+)", _move),
    (r"cvta(?:\.to)?\.\w+\.u64", lambda i: i.put(i[1])),
    (r"cvt\.([su]\d+)\.([su]\d+)", lambda i, to, of: i.put(f"(u{to[1:]})({_number(to)})({_number(of)}){i[1]}")),
    (r"cvt\.rn\.f32\.([su]32)", lambda i, k: i.put(f"fp32_bits((float){i.typed(1, k)})")),
    (r"cvt\.f32\.f16", lambda i: i.put(f"fp32_bits(f16({i[1]}))")),
    (r"cvt\.f32\.bf16", lambda i: i.put(f"fp32_bits(bf16({i[1]}))")),
    (r"cvt\.rn\.(relu\.)?(bf16x2|f16x2)\.f32", lambda i, r, k: _narrow(i, r is not None, k)),
    (r"cvt\.rn\.bf16\.f32", lambda i: i.put(f"bf16_bits(fp32({i[1]}))")),
    (r"cvt\.rn\.f16x2\.e4m3x2", lambda i: _float(i, "f16x2_of_e4m3x2")),
    (r"ld\.param\.(\w+)", lambda i, k: i.put(f"({_unsigned(k)}){i.parameter(1)}")),
    (r"ld(?:\.volatile|\.relaxed\.\w+)?(?:\.(global|shared|shared::cta|shared::cluster))?(?:\.nc)?(?:\.L[12]::\w+)*"
     r"(?:\.v([24]))?\.([busf]\d+)", lambda i, s, n, k: _load(i, _place(s), n, k)),
    (r"st(?:\.volatile)?(?:\.(global|shared|shared::cta|shared::cluster))?(?:\.v([24]))?\.([busf]\d+)",
     lambda i, s, n, k: _store(i, _place(s), n, k)),
    (r"atom\.(global|shared)\.(\w+)\.([bus]\d+)", lambda i, s, o, k: _atomic(i, _place(s), o, k, True)),
    (r"red\.(global|shared)\.(\w+)\.([bus]\d+)", lambda i, s, o, k: _atomic(i, _place(s), o, k, False)),
    (r"bra(?:\.uni)?", lambda i: f"goto {i.label(0)};"),
    (r"ret|exit", lambda _: "return;"),
    (r"trap", lambda i: f'fail(t, {i.line}, "trap");'),
    (r"(?:bar|barrier)\.sync(?:\.aligned)?", lambda i: f"cta_meet(t, {i[0]}, {i[1] if len(i) > 1 else 0}, {i.line});"),
    (r"bar\.red\.or\.pred", lambda i: i.put(f"cta_any(t, {i[1]}, {i[2]}, {i[3]}, {i.line})")),
    (r"bar\.warp\.sync", lambda i: f"warp_meet(t, {i[0]}, {i.line});"),
    (r"shfl\.sync\.(up|down|bfly|idx)\.b32", _shuffle),
    (r"vote\.sync\.(any|all|ballot)\.\w+", _vote),
    (r"redux\.sync\.(add|and|or|xor)\.\w+", lambda i, o: i.put(f"reduce(t, {_REDUCE[o]}, {i[1]}, {i[2]}, {i.line})")),
    (r"redux\.sync\.(min|max)\.([su]32)",
     lambda i, o, k: i.put(f"reduce(t, {o.upper()}_{k.upper()}, {i[1]}, {i[2]}, {i.line})")),
    (r"mapa\.shared::cluster\.u32", lambda i: i.put(f"remote_address(t, {i[1]}, {i[2]}, {i.line})")),
    (r"barrier\.cluster\.arrive(?:\.\w+)*", lambda i: f"cluster_arrive(t, {i.line});"),
    (r"barrier\.cluster\.wait(?:\.\w+)*", lambda i: f"cluster_wait(t, {i.line});"),
    (r"mbarrier\.init\.shared::cta\.b64", lambda i: f"barrier_init(t, {i.address(0)}, {i[1]}, {i.line});"),
    (r"mbarrier\.arrive\.shared::cta\.b64", lambda i: f"barrier_arrive(t, {i.address(1)}, 0, {i.line});"),
    (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64",
     lambda i: f"barrier_arrive(t, {i.address(1)}, {i[2]}, {i.line});"),
    (r"mbarrier\.try_wait\.parity\.shared::cta\.b64",
     lambda i: f"barrier_wait(t, {i.address(1)}, {i[2]}, {i.line}); {i[0]} = true;"),
    (r"cp\.async\.(?:ca|cg)\.shared\.global(?:\.L2::\w+)?", lambda i: _copy_small(i, i[2])),
    (r"cp\.async\.commit_group", lambda _: "copies_commit(t);"),
    (r"cp\.async\.wait_group", lambda i: f"copies_wait(t, {i[0]});"),
    (r"cp\.async\.wait_all", lambda _: "copies_commit(t); copies_wait(t, 0);"),
    (r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta\.b64", lambda i: f"copies_arrive(t, {i.address(0)}, {i.line});"),
    (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes", _bulk),
    (r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v[24])?\.[bf]32", _give),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16",
     lambda i, n, turned: _matrices(i, n, turned is not None)),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", lambda i: i.put(f"transpose_matrix(t, {i[1]}, {i.line})")),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\w+\.f32", _mma),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\w+", _wgmma),
    (r"wgmma\.commit_group\.sync\.aligned", lambda i: f"matrices_commit(t, {i.line});"),
    (r"wgmma\.wait_group\.sync\.aligned", lambda i: f"matrices_wait(t, {i[0]}, {i.line});"),
]  # fmt: skip
