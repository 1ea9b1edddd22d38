"""How are tokens drawn where a request does not say it?

As the makers of the model recommend, in its `generation_config.json`, if `--generation-config` lets them;
else as the model computes them. A field that a request gives is its own, whatever the others are.
"""

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from baton.api.requests.schemas import RecommendedSampling
from baton.models.model_facts import GENERATION_FILE, ModelUnreadable, json_object

FIELDS: Final = frozenset(RecommendedSampling.model_fields)


def recommended(model_dir: Path) -> RecommendedSampling:
    """What the model in `model_dir` comes with. Raises ModelUnreadable for a value that no request may have.

    As in vLLM and SGLang: `do_sample` is passed over, since their users and ours say greedy by a temperature.
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
    """What `body` asks for, and of the rest the `defaults`."""
    given = {name: getattr(body, name) for name in FIELDS & body.model_fields_set}
    return defaults.model_copy(update=given) if given else defaults


def differing(drawing: RecommendedSampling) -> dict[str, Any]:
    """Of it what is not as where nobody recommends anything."""
    return drawing.model_dump(exclude_defaults=True)
