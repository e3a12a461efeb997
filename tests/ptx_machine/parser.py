"""A PTX module as text -> its instructions. Anything else is an error that names the line.

A module has one kernel and no functions, scopes or initialized data, as Mosaic GPU emits it.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Raw bits by the letter of an operand: p predicate, h 16, w 32, d 64.
TYPES = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}
KINDS = {"pred": "p", "b16": "h", "b32": "w", "b64": "d"}
BITS = {"p": 1, "h": 16, "w": 32, "d": 64}
WIDER = {"h": "w", "w": "d"}


class PtxError(Exception):
    """The program has something unknown, or does something that is not allowed."""


class Register(NamedTuple):
    name: str  # with its %


class Immediate(NamedTuple):
    value: int  # the bits, or a signed number


class Address(NamedTuple):
    base: str  # a register, a parameter or a shared variable
    offset: int


class Vector(NamedTuple):
    items: tuple["Operand", ...]  # {a, b}; also a|b, the two results of one instruction


class Symbol(NamedTuple):
    name: str  # a label, a shared variable, or _: a result that is not used


Operand = Register | Immediate | Address | Vector | Symbol


class Instruction(NamedTuple):
    """One line of a program; `opcode` with all its modifiers."""

    line: int
    text: str
    guard: str | None  # the predicate register
    negated: bool  # @!
    opcode: str
    operands: tuple[Operand, ...]

    def error(self, why: str) -> PtxError:
        return PtxError(f"line {self.line}: {self.text}: {why}")


@dataclass
class Program:
    """One kernel."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]  # the index of the instruction after it
    parameters: dict[str, int]  # 64-bit pointers, in order, and the bytes they are aligned to
    registers: dict[str, str]  # prefix -> "pred", "b16", "b32" or "b64"
    threads: int  # in a CTA
    cluster: int = 1  # CTAs

    def kind(self, register: str) -> str:
        """The declared type of a register."""
        found = re.fullmatch(r"(%[a-z]+)\d+", register)
        if found is None or found[1] not in self.registers:
            raise PtxError(f"register {register} is not declared")
        return self.registers[found[1]]


# used_bytes_mask: of a load's bytes, which the compiler will use; the machine sees that itself.
# The window onto dynamic shared memory: LLVM prints its empty array so.
IGNORED = re.compile(
    r"\.(version \d+\.\d+|target sm_\d+[af]?|address_size 64|minnctapersm 1|loc\s.*|file\s.*|"
    r"explicitcluster|"
    r"pragma \"used_bytes_mask 0x[0-9a-f]+\";|shared \.align \d+ \.b8 __dynamic_shmem__0;)$"
)
DEBUG = re.compile(r"\.section\s+\.debug_\w+")  # and all up to its closing brace
ENTRY = re.compile(r"\.visible \.entry (\w+)\($")
PARAMETER = re.compile(r"\.param \.u64 \.ptr \.align (\d+) (\w+),?$")
MAXNTID = re.compile(r"\.maxntid (\d+), 1, 1$")
CLUSTER = re.compile(r"\.reqnctapercluster (\d+), 1, 1$")
REGISTERS = re.compile(r"\.reg \.(pred|b16|b32|b64)\s+(%[a-z]+)<\d+>;$")
LABEL = re.compile(r"([$\w]+):$")
STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)(?:\s+(.*?))?\s*;$")
ATOM = re.compile(r"%[a-z_]+\d*(?:\.[xyz])?$")
NUMBER = re.compile(r"0f[0-9A-Fa-f]{8}$|-?(?:0x[0-9A-Fa-f]+|\d+)$")
PLACE = re.compile(r"\[([%$\w]+)(?:\+?(-?\d+))?\]$")
SHARED_VARIABLE = "__dynamic_shmem__0"


def parse(text: str) -> Program:
    """The kernel of a module."""
    program = Program("", [], {}, {}, {}, 0)
    in_debug = False
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.split("//")[0].strip()
        if in_debug or DEBUG.match(line):
            in_debug = not line.endswith("}")
        elif found := LABEL.match(line):
            if found[1] in program.labels:
                raise PtxError(f"line {number}: label {found[1]} is there twice")
            program.labels[found[1]] = len(program.instructions)
        elif found := ENTRY.match(line):
            if program.name:
                raise PtxError(f"line {number}: a second kernel")
            program.name = found[1]
        elif found := PARAMETER.match(line):
            program.parameters[found[2]] = int(found[1])
        elif found := MAXNTID.match(line):
            program.threads = int(found[1])
        elif found := CLUSTER.match(line):
            program.cluster = int(found[1])
        elif found := REGISTERS.match(line):
            program.registers[found[2]] = found[1]
        elif found := STATEMENT.match(line):
            sign, guard, opcode, rest = found.groups()
            operands = tuple(_operand(part, number) for part in _split(rest or ""))
            one = Instruction(number, line, guard, bool(sign), opcode, operands)
            program.instructions.append(one)
        elif line not in ("", ")", "{", "}") and not IGNORED.match(line):
            raise PtxError(f"line {number}: not understood: {line}")
    if not program.name or not program.threads:
        raise PtxError("the module has no kernel, or no .maxntid")
    return program


def _split(rest: str) -> list[str]:
    """Operands, by the commas outside braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", rest) if part.strip()]


def _operand(text: str, line: int) -> Operand:
    if "|" in text or (text.startswith("{") and text.endswith("}")):
        parts = re.split(r"[,|]", text.strip("{}"))
        return Vector(tuple(_operand(part.strip(), line) for part in parts))
    if ATOM.match(text):
        return Register(text)
    if NUMBER.match(text):
        return Immediate(int(re.sub("^0f", "0x", text), 0))
    if found := PLACE.match(text):
        return Address(found[1], int(found[2] or 0))
    if re.fullmatch(r"[$\w]+", text):
        return Symbol(text)
    raise PtxError(f"line {line}: operand not understood: {text}")
