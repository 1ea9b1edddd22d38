"""API key and trusted certificates of the commands that call a server.

They come from OPENAI_API_KEY and SSL_CERT_FILE, like those of OpenAI's client.
"""

import os
import ssl

import httpx

from baton.runtime.errors import StartupError


def key_headers() -> dict[str, str]:
    """Return the header with the key of the environment, if there is one.

    It is sent to whatever server the user names.
    """
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def certificate_problem(
    error: httpx.ConnectError, url: str, hint: str = "SSL_CERT_FILE names whose are"
) -> str | None:
    """Return a sentence if a connection failed because the server's certificate is not trusted, else None."""
    if "certificate" in str(error).lower():
        return f"the certificate of {url} is not trusted here ({hint}): {error}"
    return None


def tls_context() -> ssl.SSLContext:
    """Return the TLS context with the authorities of SSL_CERT_FILE, or the usual ones.

    Raises StartupError for a file that cannot be used.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
        raise StartupError(f"SSL_CERT_FILE {named} holds no certificates: {error.strerror}") from None
