"""Workloads: requests that are described and drawn, where nobody has recorded any.

    workload:multi-turn?requests=2000&rate=4&turns=5&seed=1

A kind and its parameters, each with a default and bounds. Requests come by a Poisson process; the
turns of a conversation follow each other at pauses. One description gives one trace. A prompt is a
sequence of texts of so many tokens; where two prompts begin with the same texts, their whole blocks
there are the same. An answer is part of the next prompt of its conversation, and its whole blocks
come into a cache when it has been computed, as live.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.config import parse_options
from kvtier.errors import ConfigError, unknown
from kvtier.planning.trace import Trace
from kvtier.units import parse_seconds

PREFIX: Final = "workload:"
_USUAL_BLOCK: Final = 256  # a chunk of the cache
_MOST_BLOCKS: Final = 1 << 24  # of all requests together: 3 GB if all are different
_MOST_TEXT: Final = 1000
_MILLISECONDS: Final = 1000.0
_WHOLE: Final = re.compile(r"[0-9]{1,20}")
_DECIMAL: Final = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_TRIES: Final = 16  # draws of a document that is there already, before all others are looked at


class Parameter(NamedTuple):
    """What a workload is told. unit: ``""`` for a whole number, ``.`` for any, ``s`` for a time."""

    default: float
    least: float
    most: float
    text: str
    unit: str = ""

    def read(self, name: str, text: str) -> float:
        """Return the value that a text means. Raises ConfigError that names the bounds."""
        if self.unit == "s":
            try:
                value = parse_seconds(text)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        else:
            form = _DECIMAL if self.unit else _WHOLE
            value = float(text) if form.fullmatch(text) else -1.0
        if not self.least <= value <= self.most:
            kind = {"": "a whole number", ".": "a number", "s": "a time"}[self.unit]
            raise ConfigError(
                f"{name} must be {kind} from {self.shown(self.least)} to "
                f"{self.shown(self.most)}, not {text[:80]!r}"
            )
        return value

    def shown(self, value: float) -> str:
        """Return a value as it is written."""
        return f"{value:.15g}{'s' if self.unit == 's' else ''}"


_TOKENS: Final = 1_000_000
_COMMON: Final = {
    "requests": Parameter(1000, 1, 10_000_000, "how many"),
    "rate": Parameter(
        1, 0.001, 100_000, "requests a second, in the mean: they come by chance", "."
    ),
    "output": Parameter(200, 0, _TOKENS, "tokens of an answer, in the mean"),
    "vary": Parameter(
        0.5, 0, 1, "part of their mean by which lengths and pauses differ from it, at most", "."
    ),
    "seed": Parameter(0, 0, (1 << 32) - 1, "another one draws another trace"),
}
_PREFIXES: Final = Parameter(1, 1, 100_000, "different system prompts")
_SYSTEM: Final = Parameter(1000, 0, _TOKENS, "tokens of a system prompt, exactly")
_QUESTION: Final = Parameter(200, 1, _TOKENS, "tokens that a user asks, in the mean")
_TURNS: Final = Parameter(5, 1, 10_000, "requests of a conversation, exactly")
_PAUSE: Final = Parameter(30, 0, 1e6, "from one request of it to the next, in the mean", "s")
_ZIPF: Final = Parameter(1, 0, 3, "how unequal: the n-th is asked for as often as n^-zipf", ".")


class Kind(NamedTuple):
    """A kind of workload: what it is, and its parameters by name, beside those of all kinds."""

    text: str
    own: Mapping[str, Parameter]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All by name."""
        return {**self.own, **_COMMON}


KINDS: Final = {
    "shared-prefix": Kind(
        "single questions behind a few system prompts",
        {
            "prefixes": _PREFIXES._replace(default=4),
            "zipf": _ZIPF,
            "system": _SYSTEM._replace(default=2000),
            "question": _QUESTION,
        },
    ),
    "multi-turn": Kind(
        "chats: each prompt is all that was said, and one more question",
        {
            "prefixes": _PREFIXES,
            "zipf": _ZIPF,
            "system": _SYSTEM,
            "question": _QUESTION,
            "turns": _TURNS,
            "pause": _PAUSE,
        },
    ),
    "agent": Kind(
        "agents: a long task, then one observation after the other, in quick turns",
        {
            "prefixes": _PREFIXES,
            "zipf": _ZIPF,
            "system": _SYSTEM._replace(default=4000, text="tokens of instructions and tools"),
            "question": _QUESTION._replace(default=1000, text="tokens of the task, in the mean"),
            "observation": _QUESTION._replace(
                default=600, text="tokens that each further request adds, in the mean"
            ),
            "turns": _TURNS._replace(default=20),
            "pause": _PAUSE._replace(default=5),
        },
    ),
    "rag": Kind(
        "questions behind documents that are looked up, the popular ones more often",
        {
            "documents": Parameter(1000, 1, 1_000_000, "how many there are"),
            "zipf": _ZIPF,
            "retrieved": Parameter(
                2, 1, 100, "documents of a prompt, in the order in which they are drawn"
            ),
            "document": Parameter(1500, 1, _TOKENS, "tokens of a document, in the mean"),
            "system": _SYSTEM._replace(default=500),
            "question": _QUESTION,
        },
    ),
    "no-reuse": Kind("prompts that share nothing", {"question": _QUESTION._replace(default=2000)}),
}
"""Every kind by name."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A described workload. name: the description; values: of all its parameters."""

    name: str
    kind: str
    values: Mapping[str, float]

    @property
    def whole(self) -> str:
        """The description with all that it leaves to defaults."""
        known = KINDS[self.kind].parameters
        pairs = (f"{name}={known[name].shown(value)}" for name, value in self.values.items())
        return f"{PREFIX}{self.kind}?{'&'.join(pairs)}"

    def block_tokens(self, given: int | None) -> int:
        """Return the tokens of a block: as given, or a chunk of the cache."""
        return given or _USUAL_BLOCK

    def draw(
        self, block_tokens: int | None, *, tell: Callable[[int, int], None] | None = None
    ) -> Trace:
        """Draw the requests, their times in milliseconds.

        tell: called now and then with the requests that are drawn, of how many.
        Raises ConfigError for more blocks than a replay can hold.
        """
        size = self.block_tokens(block_tokens)
        self._check(size)
        trace = Trace(self.name, size)
        trace.notes.append(f"drawn: {self.whole}")
        count = int(self.values["requests"])
        for number, (when, chat) in enumerate(itertools.islice(_arrivals(self, size), count)):
            tokens, output, asked = chat.ask()
            blocks = chat.blocks
            trace.add(_MILLISECONDS * when, tokens, output, blocks[:asked], blocks[asked:])
            if tell is not None and not number % 256:
                tell(number, count)
        return trace

    def _check(self, size: int) -> None:
        value = self.values.get
        if value("retrieved", 0) > value("documents", 1):
            raise ConfigError(f"{self.name}: retrieved must not exceed documents")
        texts = value("retrieved", 0) * value("document", 0) + value("system", 0)
        each = value("observation", value("question", 0)) + value("output", 0)
        prompt = texts + value("question", 0) + each * (value("turns", 1) - 1) / 2
        blocks = value("requests", 0) * (prompt + value("output", 0)) / size
        if blocks > _MOST_BLOCKS:
            raise ConfigError(
                f"{self.name}: that is about {blocks:,.0f} blocks of {size} tokens, and at most "
                f"{_MOST_BLOCKS:,} can be replayed; ask for fewer requests, shorter prompts or a "
                "larger --block-size"
            )


def parse_workload(text: str) -> Workload:
    """Read a description: with or without ``workload:``, a kind, and ``?name=value&name=value``.

    Raises ConfigError that names the kind or the parameter, and what is known or possible.
    """
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"a workload's description has at most {_MOST_TEXT:,} characters")
    name, mark, query = text.removeprefix(PREFIX).partition("?")
    kind = KINDS.get(name)
    if kind is None:
        raise unknown("kind of workload", name, KINDS)
    shown = f"{PREFIX}{name}{mark}{query}"
    given = parse_options(shown, query, "?requests=2000&seed=1")
    known = kind.parameters
    values = {key: parameter.default for key, parameter in known.items()}
    for key, value in given.items():
        if key not in known:
            raise unknown(f"parameter of {PREFIX}{name}", key, known)
        values[key] = known[key].read(f"{PREFIX}{name}: {key}", value)
    return Workload(shown, name, values)


def shown_parameters(own: Mapping[str, Parameter] | None) -> str:
    """Return a line a parameter, with default and bounds. own: a kind's; None: those of all."""
    lines = []
    for name, one in (_COMMON if own is None else own).items():
        value, *bounds = map(one.shown, (one.default, one.least, one.most))
        lines.append(f"  {f'{name}={value}':18} {one.text} ({' to '.join(bounds)})")
    return "\n".join(lines)


# ---- what is said


class _Text:
    """Where prompts have said the same so far: a node of the tree of what several may say.

    blocks: those that end within its last text.
    """

    __slots__ = ("blocks", "next", "tokens")

    def __init__(self, tokens: int, blocks: list[int]) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.next: dict[int, _Text] = {}


class _Chat:
    """One conversation: the blocks of what was said, and what is said next."""

    def __init__(self, drawn: _Drawn, texts: list[tuple[int, int]]) -> None:
        self.blocks: list[int] = []
        self.left = drawn.whole("turns", 1)
        self._drawn = drawn
        self._tokens = 0
        self._says = "question"
        here = drawn.root
        for which, tokens in texts:
            here = drawn.behind(here, which, tokens)
            self.blocks += here.blocks
            self._tokens = here.tokens

    def ask(self) -> tuple[int, int, int]:
        """Ask, and be answered; return the tokens of both, and how many blocks the prompt has."""
        self.left -= 1
        self._add(max(self._drawn.length(self._says), 1))
        self._says = "observation" if "observation" in self._drawn.values else "question"
        tokens, asked = self._tokens, len(self.blocks)
        output = self._drawn.length("output")
        self._add(output)
        return tokens, output, asked

    def _add(self, tokens: int) -> None:
        """Say what nobody else says."""
        self._tokens += tokens
        self.blocks += self._drawn.fresh(self._tokens // self._drawn.size - len(self.blocks))


class _Drawn:
    """What chance has drawn of a workload, and the numbers of its blocks."""

    def __init__(self, workload: Workload, size: int) -> None:
        self.values = workload.values
        self.size = size
        self.root = _Text(0, [])
        self.rng = random.Random(f"{workload.kind} {self.whole('seed', 0)}")
        self._next = itertools.count()
        self._choices = self.whole("documents", self.whole("prefixes", 1))
        power = -self.values.get("zipf", 0.0)
        self._shares = [rank**power for rank in range(1, self._choices + 1)]
        self._upto = list(itertools.accumulate(self._shares))
        self._lengths = [max(self.length("document"), 1) for _ in range(self.whole("documents", 0))]

    def whole(self, name: str, default: int) -> int:
        """Return a parameter that is a whole number."""
        return int(self.values.get(name, default))

    def length(self, name: str) -> int:
        """Draw a length."""
        return round(self.about(self.values.get(name, 0.0)))

    def about(self, mean: float) -> float:
        """Draw around a mean."""
        vary = self.values["vary"]
        return mean * self.rng.uniform(1 - vary, 1 + vary)

    def fresh(self, blocks: int) -> list[int]:
        """Return the numbers of blocks that nothing else has."""
        return list(itertools.islice(self._next, blocks))

    def behind(self, text: _Text, which: int, tokens: int) -> _Text:
        """Return what is said when a text that others say too follows another."""
        found = text.next.get(which)
        if found is None:
            end = text.tokens + tokens
            blocks = self.fresh(end // self.size - text.tokens // self.size)
            found = text.next[which] = _Text(end, blocks)
        return found

    def chat(self) -> _Chat:
        """Begin a conversation."""
        system = self.whole("system", 0)
        if not self._lengths:
            return _Chat(self, [(self._choice(), system)])
        texts = [(-1, system)]
        texts += [(number, self._lengths[number]) for number in self._retrieved()]
        return _Chat(self, texts)

    def _choice(self) -> int:
        return min(bisect(self._upto, self.rng.random() * self._upto[-1]), self._choices - 1)

    def _retrieved(self) -> list[int]:
        """Draw different documents, each by its share of those that are left."""
        wanted = self.whole("retrieved", 1)
        found: dict[int, None] = {}
        for _ in range(_TRIES * wanted):
            if len(found) == wanted:
                break
            found[self._choice()] = None
        if len(found) < wanted:
            rest = (number for number in range(self._choices) if number not in found)
            soonest = heapq.nsmallest(
                wanted - len(found), rest, key=lambda one: self.rng.expovariate(self._shares[one])
            )
            found.update(dict.fromkeys(soonest))
        return list(found)


def _arrivals(workload: Workload, size: int) -> Iterator[tuple[float, _Chat]]:
    """Yield, without end, the times in seconds at which requests come, and of which chat."""
    drawn = _Drawn(workload, size)
    rate = workload.values["rate"] / drawn.whole("turns", 1)
    pause = workload.values.get("pause", 0.0)
    waiting: list[tuple[float, int, _Chat]] = []
    begins = 0.0
    for number in itertools.count():
        begins += drawn.rng.expovariate(rate)
        heapq.heappush(waiting, (begins, number, drawn.chat()))
        while waiting[0][0] < begins:
            when, which, chat = heapq.heappop(waiting)
            yield when, chat
            if chat.left:
                heapq.heappush(waiting, (when + drawn.about(pause), which, chat))
