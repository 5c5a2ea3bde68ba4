"""Translates the PTX of a kernel to C++: a statement for each instruction, over registers that are local variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .ptx import Kernel, Label, Statement

_INT = r"(?P<kind>[usb])(?P<bits>8|16|32|64)"
_NOTHING = ";"

# What an instruction is, by its name. {0} and on are its operands, counted from the end where they are negative; {2?},
# {2?1} and {3?2} are 0, 1 and operand 2 where that operand is missing; {_} is nothing, if the first one is. U and T are
# the type that the name ends with, unsigned and as it says, W and X twice as wide.
_SIMPLE = {
    rf"add\.{_INT}": "{0} = ({U})({1} + {2});",
    rf"sub\.{_INT}": "{0} = ({U})({1} - {2});",
    rf"mul\.lo\.{_INT}": "{0} = ({U})(({U}){1} * ({U}){2});",
    rf"mul\.wide\.{_INT}": "{0} = ({W})(({X})({T}){1} * ({X})({T}){2});",
    rf"mul\.hi\.{_INT}": "{0} = ({U})((({X})({T}){1} * ({X})({T}){2}) >> {bits});",
    rf"mad\.lo\.{_INT}": "{0} = ({U})(({U}){1} * ({U}){2} + {3});",
    rf"mad\.wide\.{_INT}": "{0} = ({W})(({X})({T}){1} * ({X})({T}){2} + {3});",
    rf"div\.{_INT}": "{0} = ({U})divide<{T}>(t, ({T}){1}, ({T}){2}, {line});",
    rf"rem\.{_INT}": "{0} = ({U})remainder_of<{T}>(t, ({T}){1}, ({T}){2}, {line});",
    rf"min\.{_INT}": "{0} = ({U})(({T}){1} < ({T}){2} ? ({T}){1} : ({T}){2});",
    rf"max\.{_INT}": "{0} = ({U})(({T}){1} > ({T}){2} ? ({T}){1} : ({T}){2});",
    rf"abs\.{_INT}": "{0} = ({U})(({T}){1} < 0 ? 0 - {1} : {1});",
    rf"neg\.{_INT}": "{0} = ({U})(0 - {1});",
    rf"and\.{_INT}": "{0} = ({U})({1} & {2});",
    rf"or\.{_INT}": "{0} = ({U})({1} | {2});",
    rf"xor\.{_INT}": "{0} = ({U})({1} ^ {2});",
    rf"not\.{_INT}": "{0} = ({U})~{1};",
    r"and\.pred": "{0} = {1} & {2};",
    r"or\.pred": "{0} = {1} | {2};",
    r"xor\.pred": "{0} = {1} != bool({2});",  # of -1 it is not
    r"not\.pred": "{0} = !{1};",
    r"mov\.pred": "{0} = {1};",
    r"cvta(\.to)?\.global\.u64": "{0} = {1};",
    rf"shl\.{_INT}": "{0} = shl<{U}>(({U}){1}, {2});",
    rf"shr\.{_INT}": "{0} = ({U})shr<{T}>(({T}){1}, {2});",
    r"popc\.b32": "{0} = (u32)__builtin_popcount({1});",
    r"clz\.b32": "{0} = clz({1});",
    r"brev\.b32": "{0} = brev({1});",
    r"bfind\.u32": "{0} = bfind({1});",
    r"bfind\.shiftamt\.u32": "{0} = bfind_shift({1});",
    r"shf\.(?P<op>[lr])\.(?P<how>wrap|clamp)\.b32": "{0} = shf_{op}({1}, {2}, {how}({3}));",
    r"bfi\.b32": "{0} = bfi({1}, {2}, {3}, {4});",
    r"bfe\.u32": "{0} = bfe_u32({1}, {2}, {3});",
    r"lop3\.b32": "{0} = lop3({1}, {2}, {3}, {4});",
    r"prmt\.b32": "{0} = prmt({1}, {2}, {3});",
    rf"selp\.{_INT}": "{0} = {3} ? ({U}){1} : ({U}){2};",
    r"selp\.f32": "{0} = {3} ? {1} : {2};",
    # Numbers
    r"(?P<op>add|sub|mul)(\.rn)?\.f32": "{0} = {op}_f32({1}, {2});",
    r"(?P<op>max|min)\.f32": "{0} = {op}_f32({1}, {2});",
    r"(?P<op>abs|neg)\.f32": "{0} = {op}_f32({1});",
    r"fma\.rn\.f32": "{0} = fma_f32({1}, {2}, {3});",
    r"div\.rn\.f32": "{0} = div_f32({1}, {2});",
    r"sqrt\.rn\.f32": "{0} = sqrt_f32({1});",
    r"ex2\.approx\.ftz\.f32": "{0} = ex2_ftz({1});",
    r"rcp\.approx\.ftz\.f32": "{0} = rcp_ftz({1});",
    r"mul(\.rn)?\.(?P<op>bf16x2|f16x2)": "{0} = mul_{op}({1}, {2});",
    r"cvt\.rn\.(?P<op>bf16x2|f16x2)\.f32": "{0} = {op}_of_f32({1}, {2});",
    r"cvt\.rn\.relu\.bf16x2\.f32": "{0} = bf16x2_relu_of_f32({1}, {2});",
    r"cvt\.rn\.(?P<op>bf16|f16)\.f32": "{0} = {op}_bits(fp32({1}));",
    r"cvt\.f32\.(?P<op>bf16|f16)": "{0} = fp32_bits({op}({1}));",
    r"cvt\.rn\.f16x2\.e4m3x2": "{0} = f16x2_of_e4m3x2({1});",
    rf"cvt\.rn\.f32\.{_INT}": "{0} = fp32_bits((float)({T}){1});",
    rf"cvt\.(?P<to>[us](?:8|16|32|64))\.{_INT}": "{0} = ({to})({T}){1};",
    # Order
    r"bra(\.uni)?": "goto {0};",
    r"ret|exit": "return;",
    r"trap": 'fail(t, {line}, "trap");',
    r"(bar|barrier)\.sync(\.aligned)?": "cta_meet(t, {0}, {1?}, {line});",
    r"(bar|barrier)\.arrive(\.aligned)?": "cta_arrive(t, {0}, {1}, {line});",
    r"bar\.red\.or\.pred": "{0} = cta_reduce(t, ANY, {1}, {-2?}, {-1}, {line});",
    r"bar\.red\.and\.pred": "{0} = cta_reduce(t, EVERY, {1}, {-2?}, {-1}, {line});",
    r"bar\.red\.popc\.u32": "{0} = cta_reduce(t, COUNT, {1}, {-2?}, {-1}, {line});",
    r"bar\.warp\.sync": "warp_meet(t, (u32){0}, {line});",
    r"barrier\.cluster\.arrive(\.release|\.relaxed)?(\.aligned)?": "cluster_arrive(t, {line});",
    r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?": "cluster_wait(t, {line});",
    r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32": "aligned(t, {line});",
    r"vote\.sync\.ballot\.b32": "{0} = ballot(t, {1}, {2}, {line});",
    r"vote\.sync\.(?P<op>any|all)\.pred": "{0} = vote_{op}(t, {1}, {2}, {line});",
    r"redux\.sync\.add\.[us]32": "{0} = reduce(t, ADD, {1}, {2}, {line});",
    r"redux\.sync\.min\.u32": "{0} = reduce(t, MIN_U32, {1}, {2}, {line});",
    r"redux\.sync\.max\.u32": "{0} = reduce(t, MAX_U32, {1}, {2}, {line});",
    r"redux\.sync\.min\.s32": "{0} = reduce(t, MIN_S32, {1}, {2}, {line});",
    r"redux\.sync\.max\.s32": "{0} = reduce(t, MAX_S32, {1}, {2}, {line});",
    r"redux\.sync\.and\.b32": "{0} = reduce(t, AND, {1}, {2}, {line});",
    r"redux\.sync\.or\.b32": "{0} = reduce(t, OR, {1}, {2}, {line});",
    r"redux\.sync\.xor\.b32": "{0} = reduce(t, XOR, {1}, {2}, {line});",
    # Fences order what happens here in order anyway, but for those before asynchronous reads.
    r"fence\.proxy\.async(\.shared::cta)?": "fence_async(t);",
    r"fence(\.acq_rel|\.sc)?\.(cta|cluster|gpu|sys)|fence\.mbarrier_init\.release\.cluster": _NOTHING,
    r"membar\.(cta|gl|sys)": _NOTHING,
    r"griddepcontrol\.wait": "t.waited = true;",
    r"griddepcontrol\.launch_dependents|\.pragma|prefetch\.global\.L[12]": _NOTHING,
    # Barriers in shared memory
    r"mbarrier\.init(\.shared(::cta)?)\.b64": "barrier_init(t, {0}, {1}, {line});",
    r"mbarrier\.inval(\.shared(::cta)?)\.b64": "barrier_invalidate(t, {0}, {line});",
    r"mbarrier\.arrive(\.release\.(cta|cluster))?\.shared(::cta)?\.b64": "{_}barrier_arrive(t, {1}, {2?1}, {line});",
    r"mbarrier\.arrive(\.release\.(cta|cluster))?\.shared::cluster\.b64": (
        "{_}barrier_arrive_remote(t, {1}, {2?1}, {line});"
    ),
    r"mbarrier\.arrive\.expect_tx(\.release\.cta)?\.shared(::cta)?\.b64": "{_}barrier_expect(t, {1}, {2}, {line});",
    r"mbarrier\.try_wait\.parity(\.acquire\.(cta|cluster))?\.shared(::cta)?\.b64": (
        "{0} = barrier_try_wait(t, {1}, {2}, {line});"
    ),
    r"mapa\.shared::cluster\.u32": "{0} = remote_address(t, {1}, {2}, {line});",
    # Copies
    r"cp\.async\.c[ag]\.shared(::cta)?\.global(\.L2::\w+)?": ("copy_small(t, {0}, {1}, {2}, {3?2}, {line});"),
    r"cp\.async\.commit_group": "copies_commit(t);",
    r"cp\.async\.wait_group": "copies_wait(t, {0});",
    r"cp\.async\.wait_all": "copies_wait_all(t);",
    r"cp\.async\.mbarrier\.arrive\.noinc(\.shared(::cta)?)?\.b64": "copies_arrive(t, {0}, {line});",
    r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes": (
        "copy_bulk(t, {0}, {1}, {2}, {3}, {line});"
    ),
    # Matrices
    r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16": "{0} = transpose_matrix(t, {1}, {line});",
    r"wgmma\.fence\.sync\.aligned": "matrices_fence(t, {line});",
    r"wgmma\.commit_group\.sync\.aligned": "matrices_commit(t, {line});",
    r"wgmma\.wait_group\.sync\.aligned": "matrices_wait(t, {0}, {line});",
}
_COMPARISONS = {
    "eq": "{a} == {b}", "ne": "{a} != {b}", "lt": "{a} < {b}", "le": "{a} <= {b}", "gt": "{a} > {b}",
    "ge": "{a} >= {b}", "lo": "{a} < {b}", "ls": "{a} <= {b}", "hi": "{a} > {b}", "hs": "{a} >= {b}",
}  # fmt: skip
# "ne" of numbers is false where one is NaN; the others with "u" are true there.
_FLOAT_COMPARISONS = {
    "eq": "{a} == {b}", "ne": "{a} < {b} || {a} > {b}", "lt": "{a} < {b}", "le": "{a} <= {b}", "gt": "{a} > {b}",
    "ge": "{a} >= {b}", "equ": "!({a} < {b} || {a} > {b})", "neu": "{a} != {b}", "ltu": "!({a} >= {b})",
    "leu": "!({a} > {b})", "gtu": "!({a} <= {b})", "geu": "!({a} < {b})", "num": "{a} == {a} && {b} == {b}",
    "nan": "{a} != {a} || {b} != {b}",
}  # fmt: skip
_SPECIAL = {
    "%tid.x": "(t.tid % t.block[0])", "%tid.y": "(t.tid / t.block[0] % t.block[1])",
    "%tid.z": "(t.tid / t.block[0] / t.block[1])", "%ntid.x": "t.block[0]", "%ntid.y": "t.block[1]",
    "%ntid.z": "t.block[2]",
    "%ctaid.x": "t.ctaid[0]", "%ctaid.y": "t.ctaid[1]", "%ctaid.z": "t.ctaid[2]",
    "%nctaid.x": "t.nctaid[0]", "%nctaid.y": "t.nctaid[1]", "%nctaid.z": "t.nctaid[2]",
    "%laneid": "t.lane", "%cluster_ctarank": "t.cluster_rank", "%cluster_nctarank": "t.cluster_size",
}  # fmt: skip
_REGISTERS = {"pred": "bool", "8": "u8", "16": "u16", "32": "u32", "64": "u64"}
# Of loads and stores, what says nothing about their value here.
_HINTS = {"nc", "volatile", "relaxed", "weak", "gpu", "sys"}


def translate(kernel: Kernel, shared_start: dict[str, int]) -> str:
    """C++ of `kernel`, whose arrays in shared memory begin at `shared_start`. Raises NotImplementedError for an
    instruction that is not known, and names it."""
    return _Translation(kernel, shared_start).text()


@dataclass(frozen=True)
class _Declared:
    type: str
    name: str
    numbered: bool


class _Translation:
    def __init__(self, kernel: Kernel, shared_start: dict[str, int]) -> None:
        self._kernel = kernel
        self._shared_start = shared_start
        self._declared: dict[tuple[int, str], _Declared] = {}
        self._labels = {(item.scope, item.name) for item in kernel.body if isinstance(item, Label)}
        self._registers: dict[str, str] = {}
        self._scope = self._line = 0
        self._rules = [(re.compile(pattern), template) for pattern, template in _SIMPLE.items()]
        self._special: list[tuple[re.Pattern[str], Callable[[re.Match[str], list[str]], str]]] = [
            (re.compile(r"setp\.(\w+)\.(f32|[usb]\d+)"), self._compare),
            (re.compile(r"mov\.[busf](16|32|64)"), self._move),
            (re.compile(r"(atom|red)(?:\.relaxed|\.gpu|\.cta)*\.(shared|global)\.(\w+)\.([usb])(32|64)"), self._atomic),
            (re.compile(r"shfl\.sync\.(\w+)\.b32"), self._shuffle),
            (
                re.compile(r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v([24]))?\.[bufs](32|64)"),
                self._store_async,
            ),
            (re.compile(r"(ld|st)\.(.+)"), self._memory),
            (
                re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16"),
                self._matrices,
            ),
            (re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32"), self._multiply),
            (
                re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2"),
                self._multiply_async,
            ),
        ]  # fmt: skip

    def text(self) -> str:
        lines = []
        for item in self._kernel.body:
            if isinstance(item, Label):
                lines.append(f"{_label(item.scope, item.name)}:;")
            elif item.text.startswith(".reg"):
                self._declare(item)
            else:
                lines.append(self._instruction(item))
        registers = [f"    {kind} {name} = ({kind})UNSET;" for name, kind in sorted(self._registers.items())]
        return "\n".join(('#include "machine.hpp"', "void kernel(Thread& t) {", *registers, *lines, "}", ""))

    def _declare(self, item: Statement) -> None:
        _, kind, names = item.text.split(maxsplit=2)
        kind = _REGISTERS[kind[1:] if kind == ".pred" else re.sub(r"^\.[busf]", "", kind)]
        for name in names.split(","):
            base, numbered, _ = name.strip().partition("<")
            self._declared[item.scope, base] = _Declared(kind, base, bool(numbered))

    def _instruction(self, item: Statement) -> str:
        self._scope, self._line = item.scope, item.line
        guard, rest = "", item.text
        if rest.startswith("@"):
            predicate, rest = rest[1:].split(maxsplit=1)
            guard = f"if ({self._value(predicate)}) "
        opcode, _, operands = rest.partition(" ")
        return f"    {guard}{{ {self._translated(opcode, _split(operands))} }}"

    def _translated(self, opcode: str, operands: list[str]) -> str:
        for pattern, template in self._rules:
            if found := pattern.fullmatch(opcode):
                return self._fill(template, found, operands)
        for pattern, translate_it in self._special:
            if found := pattern.fullmatch(opcode):
                return translate_it(found, operands)
        raise NotImplementedError(
            f"{self._kernel.name} has the PTX instruction {opcode} (line {self._line}), which the emulator does not "
            "know: add it to tests/backends/cuda/emulator/translate.py"
        )

    def _fill(self, template: str, found: re.Match[str], operands: list[str]) -> str:
        names = {"line": str(self._line), **{key: value for key, value in found.groupdict().items() if value}}
        if bits := names.get("bits"):
            signed = names["kind"] == "s"
            double = str(2 * int(bits))
            names |= {"U": f"u{bits}", "T": f"{'s' if signed else 'u'}{bits}"}
            names |= {"W": f"u{double}", "X": f"{'s' if signed else 'u'}{double}"}

        def value(place: re.Match[str]) -> str:
            name = place[1]
            if name == "_":
                if operands[0] != "_":
                    raise NotImplementedError(f"the state that {found[0]} (line {self._line}) returns is not emulated")
                return ""
            if number := re.fullmatch(r"(-?\d+)(\??)(\d*)", name):
                return self._operand(found[0], operands, int(number[1]), number[2] == "?", number[3])
            return names[name]

        return re.sub(r"\{([^{} ]+)\}", value, template)

    def _operand(self, opcode: str, operands: list[str], at: int, optional: bool, instead: str) -> str:
        """The operand; an optional one that is missing is 0, or 1, or another one."""
        if at < 0:  # counted from the end, of an instruction whose third operand may be missing
            if at == -2 and len(operands) == 3:
                return "0"
            at += len(operands)
        if at >= len(operands):
            if not optional:
                raise NotImplementedError(f"{opcode} (line {self._line}) with so few operands is not emulated")
            if instead == "2":
                return self._value(operands[2])
            return instead or "0"
        return self._label(operands[at]) if opcode.startswith("bra") else self._value(operands[at])

    def _value(self, operand: str) -> str:
        """C++ of a register, a number, an address or a name."""
        operand = operand.strip()
        if operand.startswith("!"):
            return f"!{self._value(operand[1:])}"
        if operand.startswith("["):
            return self._address(operand[1:-1])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"0x{operand[2:]}u"
        if re.fullmatch(r"-?\d+|-?0[xX][0-9a-fA-F]+", operand):
            number = int(operand, 0)
            return f"(s64){number}ll" if number < 0 else f"{number}u" if number < 1 << 32 else f"{number}ull"
        if operand in _SPECIAL:
            return _SPECIAL[operand]
        if operand in self._shared_start:
            return f"(t.shared_first + {self._shared_start[operand]}u)"
        if operand in self._kernel.parameters:
            return f"t.parameters[{self._kernel.parameters.index(operand)}]"
        return self._register(operand)

    def _address(self, operand: str) -> str:
        base, plus, offset = operand.partition("+")
        value = self._value(base)
        return f"({value} + {self._value(offset)})" if plus else value

    def _register(self, name: str) -> str:
        scope = self._scope
        base = re.sub(r"\d+$", "", name)
        while scope >= 0:
            exact = self._declared.get((scope, name))
            many = self._declared.get((scope, base))
            found = exact if exact and not exact.numbered else many if many and many.numbered else None
            if found is not None:
                c_name = "_" + re.sub(r"\W", "_", name.lstrip("%")) + (f"_of_{scope}" if scope else "")
                self._registers[c_name] = found.type
                return c_name
            scope = self._kernel.parents[scope]
        raise NotImplementedError(f"the emulator does not know {name} (line {self._line})")

    def _compare(self, found: re.Match[str], operands: list[str]) -> str:
        to, a, b = (self._value(operand) for operand in operands)
        how, kind = found.groups()
        if kind == "f32":
            return f"{to} = {_FLOAT_COMPARISONS[how].format(a=f'fp32({a})', b=f'fp32({b})')};"
        kind = kind.replace("b", "u")
        return f"{to} = {_COMPARISONS[how].format(a=f'({kind}){a}', b=f'({kind}){b}')};"

    def _move(self, found: re.Match[str], operands: list[str]) -> str:
        to, value = operands
        bits = int(found[1])
        if to.startswith("{"):
            parts = _split(to[1:-1])
            each = bits // len(parts)
            taken = [(i, self._value(part)) for i, part in enumerate(parts) if part != "_"]
            return " ".join(f"{part} = (u{each})({self._value(value)} >> {each * i});" for i, part in taken)
        if value.startswith("{"):
            parts = _split(value[1:-1])
            each = bits // len(parts)
            joined = " | ".join(f"(u{bits}){self._value(part)} << {each * i}" for i, part in enumerate(parts))
            return f"{self._value(to)} = (u{bits})({joined});"
        return f"{self._value(to)} = (u{bits}){self._value(value)};"

    def _memory(self, found: re.Match[str], operands: list[str]) -> str:
        """Loads and stores. What lies in shared memory is written down as stored."""
        loads = found[1] == "ld"
        words = [
            word
            for word in found[2].replace("::", "@").split(".")
            if word not in _HINTS and "L1@" not in word and "L2@" not in word
        ]
        *words, kind = words
        count = int(words.pop()[1:]) if words and re.fullmatch("v[24]", words[-1]) else 1
        space = words.pop(0) if words else "generic"
        known = {"global", "shared", "shared@cta", "shared@cluster", "generic"} | ({"param"} if loads else set())
        if words or space not in known or not re.fullmatch(r"[busf](8|16|32|64)", kind):
            raise NotImplementedError(f"{found[0]} (line {self._line}) is not emulated")
        memory, registers = operands[::-1] if loads else operands
        parts = _split(registers[1:-1]) if count > 1 else [registers]
        kind = kind.replace("b", "u").replace("f", "u")
        address = self._value(memory)
        if space == "param":
            return f"{self._value(parts[0])} = ({kind}){address};"
        size = int(kind[1:]) // 8 * count
        at = {
            "global": f"global_at(t, {address}, {size}, {self._line})",
            "generic": f"global_at(t, {address}, {size}, {self._line})",
            "shared@cluster": f"cluster_shared_at(t, (u32){address}, {size}, {self._line})",
        }.get(space, f"{'shared_at' if loads else 'stored_at'}(t, (u32){address}, {size}, {self._line})")
        if loads:
            takes = " ".join(f"{self._value(part)} = v.x[{i}];" for i, part in enumerate(parts) if part != "_")
            return f"auto v = load<{kind}, {count}>({at}); {takes}"
        values = ", ".join(f"({kind}){self._value(part)}" for part in parts)
        return f"store({at}, Numbers<{kind}, {count}>{{{{{values}}}}});"

    def _atomic(self, found: re.Match[str], operands: list[str]) -> str:
        _, space, how, sign, bits = found.groups()
        kind = f"{'s' if sign == 's' else 'u'}{bits}"
        returns = found[1] == "atom"
        memory, *values = operands[returns:]
        values = [f"({kind}){self._value(value)}" for value in values]
        change = {
            "add": "(T)(old + b)", "min": "old < b ? old : b", "max": "old > b ? old : b", "and": "(T)(old & b)",
            "or": "(T)(old | b)", "xor": "(T)(old ^ b)", "exch": "b", "cas": "old == b ? c : old",
        }.get(how)  # fmt: skip
        if change is None:
            raise NotImplementedError(f"{found[0]} (line {self._line}) is not emulated")
        where = "stored_at" if space == "shared" else "global_at"
        at = f"{where}(t, {self._value(memory)}, {int(bits) // 8}, {self._line})"
        given = "".join(f" T {name} = {value};" for name, value in zip("bc", values, strict=False))
        result = f"{self._value(operands[0])} = (u{bits})" if returns and operands[0] != "_" else ""
        return f"typedef {kind} T;{given} {result}exchange<T>({at}, [&](T old) {{ return {change}; }});"

    def _shuffle(self, found: re.Match[str], operands: list[str]) -> str:
        to, *values = operands
        how = {"up": "UP", "down": "DOWN", "bfly": "BUTTERFLY", "idx": "INDEX"}[found[1]]
        to, _, inside = to.partition("|")
        x, lane, limits, mask = (f"(u32){self._value(value)}" for value in values)
        tells = f" {self._value(inside)} = inside;" if inside else ""
        call = f"shuffle(t, {how}, {x}, {lane}, {limits}, {mask}, inside, {self._line})"
        return f"bool inside; {self._value(to)} = {call};{tells}"

    def _store_async(self, found: re.Match[str], operands: list[str]) -> str:
        to, values, barrier = operands
        parts = _split(values[1:-1]) if found[2] else [values]
        data = ", ".join(self._value(part) for part in parts)
        size = int(found[3]) // 8 * len(parts)
        return (
            f"u{found[3]} data[] = {{{data}}}; "
            f"store_async(t, {self._value(to)}, data, {size}, {self._value(barrier)}, {self._line});"
        )

    def _matrices(self, found: re.Match[str], operands: list[str]) -> str:
        loads, count, turned = found[1] == "ld", int(found[2]), "true" if found[3] else "false"
        registers, memory = operands if loads else operands[::-1]
        parts = [self._value(part) for part in _split(registers.strip("{}"))]
        if loads:
            takes = " ".join(f"{part} = m[{i}];" for i, part in enumerate(parts))
            return (
                f"u32 m[4]; load_matrices(t, m, {count}, {turned}, (u32){self._value(memory)}, {self._line}); {takes}"
            )
        values = ", ".join(parts)
        at = f"(u32){self._value(memory)}"
        return f"u32 m[] = {{{values}}}; store_matrices(t, m, {count}, {turned}, {at}, {self._line});"

    def _list(self, operand: str) -> list[str]:
        return [self._value(part) for part in _split(operand[1:-1])]

    def _multiply(self, found: re.Match[str], operands: list[str]) -> str:
        to, a, b, c = (self._list(operand) for operand in operands)
        takes = " ".join(f"{register} = c[{i}];" for i, register in enumerate(to))
        return (
            f"u32 a[] = {{{', '.join(a)}}}, b[] = {{{', '.join(b)}}}, c[] = {{{', '.join(c)}}}; "
            f"multiply(t, {found[1].upper()}, c, a, b, {self._line}); {takes}"
        )

    def _multiply_async(self, found: re.Match[str], operands: list[str]) -> str:
        sums = ", ".join(f"&{register}" for register in self._list(operands[0]))
        from_registers = operands[1].startswith("{")
        a = f"u32 a[] = {{{', '.join(self._list(operands[1]))}}}; " if from_registers else "u32* a = nullptr; "
        a_at = "0" if from_registers else self._value(operands[1])
        b_at, add, a_sign, b_sign, *turned = (self._value(operand) for operand in operands[2:])
        a_turned, b_turned = ("0", *turned) if from_registers else turned
        return (
            f"u32* sums[] = {{{sums}}}; {a}"
            f"multiply_async(t, {found[2].upper()}, {found[1]}, sums, a, {a_at}, {b_at}, {add}, "
            f"(int){a_sign}, (int){b_sign}, {a_turned}, {b_turned}, {self._line});"
        )

    def _label(self, name: str) -> str:
        scope = self._scope
        while (scope, name) not in self._labels:
            scope = self._kernel.parents[scope]
        return _label(scope, name)


def _label(scope: int, name: str) -> str:
    return f"at_{scope}_{name.replace('$', '_')}"


def _split(operands: str) -> list[str]:
    """At commas outside braces and brackets."""
    parts, depth = [""], 0
    for char in operands:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]
