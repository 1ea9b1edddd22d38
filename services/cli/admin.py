"""HTTP client of the bootstrap's pages for operators, for the commands `top`, `explain` and `role`.

The key that it sends is the bootstrap's admin key if this process has one, else OPENAI_API_KEY. Certificates
are trusted as by every client of the API (`web.client_trust`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx

from baton.cli.chat_settings import URL, base_of
from baton.launch.serve_settings import DEFAULT_URL
from baton.runtime.errors import StartupError
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.setting_kinds import FILE
from baton.runtime.settings import load, setting
from baton.web.api_keys import ADMIN_FILE_FLAG, API_KEYS, first_key
from baton.web.client_trust import certificate_problem, key_headers, tls_context

TIMEOUT_S: Final = 10.0
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403

Drawn = TypeVar("Drawn")


@dataclass(frozen=True, kw_only=True)
class AdminSettings:
    """Settings of commands that read the bootstrap's pages for operators: its address and an admin key."""

    url: str = setting(DEFAULT_URL, "Where the bootstrap is: its API, or its --admin-port.", URL)
    admin_api_key_file: str = setting("", "File whose first key is sent, as an admin key.", FILE)
    admin_api_keys: tuple[str, ...] = setting((), "Admin keys: the first is sent.", API_KEYS, secret=True)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP header that authenticates this command at the bootstrap: its admin key, else OPENAI_API_KEY.
        Raises StartupError."""
        key = first_key(self.admin_api_keys, self.admin_api_key_file, ADMIN_FILE_FLAG)
        return {"Authorization": f"Bearer {key}"} if key else key_headers()


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Options that name the bootstrap, as typed for a command that reads its pages. None stands for an option
    that is not given."""

    url: str | None = None
    admin_api_key_file: str | None = None


class BootstrapUnreadable(StartupError):
    """The bootstrap could not be reached, or did not answer as expected."""


class Admin:
    """Client of one bootstrap's pages for operators, which it reads as JSON."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self.url = url

    @property
    def headers(self) -> httpx.Headers:
        """HTTP headers that are sent with each request."""
        return self._http.headers

    def read(self, path: str) -> dict[str, Any]:
        """Return the JSON object of the page at `path`. Raises BootstrapUnreadable."""
        return self._request("GET", path)

    def write(self, path: str, parameters: dict[str, int]) -> dict[str, Any]:
        """Send `parameters` to the page at `path` with PUT, and return the answer. Raises
        BootstrapUnreadable."""
        return self._request("PUT", path, parameters)

    def _request(self, method: str, path: str, parameters: dict[str, int] | None = None) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, params=parameters)
            body = reply.json()
        except httpx.ConnectError as error:
            none = f"no bootstrap answers at {self.url}: start one, or name it with --url"
            raise BootstrapUnreadable(certificate_problem(error, self.url) or none) from None
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

    def rendered(
        self, render: Callable[[dict[str, Any]], Iterable[Drawn]], body: dict[str, Any]
    ) -> list[Drawn]:
        """Return the items that `render` makes of the answer `body`.

        Raises BootstrapUnreadable if the answer has a form that this version's commands cannot read.
        """
        try:
            return list(render(body))
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
    """Context manager that yields a client of the bootstrap's pages. Raises StartupError.

    `at`: options as typed, which win over environment variables. The default is this machine. `known`: every
    `BATON_*` variable of the project.
    """
    settings = load(
        AdminSettings, {"url": at.url, "admin_api_key_file": at.admin_api_key_file}, os.environ, known
    )
    with httpx.Client(
        base_url=base_of(settings.url),
        timeout=TIMEOUT_S,
        trust_env=is_reachable_from_elsewhere(httpx.URL(settings.url).host),
        verify=tls_context(),
        headers=settings.headers,
    ) as http:
        yield Admin(http, base_of(settings.url))


def workers_of(room: Mapping[str, Any], between: str) -> str:
    """Return the names of a room's workers as text. `between`: text between the prefill and the decode
    worker."""
    if room["prefill"]:
        return f"{room['prefill']}{between}{room['decode']}"
    return f"{room['decode']}{', both sides' if room.get('same_process') else ' alone'}"
