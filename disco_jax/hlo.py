"""What a compiled program does, read from its text: products, and what travels between devices."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"^({'|'.join(_KINDS)})(?:-start)?$")
_NOT_READ = re.compile(r"^(collective-broadcast|ragged-all-to-all|send|recv)(?:-start)?$")


class Collective(NamedTuple):
    """A collective of a program.

    kind: as XLA names it; group: devices that take part together; bytes: that each device receives in one call;
    calls: how often it is called.
    """

    kind: str
    group: int
    bytes: int
    calls: int


class Traffic(NamedTuple):
    """All collectives of a kind in one call of a program: how many, and the bytes that each device receives."""

    calls: int
    bytes: int


class Program(NamedTuple):
    """Of one device: multiply-adds in matrix products, and all collectives of more than one device.

    Products that a library computes in a custom call are not counted. In programs for GPUs these are most of them:
    cuBLAS's, and cuDNN's attention.
    """

    multiply_adds: int
    collectives: list[Collective]

    @property
    def bytes_moved(self) -> int:
        """What a device receives from others in one call of the program."""
        return sum(traffic.bytes for traffic in self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, Traffic]:
        """What travels by each kind of collective. Compilers merge calls, so bytes tell more than calls do."""
        kinds: dict[str, Traffic] = dict.fromkeys(_KINDS, Traffic(0, 0))
        for kind, _, size, calls in self.collectives:
            kinds[kind] = Traffic(kinds[kind].calls + calls, kinds[kind].bytes + size * calls)
        return kinds


def read_program(text: str) -> Program:
    """Reads the text of a compiled program, from `compiled.as_text()`, of CPUs or GPUs.

    What a loop calls counts once for each of its steps, an asynchronous collective where it starts.

    Raises:
        ValueError: the text is not understood, e.g. a loop whose number of steps is not known.
    """
    computations, entry = _computations(text)
    counts: dict[str, int] = defaultdict(int)
    _count_calls(computations, entry, 1, counts)
    multiply_adds, collectives = 0, []
    for name, calls in counts.items():
        shapes = {instruction.name: instruction.shape for instruction in computations[name]}
        for instruction in computations[name]:
            match = _COLLECTIVE.match(instruction.opcode)
            if instruction.opcode == "dot":
                multiply_adds += calls * _dot_size(instruction, _operand_shapes(instruction, shapes)[0])
            elif match:
                group = _group_size(instruction.rest)
                if group > 1:
                    size = sum(map(_bytes, _operand_shapes(instruction, shapes)))
                    collectives.append(Collective(match[1], group, _received(match[1], size, group), calls))
            elif _NOT_READ.match(instruction.opcode):
                raise ValueError(f"the {instruction.opcode} {instruction.name}: what it sends is not known")
    return Program(multiply_adds, collectives)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            arguments = match[4].split("), ", 1)[0].rstrip(")")
            computations[name].append(
                _Instruction(match[1], match[2], match[3], re.findall(r"%([\w.\-]+)", arguments), match[4])
            )
    if not entry:
        raise ValueError("the text of the program has no ENTRY computation: give compiled.as_text()")
    return computations, entry


def _count_calls(computations: dict[str, list[_Instruction]], name: str, calls: int, counts: dict[str, int]) -> None:
    counts[name] += calls
    for instruction in computations[name]:
        times = calls
        if instruction.opcode.endswith(("-update", "-done")):
            continue  # may name again what its start calls
        if instruction.opcode == "conditional":
            raise ValueError(f"the conditional {instruction.name}: which branch runs is not known")
        if instruction.opcode == "while":
            trips = _TRIP_COUNT.search(instruction.rest)
            if trips is None:
                raise ValueError(f"the loop {instruction.name} has no known number of steps")
            times *= int(trips[1])
        for called in _CALLED.findall(instruction.rest):
            _count_calls(computations, called, times, counts)


def _operand_shapes(instruction: _Instruction, shapes: dict[str, str]) -> list[str]:
    if not instruction.operands or not all(operand in shapes for operand in instruction.operands):
        raise ValueError(f"the operands of {instruction.name} are not understood: {instruction.rest[:200]}")
    return [shapes[operand] for operand in instruction.operands]


def _dot_size(dot: _Instruction, left: str) -> int:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    left_shape = next(_shapes(left), None)
    if contracted is None or left_shape is None:
        raise ValueError(f"the product {dot.name} is not understood: {dot.rest[:200]}")
    inner = math.prod(left_shape[int(dim)] for dim in contracted[1].split(",") if dim)
    return math.prod(next(_shapes(dot.shape))) * inner


def _shapes(text: str) -> Iterator[tuple[int, ...]]:
    for _, dims in ARRAY.findall(text):
        yield tuple(int(dim) for dim in dims.split(",") if dim)


def _bytes(text: str) -> int:
    bits = 0
    for (kind, _), shape in zip(ARRAY.findall(text), _shapes(text), strict=True):
        width = re.search(r"\d+", kind)
        bits += math.prod(shape) * (int(width[0]) if width else 8)
    return bits // 8


def _group_size(rest: str) -> int:
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{('\w+'(?:,'\w+')*)\}", rest):  # of jax 0.12
        sizes = dict(axis.split("=") for axis in named[1].split(","))
        return math.prod(int(sizes[axis]) for axis in named[2].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    if "source_target_pairs" in rest:
        return 2
    raise ValueError(f"the devices of a collective are not understood: {rest[:200]}")


def _received(kind: str, operand_bytes: int, group: int) -> int:
    """By the usual ring algorithms; what a device keeps for itself doesn't travel."""
    if kind == "all-gather":
        return operand_bytes * (group - 1)
    if kind == "all-reduce":
        return 2 * operand_bytes * (group - 1) // group
    if kind == "collective-permute":
        return operand_bytes
    return operand_bytes * (group - 1) // group
