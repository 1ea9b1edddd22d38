"""Checks of token ids against the model's vocabulary."""

from collections.abc import Sequence

from baton.api.errors import ApiError, invalid


def check_ids(ids: Sequence[int], param: str, vocabulary: int) -> None:
    """Raise ApiError if a token id is not in the model's vocabulary. The error names the first such id."""
    if ids and max(ids) >= vocabulary:
        index = next(index for index, each in enumerate(ids) if each >= vocabulary)
        raise not_a_token(f"{param}[{index}]", ids[index], vocabulary)


def not_a_token(param: str, id_: int, vocabulary: int) -> ApiError:
    return invalid(param, f"'{param}': token id {id_} is not in the vocabulary of {vocabulary} tokens.")
