"""API key and trusted certificates for the commands of Baton that call a server.

They come from the environment variables OPENAI_API_KEY and SSL_CERT_FILE, like those of OpenAI's client.
"""

import os
import ssl

import httpx

from baton.runtime.errors import StartupError


def key_headers() -> dict[str, str]:
    """Return the Authorization header with the API key of the environment, or nothing if there is no key.

    The key is sent to whatever server the user names.
    """
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def certificate_problem(
    error: httpx.ConnectError, url: str, hint: str = "SSL_CERT_FILE names whose are"
) -> str | None:
    """Return an error message if a connection failed because of an untrusted certificate, else None.

    `hint`: how to name trusted certificates.
    """
    if "certificate" in str(error).lower():
        return f"the certificate of {url} is not trusted here ({hint}): {error}"
    return None


def tls_context() -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities of SSL_CERT_FILE, or else the usual ones.

    Raises StartupError if the file cannot be used.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
        raise StartupError(f"SSL_CERT_FILE {named} holds no certificates: {error.strerror}") from None
