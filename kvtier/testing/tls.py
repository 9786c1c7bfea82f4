"""Certificates for servers of this host, for tests of TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

from kvtier.errors import ConfigError


def self_signed(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return a new certificate for 127.0.0.1, and how a server speaks TLS by it.

    Raises ConfigError where it cannot be made.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError("openssl absent: it makes the certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = (
        f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} "
        "-days 2 -subj /CN=kvtier -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([openssl, *command.split()], check=True, capture_output=True)  # noqa: S603
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
