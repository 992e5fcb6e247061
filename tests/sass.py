"""What a compiled kernel does to registers that asynchronous tensor core instructions still read."""

import re
import subprocess
from tempfile import NamedTemporaryFile

from triton import knobs

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^/]*;)")
_PRODUCT = re.compile(r"[HQ]GMMA\S* R\d+, R(\d+),")  # one whose left operand is four registers
_TARGET = re.compile(r"BRA (0x[0-9a-f]+)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_WRITE = re.compile(r"(?:@!?U?P\d+ )?(\w\S*) R(\d+)")
_WRITES_NONE = re.compile(r"ST|RED|LDGSTS|ISETP|FSETP|[HQ]GMMA|WARPGROUP")


def disassembled(cubin: bytes) -> str:
    """Hopper's instructions, as Triton's copy of cuobjdump prints them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten(sass: str) -> list[tuple[str, str]]:
    """Pairs of a product and an instruction that writes what the product may not have read yet.

    A product is over when a wait lets fewer groups run on than have been closed since, its own
    included; all ways through the branches are followed.
    """
    code = [(int(address, 16), text.strip()) for address, text in _LINE.findall(sass)]
    places = {address: place for place, (address, _) in enumerate(code)}
    found = []
    for start, (_, product) in enumerate(code):
        operand = _PRODUCT.search(product)
        if operand is None:
            continue
        registers = set(range(int(operand[1]), int(operand[1]) + 4))
        ways, seen = [(start, 0)], set()  # places, with the groups closed since
        while ways:
            way = ways.pop()
            if way in seen or way[0] == len(code):
                continue
            seen.add(way)
            place, closed = way
            text = code[place][1]
            closed += "GMMA" in text and "gsb0" in text
            wait = _WAIT.search(text)
            if wait and closed > int(wait[1], 16):
                continue
            if place != start and registers & _written(text):
                found.append((product, text))
                continue
            target = _TARGET.search(text)
            if target:
                ways.append((places[int(target[1], 16)], closed))
            if not (("BRA" in text or "EXIT" in text) and not text.startswith("@")):
                ways.append((place + 1, closed))
    return found


def _written(text: str) -> set[int]:
    match = _WRITE.match(text)
    if match is None or _WRITES_NONE.match(match[1]):
        return set()
    name, first = match[1], int(match[2])
    count = (
        4 if ".128" in name or name.endswith("M88.4") else 2 if re.search("64|WIDE", name) else 1
    )
    return set(range(first, first + count))
