"""Schemas of the bodies of POST /tokenize and POST /detokenize."""

from typing import Annotated

from pydantic import FailFast, Field

from baton.api.requests.field_types import TokenId
from baton.api.requests.schemas import Conversation, Messages, Shape


class TokenizeRequest(Conversation):
    """Body of POST /tokenize: exactly one of `prompt` and `messages`. By default special tokens are added to
    a prompt, but not to messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field(default_factory=list)
    """Messages of a chat whose rendered prompt is tokenised. Absent: `prompt` is tokenised."""
    return_token_strs: bool = False


class DetokenizeRequest(Shape):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]
