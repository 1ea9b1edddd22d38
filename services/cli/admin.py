"""How does a command read what the bootstrap shows to operators?

The key is the bootstrap's admin key, if this process is given one, else OPENAI_API_KEY. Certificates are
those of every client of the API (`services/web/client_trust.py`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx

from baton.cli.chat_settings import DEFAULT_URL, URL, base_of
from baton.runtime.errors import StartupError
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.setting_kinds import FILE
from baton.runtime.settings import load, setting
from baton.web.api_keys import ADMIN_FILE_FLAG, API_KEYS, first_key
from baton.web.client_trust import distrusted, key_headers, trusted

TIMEOUT_S: Final = 10.0
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403

Drawn = TypeVar("Drawn")


@dataclass(frozen=True, kw_only=True)
class AdminSettings:
    """Where the bootstrap shows its pages: its API, or its --admin-port."""

    url: str = setting(DEFAULT_URL, "Where the bootstrap is: its API, or its --admin-port.", URL)
    admin_api_key_file: str = setting("", "File whose first key is sent, as an admin key.", FILE)
    admin_api_keys: tuple[str, ...] = setting((), "Admin keys: the first is sent.", API_KEYS, secret=True)

    @property
    def headers(self) -> dict[str, str]:
        """The key of this command. Raises StartupError."""
        key = first_key(self.admin_api_keys, self.admin_api_key_file, ADMIN_FILE_FLAG)
        return {"Authorization": f"Bearer {key}"} if key else key_headers()


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Options of a command that reads what the bootstrap shows; None: not given."""

    url: str | None = None
    admin_api_key_file: str | None = None


class BootstrapUnreadable(StartupError):
    """The bootstrap is not there, or did not answer as asked."""


class Admin:
    """A bootstrap's pages for operators, as JSON."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self.url = url

    def read(self, path: str) -> dict[str, Any]:
        """Raises BootstrapUnreadable."""
        return self._asked("GET", path)

    def write(self, path: str, told: dict[str, int]) -> dict[str, Any]:
        """Change what is at `path`. Raises BootstrapUnreadable."""
        return self._asked("PUT", path, told)

    def _asked(self, method: str, path: str, told: dict[str, int] | None = None) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, params=told)
            body = reply.json()
        except httpx.ConnectError as error:
            none = f"no bootstrap answers at {self.url}: start one, or name it with --url"
            raise BootstrapUnreadable(distrusted(error, self.url) or none) from None
        except httpx.TimeoutException:
            raise BootstrapUnreadable(f"the bootstrap at {self.url} was silent for {TIMEOUT_S:g} s") from None
        except httpx.TransportError as error:
            raise BootstrapUnreadable(f"the connection to {self.url} broke: {error}") from None
        except ValueError:
            raise BootstrapUnreadable(
                f"what answers at {self.url}/{path} is no bootstrap: HTTP {reply.status_code}"
            ) from None
        if reply.is_success and isinstance(body, dict):
            return body
        raise BootstrapUnreadable(self._refusal(reply, body))

    def understood(
        self, tell: Callable[[dict[str, Any]], Iterable[Drawn]], body: dict[str, Any]
    ) -> list[Drawn]:
        """What `tell` makes of an answer. Raises BootstrapUnreadable for one that is not what this version's commands
        read."""
        try:
            return list(tell(body))
        except (KeyError, TypeError, ValueError):
            raise BootstrapUnreadable(
                f"what answers at {self.url} tells it in another way than this version of baton"
            ) from None

    def _refusal(self, reply: httpx.Response, body: Any) -> str:
        match body:
            case {"error": {"message": str(message)}}:
                text = message
            case _:
                text = f"{self.url} answered {reply.status_code}"
        if reply.status_code in (UNAUTHORIZED, FORBIDDEN):
            text += " Name its file with --admin-api-key-file, or set BATON_ADMIN_API_KEYS or OPENAI_API_KEY."
        if text.startswith("Nothing is served at "):
            text += " If the bootstrap has an --admin-port, name that with --url."
        return text


@contextmanager
def admin(at: Bootstrap, known: frozenset[str]) -> Iterator[Admin]:
    """`at`: what was typed; else variables say it, else this machine. Raises StartupError."""
    settings = load(
        AdminSettings, {"url": at.url, "admin_api_key_file": at.admin_api_key_file}, os.environ, known
    )
    with httpx.Client(
        base_url=base_of(settings.url),
        timeout=TIMEOUT_S,
        trust_env=is_reachable_from_elsewhere(httpx.URL(settings.url).host),
        verify=trusted(),
        headers=settings.headers,
    ) as http:
        yield Admin(http, base_of(settings.url))


def workers_of(room: Mapping[str, Any], between: str) -> str:
    """Where a room that the bootstrap tells of was served, with `between` its two workers."""
    if room["prefill"]:
        return f"{room['prefill']}{between}{room['decode']}"
    return f"{room['decode']}{', both sides' if room.get('same_process') else ' alone'}"
