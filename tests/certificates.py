"""Certificates for tests, made by openssl."""

import subprocess
from pathlib import Path

from danlu.spec.resilience import TlsFiles

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_certificates(folder: Path) -> TlsFiles:
    """An authority, and a certificate that it signed."""
    folder.mkdir(parents=True)
    authority, authority_key, certificate, key, request = (
        str(folder / name) for name in ("authority.pem", "authority.key", "host.pem", "host.key", "host.csr")
    )
    _openssl("req", "-x509", *_KEY, "-keyout", authority_key, "-out", authority, "-days", "2", "-subj", "/CN=authority")
    _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", "/CN=host")
    signed = ("-CA", authority, "-CAkey", authority_key, "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *signed, "-out", certificate, "-days", "2")
    return TlsFiles(certificate=certificate, key=key, authority=authority)


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
