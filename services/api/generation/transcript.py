"""Prompts and answers in the log, only with `--log-prompts`."""

from collections.abc import Mapping, Sequence

from baton.api.generation.answer_stream import Emit, by_request
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.text.tokenizer import Tokenizer
from baton.runtime.logging import VALUE_CHARS_MAX, Log

log = Log(__name__)


class Transcript:
    """The beginnings of one request's prompts and answers, as long as a field of the log may be."""

    def __init__(
        self, choices: Sequence[ChoiceAssembler], tokenizer: Tokenizer, names: Mapping[str, str]
    ) -> None:
        self._names = names
        self._answers = {choice.index: "" for choice in choices}
        for choice in (own[0] for own in by_request(choices)):
            # A token is at least a character, but for those that are part of one.
            shown = choice.request.prompt[: 4 * VALUE_CHARS_MAX]
            prompt = tokenizer.decode(shown, skip_special_tokens=False)
            log.info("prompt", **names, choice=choice.index, prompt=prompt)

    def recording(self, emit: Emit) -> Emit:
        """Return `emit`, which also records the answer."""

        async def record(choice: ChoiceAssembler, delta: Delta) -> None:
            answer = self._answers[choice.index]
            if len(answer) <= VALUE_CHARS_MAX:
                self._answers[choice.index] = answer + delta.text
            await emit(choice, delta)

        return record

    def write(self) -> None:
        for index, answer in self._answers.items():
            log.info("answer", **self._names, choice=index, answer=answer)
