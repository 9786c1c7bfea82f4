"""Frames: how messages cross the socket between a client and a daemon.

Everything crosses a Unix stream socket in frames of a header of 16 bytes, little-endian, and a
body:

    offset  bytes  what
         0      2  the letters KV
         2      1  version of the protocol, 1
         3      1  kind of the message, its KIND
         4      4  length of the body in bytes, at most what the kind allows
         8      8  number: of the request, chosen by its sender; a reply carries that of its
                   request; 0 where no reply is wanted

The body is the message's fields as a MessagePack array, in the order in which ``messages`` and
``answers`` list them.
Slots come packed, as ``kvtier.memory.packed`` says. No KV crosses a socket: both sides map the
arena, whose descriptor comes with Welcome.

A client opens a connection and says Hello, with its pidfd; the daemon says Welcome, with the
arena's descriptor. After a break, Resume comes next. Then Join for each namespace, and any of the
others in any order. Requests of one connection are taken in their order; replies to Fetch and what
else takes time come when they are there. A client says Bye before it closes on purpose; the daemon
says Closing before it ends.

A length is compared with the kind's cap before anything is allocated, and each value is checked
as it is decoded. What does not pass is a ProtocolError: the daemon answers Failed and closes.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from kvtier.daemon import answers, messages
from kvtier.daemon.messages import Message
from kvtier.errors import ProtocolError

VERSION: Final = 1
MAGIC: Final = b"KV"
HEADER: Final = struct.Struct("<2sBBIQ")
KINDS: Final[dict[int, type[Message]]] = {
    kind.KIND: kind
    for module in (messages, answers)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}
"""Messages by the number of their kind."""

_decoders: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()
}
_encoder: Final = msgspec.msgpack.Encoder()


def encode(message: Message, number: int = 0) -> bytes:
    """Return the frame of a message. Raises ProtocolError for one that is too long."""
    body = _encoder.encode(message)
    if len(body) > message.MOST:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes; at most {message.MOST} are sent"
        )
    return HEADER.pack(MAGIC, VERSION, message.KIND, len(body), number) + body


def open_frame(header: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Return kind, length of the body, and number of a frame, by its first 16 bytes.

    Raises ProtocolError for what is no frame, another version, or longer than its kind may be.
    """
    magic, version, kind, length, number = HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError("this is not the protocol of kvtier; is it another program's socket?")
    if version != VERSION:
        raise ProtocolError(
            f"protocol version {version}; this kvtier speaks {VERSION}: install the same release "
            "on both sides"
        )
    if kind not in KINDS:
        raise ProtocolError(f"a message of the unknown kind {kind}")
    if length > KINDS[kind].MOST:
        raise ProtocolError(
            f"a {KINDS[kind].__name__} of {length} bytes; at most {KINDS[kind].MOST} are read"
        )
    return kind, length, number


def decode(kind: int, body: bytes | bytearray | memoryview) -> Message:
    """Read a body, whatever it is. Raises ProtocolError for what is no such message."""
    try:
        message: Message = _decoders[kind].decode(body)
    except Exception as error:
        raise ProtocolError(f"not a {KINDS[kind].__name__}: {error}") from error
    return message
