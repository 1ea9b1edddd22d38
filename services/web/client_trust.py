"""What does a command need to ask a server that wants a key, or has a certificate of one's own authority?

It is where OpenAI's own client looks: OPENAI_API_KEY and SSL_CERT_FILE.
"""

import os
import ssl

import httpx

from baton.runtime.errors import StartupError


def key_headers() -> dict[str, str]:
    """The key, if the environment has one. It is sent to whoever is asked: name servers with care."""
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def distrusted(
    error: httpx.ConnectError, url: str, hint: str = "SSL_CERT_FILE names whose are"
) -> str | None:
    """A sentence, where a connection failed because the server's certificate is not believed."""
    if "certificate" in str(error).lower():
        return f"the certificate of {url} is not trusted here ({hint}): {error}"
    return None


def trusted() -> ssl.SSLContext:
    """Whose certificates are believed: those that SSL_CERT_FILE names, else the usual ones. Raises
    StartupError for a file that cannot be used."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
        raise StartupError(f"SSL_CERT_FILE {named} holds no certificates: {error.strerror}") from None
