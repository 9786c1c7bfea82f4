"""The copy kernel with one token of its source changed: every change has to show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvtier.device.nvrtc import kernel_source

_BEGINS: Final = "// Copies as many whole units"
_SWAPS: Final = (
    (r" < ", (" <= ", " > ")),
    (r" \+ ", (" - ",)),
    (r" - ", (" + ",)),
    (r" \* ", (" + ",)),
    (r" / ", (" * ",)),
    (r" % ", (" / ",)),
    (r" \| ", (" & ",)),
    (r" \+= ", (" -= ", " = ")),
    (r" == ", (" != ",)),
    (r" != ", (" == ",)),
    (r"\b0\b", ("1",)),
    (r"\b2\b", ("1", "3")),
    (r"\b3\b", ("2", "4")),
    (r"\b4\b", ("3", "5")),
    (r"threadIdx\.x", ("0", "blockIdx.x")),
    (r"blockIdx\.x", ("0", "threadIdx.x")),
    (r"blockDim\.x", ("1", "gridDim.x")),
    (r"gridDim\.x", ("1", "blockDim.x")),
    (r"\bplane\]", ("run]", "0]")),
    (r"\brun\]", ("plane]", "0]")),
    (r"\bplanes\b(?=[ ;])", ("runs",)),
    (r"(?<!int )\bruns\b(?=[ ,;])", ("planes", "row")),
    (r"\brow\b(?=[ ,;])", ("runs", "planes")),
    (r"\bto \| from\b", ("to", "from")),
    (r"\bto, from\b", ("from, to", "to, to")),
    (r"if \([^;]*?\) (?=return|done)", ("", "if (false) ")),
    (r"kvtier_write\([^;]*;", (";",)),
    (r"kvtier_units<unsigned char>\([^;]*;", (";",)),
    (r"units<unsigned int>", ("units<kvtier_vector>", "units<unsigned char>")),
    (r"units<kvtier_vector>", ("units<unsigned int>",)),
    (r"\bkvtier_u64 (?=(?:count|at|done) )", ("unsigned short ",)),
    (r"\bunsigned int (?=work )", ("unsigned short ",)),
)
_LOOP: Final = "in: for (; at + 3 * step < count; at += 4 * step) {"
HARMLESS: Final = {
    f"+ -> - {_LOOP}": "all is copied by the loop below, with one read under way and not four",
    f"3 -> 4 {_LOOP}": "the loop below copies a little more, with one read under way and not four",
}
"""Changes that no byte and no count shows, and why."""


@dataclass(frozen=True, slots=True)
class KernelMutant:
    """The kernel's source with one token changed. name: the line, and what stands there instead."""

    name: str
    source: str


def kernel_mutants() -> list[KernelMutant]:
    """Return the kernel with each of its tokens changed in turn, comments apart."""
    whole = kernel_source()
    begins = whole.index(_BEGINS)
    found = []
    for pattern, instead in _SWAPS:
        for place in re.finditer(pattern, whole):
            line = whole[whole.rfind("\n", 0, place.start()) + 1 :].partition("\n")[0].strip()
            if place.start() < begins or line.startswith(("//", "template", "static")):
                continue
            for text in instead:
                source = whole[: place.start()] + text + whole[place.end() :]
                name = f"{place.group().strip()} -> {text.strip() or 'nothing'} in: {line}"
                found.append(KernelMutant(name, source))
    return found
