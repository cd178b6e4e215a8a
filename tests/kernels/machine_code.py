"""Where the addresses of matrix products come from, read from a kernel's machine code (sm_90).

ptxas 12.8 has been seen to compute an address on one side of a branch only, though the products of both sides used it: the one side then
multiplied by whatever the register held, in one warpgroup of two, and only some figures of the output were wrong. A uniform register that holds
part of a product's address must have one origin, whichever way the program came there, or be computed in the same way in several places
(before a loop and at its end).
"""

from __future__ import annotations

import re
from collections import defaultdict

Instruction = tuple[int, str]
NOWHERE = -1


def instructions(sass: str) -> list[Instruction]:
    """(address, text) in the order of `cuobjdump -sass`."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+([^;]*);", sass, re.MULTILINE)
    return [(int(address, 16), text.strip()) for address, text in found]


def successors(code: list[Instruction]) -> list[list[int]]:
    """What may follow each instruction, by number. The jump table of the warps' roles leads to what nothing else reaches."""
    at = {address: i for i, (address, _) in enumerate(code)}
    following: list[list[int]] = []
    table = None
    for i, (_, text) in enumerate(code):
        target = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text)
        conditional = text.startswith("@") or re.search(r"\bBRA\S* U?!?U?P\d", text)
        after = [i + 1] if i + 1 < len(code) else []
        if target:
            following.append([at[int(target[1], 16)], *(after if conditional else [])])
        elif re.match(r"(EXIT|RET|BRX)\b", text):
            table = i if text.startswith("BRX") else table
            following.append([])
        else:
            following.append(after)
    while table is not None:
        reached, waiting = set(), [0]
        while waiting:
            i = waiting.pop()
            if i not in reached:
                reached.add(i)
                waiting += following[i]
        ends = ("BRA", "EXIT", "BRX")
        entries = (i for i in range(table + 1, len(code)) if i not in reached and code[i - 1][1].startswith(ends))
        entry = next((i for i in entries if not code[i][1].startswith("BRA")), None)
        if entry is None:
            break
        following[table].append(entry)
    return following


def written(text: str) -> list[int]:
    """Numbers of the uniform registers that an instruction writes."""
    plain = re.sub(r"^@!?U?P\w+\s+", "", text)
    found = re.match(r"((?:U[A-Z]|R2UR|S2UR|REDUX|VOTEU)\S*)\s+(?:UP\d, )*UR(\d+)", plain)
    if not found:
        return []
    first = int(found[2])
    return [first, first + 1] if ".WIDE" in found[1] or ".64" in found[1] else [first]


def operation(text: str) -> str:
    """An instruction, whichever registers it works on."""
    return re.sub(r"\bUR\d+", "UR", text)


def read_by_product(text: str) -> list[int]:
    """Uniform registers with the addresses of a product's operands in shared memory: the second's, and the first's unless it is in registers."""
    found = re.search(r"[HQ]GMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", text)
    if not found:
        return []
    first = int(found[2])
    return list(range(first + 2 if found[1] else first, first + 4))


def addresses_of_several_origins(sass: str) -> list[str]:
    """Products that read an address register written in different places, or in none, depending on the way there."""
    code = instructions(sass)
    following = successors(code)
    origins: list[dict[int, frozenset[int]] | None] = [None] * len(code)
    origins[0] = {}
    waiting = [0]
    while waiting:
        i = waiting.pop()
        here = defaultdict(lambda: frozenset([NOWHERE]), origins[i] or {})
        here.update({register: frozenset([i]) for register in written(code[i][1])})
        for j in following[i]:
            there = origins[j]
            if there is None:
                origins[j] = dict(here)
                waiting.append(j)
                continue
            known = {r: there.get(r, frozenset([NOWHERE])) for r in {*here, *there}}
            merged = {r: sources | here[r] for r, sources in known.items()}
            if merged != there:
                origins[j] = merged
                waiting.append(j)
    return [
        f"{address:#x} {text}"
        for i, (address, text) in enumerate(code)
        for found in [origins[i]]
        if found is not None
        and any(
            NOWHERE in found.get(r, {NOWHERE}) or len({operation(code[origin][1]) for origin in found[r]}) > 1
            for r in read_by_product(text)
        )
    ]


def stall_clocks(sass: str) -> list[int]:
    """Clocks that a warp takes at the least for each loop with products and exponentials in it, the way past masks and rescaling.

    The assembler writes with each instruction how many clocks to wait before the next (bits 105 to 108 of its 128). What only the machine
    knows, such as how long a product runs or whether another warp was issued, is not in the sum; how well the softmax is scheduled is. Computed
    after the fact, it agreed in sign with every change between two forms of the loop that an H200 had measured, from - 7 to + 4 %, and with
    the wait at the row maxima, which it foretold; not with rescaling behind a branch: 4 % more clocks, 2 to 4 % faster.
    """
    pattern = r"^\s+/\*([0-9a-f]{4,5})\*/\s+([^;]*);\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* (0x[0-9a-f]{16}) \*/"
    found = re.findall(pattern, sass, re.MULTILINE)
    code = [(int(address, 16), text.strip(), int(high, 16) >> 41 & 15) for address, text, high in found]
    clocks = []
    for end, (address, text, _) in enumerate(code):
        back = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text)
        if not back or int(back[1], 16) >= address:
            continue
        body = [line for line in code[: end + 1] if line[0] >= int(back[1], 16)]
        count = {name: sum(name in text for _, text, _ in body) for name in ("HGMMA", "MUFU.EX2")}
        if not (4 <= count["HGMMA"] <= 24 and 30 < count["MUFU.EX2"] < 70):
            continue
        total, resumes = 0, 0
        for here, text, stall in body:
            if here < resumes:
                continue
            total += stall
            ahead = re.match(r"@!?P\d BRA (?:P\d, )?(0x[0-9a-f]+)", text)
            target = int(ahead[1], 16) if ahead else 0
            resumes = target if here < target < address else 0
        clocks.append(total)
    return clocks
