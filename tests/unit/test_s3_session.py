"""Sessions of boto3: AWS's description of S3 is read once, the environment each time."""

from __future__ import annotations

from botocore.loaders import JSONFileLoader

from kvtier.storage_backends import s3_service
from kvtier.storage_backends.s3_service import Settings, connect, new_session

SETTINGS = Settings("us-east-1", "http://127.0.0.1:1", "path", 1.0, 1.0)


def files_read(monkeypatch) -> list[str]:
    read, load = [], JSONFileLoader._load_file

    def noted(self, path, open_method):
        read.append(path)
        return load(self, path, open_method)

    monkeypatch.setattr(JSONFileLoader, "_load_file", noted)
    return read


def test_what_describes_the_service_is_read_once(monkeypatch):
    connect(SETTINGS).close()
    read = files_read(monkeypatch)
    connect(SETTINGS).close()
    assert read == []


def test_twin_each_session_would_read_it(monkeypatch):
    monkeypatch.setattr(s3_service, "_loader", s3_service._loader.__wrapped__)
    read = files_read(monkeypatch)
    connect(SETTINGS).close()
    assert read


def test_the_folders_of_descriptions_do_not_pile_up():
    before = list(new_session()._loader.search_paths)
    assert new_session()._loader.search_paths == before


def test_credentials_are_those_of_the_moment(monkeypatch):
    for key in ("one", "two"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        assert new_session().get_credentials().access_key == key
