"""Encrypted connections to a store, with certificates that the user gives. No torch.

Both sides show a certificate of the same authority; names in it are not compared, since a job learns only when it
starts which hosts it has. The job's token is asked for as without certificates.
"""

import ssl

from danlu.comm.store_token import StoreTokenError
from danlu.spec.resilience import TlsFiles


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For whoever listens; `StoreTokenError` if a file cannot be used."""
    return _context(files, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For whoever connects; `StoreTokenError` if a file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _context(files, context)


def _context(files: TlsFiles, context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
        context.load_verify_locations(files.authority)
    except (OSError, ValueError) as error:
        raise StoreTokenError(
            f"`resilience.tls` must name a certificate ({files.certificate}), its key ({files.key}) and the authority "
            f"that signed it ({files.authority}), each a PEM file that this host can read, but: {error}"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted with a password, for which nobody can be asked")
