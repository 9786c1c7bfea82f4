"""What was spoilt in a shared store is mended by whoever writes it next: alone and in packs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from kvtier.codecs.known import LOSSLESS
from kvtier.identity.record import HEADER_BYTES, KEY_BYTES, Header
from kvtier.metrics import Metrics
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.files import FilesStore
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.tiers.coding import Coding
from kvtier.tiers.mending import Mending
from kvtier.tiers.pack import CODEC_PACK, CODEC_SIZED_PACK
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Tier, Wanted

pytestmark = pytest.mark.server

OK, ABSENT, CORRUPT = Status.OK, Status.ABSENT, Status.CORRUPT
MIB = 1 << 20
PARTS = 8
SIZE = 300_000  # eight are more than the MiB from which a PUT is worth a look before
AT = 3


class Files:
    """A directory that hosts share, and its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> FilesStore:
        return FilesStore(self._folder, None, durability="none")

    def listed(self) -> list[Path]:
        return sorted(self._folder.rglob("*.kv"))

    def get(self, one: Path) -> bytes:
        return one.read_bytes()

    def put(self, one: Path, body: bytes) -> None:
        one.write_bytes(body)


class Bucket:
    """The same of a location on an S3 server."""

    def __init__(self, opened, objects) -> None:
        self.open, self.listed, self._objects = opened, objects.listed, objects

    def _name(self, one: str) -> dict[str, str]:
        return {"Bucket": self._objects.bucket, "Key": one}

    def get(self, one: str) -> bytes:
        return self._objects.client.get_object(**self._name(one))["Body"].read()

    def put(self, one: str, body: bytes) -> None:
        self._objects.client.put_object(**self._name(one), Body=body)


@pytest.fixture(params=["files", "s3"])
def place(request, tmp_path):
    """Return what hosts share."""
    if request.param == "files":
        (tmp_path / "shared").mkdir()
        return Files(tmp_path / "shared")
    request.getfixturevalue("s3_credentials")
    return Bucket(request.getfixturevalue("s3_open"), request.getfixturevalue("s3_objects"))


class Host:
    """A host with a Tier there."""

    def __init__(self, place, *, encodes: bool = False) -> None:
        self.flow, metrics = ThreadFlow(), Metrics()
        self.tier = Tier("shared", place.open(), self.flow, metrics, lambda: 0.0)
        if encodes:
            coding = Coding("shared", LOSSLESS, lambda: 0.0, metrics, always=True)
            coding.admit(NAMESPACE)
            self.tier.encode_by(coding)

    def write(self, *records: Write) -> list[Status]:
        return self.flow.spawn(self.tier.write(records)).result(30)

    def learn(self, records: list[Write]) -> None:
        self.tier.learn([one.header.id for one in records], records[0].header.raw_bytes)

    def read(self, *records: Write) -> list[Status]:
        """Read records; each that is OK is exact."""
        wanted = [
            Wanted(header.id, NAMESPACE, header.raw_bytes, aligned(header.raw_bytes))
            for header, _ in records
        ]
        out = self.flow.spawn(self.tier.read(wanted)).result(30)
        for found, one, record in zip(out, wanted, records, strict=True):
            assert found.status is not OK or one.into == record.data
        return [found.status for found in out]

    def close(self) -> None:
        self.tier.close()
        self.flow.close()


@pytest.fixture
def host(place):
    """Open hosts that are closed at the end."""
    hosts: list[Host] = []

    def opened(**options) -> Host:
        hosts.append(Host(place, **options))
        return hosts[-1]

    yield opened
    for one in hosts:
        one.close()


def flip(place, at: int) -> None:
    """Change a bit of the only object that there is."""
    (one,) = place.listed()
    body = bytearray(place.get(one))
    body[at] ^= 1
    place.put(one, bytes(body))


# ----------------------------------------------------------------------------------------- alone


def test_a_record_that_was_spoilt_is_mended_by_the_next_write(place, host):
    record = make_record(1, 3 * MIB)
    writer, reader = host(), host()
    assert writer.write(record) == [OK]
    flip(place, HEADER_BYTES + MIB)
    assert reader.read(record) == [CORRUPT]
    assert reader.write(record) == [OK]
    assert writer.read(record) == [OK]


def test_twin_if_that_were_not_noted_it_would_stay_spoilt(place, host, monkeypatch):
    monkeypatch.setattr(Mending, "note", lambda self, part, record: None)
    record = make_record(1, 3 * MIB)
    one = host()
    one.write(record)
    flip(place, HEADER_BYTES + MIB)
    assert one.read(record) == [CORRUPT]
    assert one.write(record) == [OK]
    assert one.read(record) == [CORRUPT]


# -------------------------------------------------------------------------------------- in packs


def chain() -> list[Write]:
    """Return records of consecutive chunks that a codec makes smaller."""
    records: list[Write] = []
    for depth in range(PARTS):
        header, data = make_record(depth, SIZE, like_kv=True)
        above = records[-1].header.id if records else None
        records.append(Write(structs.replace(header, parent=above), data))
    return records


def member(place) -> int:
    """Return where in the only pack the record of the part in question begins."""
    (one,) = place.listed()
    body = place.get(one)
    name = chain()[AT].header
    return body.index(name.pack()[16:122], HEADER_BYTES + KEY_BYTES * PARTS) - 16


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize("where", [60, HEADER_BYTES + 70_000], ids=["header", "bytes"])
def test_a_part_that_was_spoilt_is_mended_in_its_pack(place, host, encodes, where):
    records = chain()
    writer, reader = host(encodes=encodes), host(encodes=encodes)
    assert writer.write(*records) == [OK] * PARTS
    flip(place, member(place) + where)
    reader.learn(records)
    found = reader.read(*records)
    assert found == [OK] * AT + [CORRUPT] + [OK] * (PARTS - AT - 1)
    assert reader.write(records[AT]) == [OK]
    (one,) = place.listed()
    codec = Header.unpack(place.get(one)).codec
    assert codec == (CODEC_SIZED_PACK if encodes else CODEC_PACK)
    other = host()
    other.learn(records)
    for any_host in (reader, writer, other):
        assert any_host.read(*records) == [OK] * PARTS


def test_a_pack_that_was_spoilt_is_mended_when_it_is_written_whole(place, host):
    records = chain()
    one = host()
    one.write(*records)
    flip(place, member(place) + HEADER_BYTES + 5)
    assert CORRUPT in one.read(*records)
    assert one.write(*records) == [OK] * PARTS
    assert one.read(*records) == [OK] * PARTS


def test_twin_a_pack_would_stay_spoilt(place, host, monkeypatch):
    monkeypatch.setattr(Mending, "note", lambda self, part, record: None)
    records = chain()
    one = host()
    one.write(*records)
    flip(place, member(place) + HEADER_BYTES + 5)
    assert CORRUPT in one.read(*records)
    assert one.write(*records) == [OK] * PARTS
    assert CORRUPT in one.read(*records)


def test_a_pack_of_which_more_is_spoilt_than_is_written_goes(place, host):
    """Whose other parts are spoilt too: what is written then lies alone."""
    records = chain()
    one = host()
    one.write(*records)
    at = member(place)
    flip(place, at + HEADER_BYTES + 5)
    flip(place, at + 2 * HEADER_BYTES + SIZE + 20)  # the header behind
    assert one.read(*records)[AT : AT + 2] == [CORRUPT] * 2
    assert one.write(records[AT]) == [OK]
    assert one.read(records[AT]) == [OK]
    assert len(place.listed()) == 1
