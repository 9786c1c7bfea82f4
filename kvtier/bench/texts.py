"""Real text to ask about: the topics of Python's own documentation, and questions on them.

The documents come with every Python (``pydoc_data.topics``, PSF licence), so nothing is
downloaded; they differ a little between Python versions.
"""

from __future__ import annotations

import random
import re
import zlib
from pydoc_data import topics
from typing import Final

from kvtier.errors import ConfigError

_CONTROL: Final = {"<|im_start|>": 256, "<|im_end|>": 257}
_WORD: Final = re.compile(r"<\|im_start\|>|<\|im_end\|>|\s*\w{1,4}|\s*[^\w\s<]+|\s*<|\s+")
WORDS: Final = 4096
"""How many ids ``encode_words`` has."""

_PIECES: Final = re.compile("|".join(map(re.escape, _CONTROL)) + "|.", re.DOTALL)

QUESTIONS: Final = (
    "What is the main subject of this text?",
    "Which exception is raised when it fails?",
    "Give one short example of its use.",
    "When is the else branch executed?",
    "What happens if the name is not found?",
    "Which operators does the text mention?",
    "How are default values evaluated?",
    "What changed in the latest version?",
    "Is the order of evaluation defined here?",
    "What does the statement return?",
    "Which keyword introduces the block?",
    "How would a beginner explain this?",
    "What are the limits of this feature?",
    "Where does Python look the name up?",
    "What is the difference between the two forms?",
    "Why would somebody avoid this?",
    "Which methods must the object have?",
    "What does the grammar rule describe?",
    "Does it work for nested functions?",
    "Summarise the text in one sentence.",
    "Which built-in types behave like this?",
    "What is called first, and what is called last?",
    "How is a tuple treated in this place?",
    "Which part of the text is the most important?",
)
_ALIKE: Final = 300  # characters that are equal in two passages which count as one
_PARAGRAPH: Final = re.compile(r"\n\n(?=\S[^\n]{40})")


class Corpus:
    """All documents as one text, in an order that the seed draws; passages begin anywhere in it."""

    def __init__(self, seed: int) -> None:
        documents = sorted(set(topics.topics.values()))
        random.Random(seed).shuffle(documents)
        self._text = "\n\n".join(documents)
        # Some paragraphs stand in several documents: each counts once.
        starts = [found.end() for found in _PARAGRAPH.finditer(self._text)]
        self._starts = list({self.text(start, _ALIKE): start for start in starts}.values())

    def passages(self, count: int) -> list[int]:
        """Return where `count` passages begin, as far from each other as the text allows.

        Raises ConfigError for more than there are paragraphs.
        """
        if count > len(self._starts):
            raise ConfigError(
                f"{count} different texts are wanted and {len(self._starts)} are at hand; "
                "ask for fewer"
            )
        return [self._starts[index * len(self._starts) // count] for index in range(count)]

    def text(self, start: int, characters: int) -> str:
        """Return text from `start` on; after the end it goes on at the beginning."""
        pieces, left = [self._text[start : start + characters]], characters
        while (left := left - len(pieces[-1])) > 0:
            pieces.append(self._text[:left])
        return "".join(pieces)


def encode_bytes(text: str) -> list[int]:
    """Encode text for a model without a tokenizer: its bytes, and the template's two marks."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        ids += [_CONTROL[piece]] if piece in _CONTROL else piece.encode()
    return ids


def encode_words(text: str) -> list[int]:
    """Encode text for a model without a tokenizer: ids of its words, about as long as real ones.

    Two words may have one id.
    """
    return [zlib.crc32(piece.encode()) % WORDS for piece in _WORD.findall(text)]
