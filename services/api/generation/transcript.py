"""Log lines with the texts of prompts and answers. They are written only with `--log-prompts`."""

from collections.abc import Mapping, Sequence

from baton.api.generation.answer_stream import Emit, by_request
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.text.tokenizer import Tokenizer
from baton.runtime.logging import VALUE_CHARS_MAX, Log

log = Log(__name__)


class Transcript:
    """Logger of the texts of one request's prompts and answers. Only the beginning of a long text is logged,
    as much as a field of the log may hold."""

    def __init__(
        self, choices: Sequence[ChoiceAssembler], tokenizer: Tokenizer, names: Mapping[str, str]
    ) -> None:
        self._names = names
        self._answers = {choice.index: "" for choice in choices}
        for choice in (own[0] for own in by_request(choices)):
            # A token has at least one character, or a part of one, which takes 4 tokens at most.
            shown = choice.request.prompt[: 4 * VALUE_CHARS_MAX]
            prompt = tokenizer.decode(shown, skip_special_tokens=False)
            log.info("prompt", **names, choice=choice.index, prompt=prompt)

    def recording(self, emit: Emit) -> Emit:
        """Return `emit` wrapped so that the beginning of each choice's text is also recorded. `write` logs it
        later."""

        async def record(choice: ChoiceAssembler, delta: Delta, more: bool) -> None:
            answer = self._answers[choice.index]
            if len(answer) <= VALUE_CHARS_MAX:
                self._answers[choice.index] = answer + delta.text
            await emit(choice, delta, more)

        return record

    def write(self) -> None:
        for index, answer in self._answers.items():
            log.info("answer", **self._names, choice=index, answer=answer)
