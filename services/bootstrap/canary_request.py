"""Canary request: test request that the router sends through each worker that joins.

It is built like a client's request, with the model's own defaults (`canary-is-a-request`). So a model whose
defaults no worker would accept is refused before the first worker joins.
"""

from baton.api.backend import Limits
from baton.api.errors import ApiError
from baton.api.model_interface import ModelDefaults
from baton.api.requests.meaning_reader import completion_meaning
from baton.api.requests.request_builder import admit
from baton.api.requests.schemas import CompletionRequest
from baton.bootstrap.canary import OUTPUT_TOKENS, PROMPT_TOKENS, REQUEST_ID, canary_prompt
from baton.ids import RoomId
from baton.rooms.request import Request
from baton.runtime.errors import StartupError
from baton.wire.conversions import Malformed, request_from_wire, request_to_wire
from baton.wire.model_bounds import ModelBounds


def canary_request(model: ModelDefaults, context_tokens: int) -> Request:
    """Return a short request for `model`, as a client would make it. It leaves out all that has a default.
    Raises StartupError if the model's own defaults are refused."""
    prompt = list(canary_prompt(RoomId(2 ** (3 * PROMPT_TOKENS) - 1)))  # the largest ids
    body = CompletionRequest(
        model=model.name, prompt=[prompt], max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0
    )
    try:
        (request,) = admit(
            body, completion_meaning(body), [prompt], model, Limits(context_tokens, 0, 0), REQUEST_ID, salt=0
        )
        ModelBounds(model.vocabulary, context_tokens).check(request_from_wire(request_to_wire(request)))
    except (ApiError, Malformed, ValueError) as error:  # ValueError: a value does not fit its field
        raise StartupError(
            f"the model {model.name} cannot be served: the request that makes a worker ready, with the "
            f"model's own defaults, is refused: {error}"
        ) from error
    return request
