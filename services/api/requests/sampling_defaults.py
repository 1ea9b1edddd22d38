"""Default sampling parameters for requests that do not set them.

They come from the model's `generation_config.json`, unless `--generation-config` excludes that file. A field
that a request sets always has the request's value.
"""

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from baton.api.requests.schemas import RecommendedSampling
from baton.models.model_facts import GENERATION_FILE, ModelUnreadable, json_object

FIELDS: Final = frozenset(RecommendedSampling.model_fields)


def recommended(model_dir: Path) -> RecommendedSampling:
    """Return the sampling parameters that the `generation_config.json` in `model_dir` recommends. Raises
    ModelUnreadable for a value that no request may have.

    As in vLLM and SGLang, `do_sample` is ignored: users ask for greedy sampling by a temperature.
    """
    told = json_object(model_dir / GENERATION_FILE)
    try:
        return RecommendedSampling.model_validate({name: told[name] for name in FIELDS & told.keys()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ModelUnreadable(
            f"{model_dir / GENERATION_FILE}: {first['loc'][0]}: {first['msg']}; --generation-config none "
            "passes over the file"
        ) from error


def sampling_fields_of(body: RecommendedSampling, defaults: RecommendedSampling) -> RecommendedSampling:
    """Return the sampling parameters of a request. `defaults`: values for those that the request does not
    set."""
    given = {name: getattr(body, name) for name in FIELDS & body.model_fields_set}
    return defaults.model_copy(update=given) if given else defaults


def differing(recommended: RecommendedSampling) -> dict[str, Any]:
    """Return the recommended sampling parameters that differ from Baton's own defaults, by name."""
    return recommended.model_dump(exclude_defaults=True)
