"""The served tokenizer is the reference library's, in a process without torch."""

import errno
import json
import os
import subprocess
import sys
from contextlib import suppress
from copy import copy
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import pytest

from baton.api.served_model import load_served_model
from baton.api.text.chat_template import ChatTemplateMissing, MessagesRefused
from baton.api.text.template_limits import ChatTemplateFailed
from baton.api.text.tokenizer import Tokenizer, TooManyTokens, load_tokenizer
from baton.models.model_facts import read_model
from baton.models.tokenizer_files import TokenizerUnusable
from tests.api import tiny
from tests.api.text.test_detokenizer import REAL

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", [*REAL, "", "<|end|> markup", " "])
@pytest.mark.parametrize("kind", [tiny.byte_level, tiny.byte_fallback])
@pytest.mark.parametrize("special", [True, False])
def test_encodes_as_the_reference_does(kind: Any, text: str, special: bool) -> None:
    expected = kind()(text, add_special_tokens=special).input_ids
    assert Tokenizer(kind()).encode(text, add_special_tokens=special) == expected


@pytest.mark.parametrize("text", REAL)
def test_bytes_of_tokens_join_to_the_text(demo_tokenizer: Any, text: str) -> None:
    for reference in (tiny.byte_level(), demo_tokenizer):
        tokenizer = Tokenizer(reference)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_bytes_of_byte_fallback_tokens() -> None:
    tokenizer = Tokenizer(tiny.byte_fallback())
    ids = tokenizer.encode("Hello é😀", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " Hello é😀"
    assert tokenizer.token_bytes(0) == b"<|end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_chat_is_rendered_by_the_models_template(demo_tokenizer: Any) -> None:
    tokenizer = Tokenizer(demo_tokenizer)
    text = tokenizer.chat.render(HELLO, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    expected = demo_tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "by the library"])
def test_a_chat_is_what_the_library_makes_of_it(
    demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, compiled: bool, add_generation_prompt: bool
) -> None:
    """This holds for the template compiled here, and for the library's own function."""
    if not compiled:
        name = "transformers.utils.chat_template_utils"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    chat = [
        {"role": "system", "content": "Be {{ brief }}.\n", "name": "it"},
        {"role": "user", "content": " a <b> & 'c' "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Zürich 東京 <|im_end|>"},
    ]
    special = copy(tiny.byte_level())
    special.chat_template = "{{ eos_token }}{{ bos_token is defined }}{{ messages | tojson }}{{ tools }}"
    for reference in (demo_tokenizer, tiny.byte_level(), special):
        expected = reference.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        rendered = Tokenizer(reference).chat.render(chat, add_generation_prompt=add_generation_prompt)
        assert rendered == expected


def test_a_template_may_refuse() -> None:
    with pytest.raises(MessagesRefused, match="no such thing"):
        Tokenizer(tiny.byte_level()).chat.render(
            [{"role": "user", "content": "REFUSE"}], add_generation_prompt=True
        )


def test_a_template_may_fail_in_any_way() -> None:
    """A chat template is a program that came with the model, so any error of it is ChatTemplateFailed."""
    reference = copy(tiny.byte_level())
    reference.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(ChatTemplateFailed, match=r"template fails \(TypeError\)"):
        Tokenizer(reference).chat.render(HELLO, add_generation_prompt=True)


def test_no_template() -> None:
    named = copy(tiny.byte_level())
    named.chat_template = {"tool_use": "{{ messages }}"}
    for reference in (tiny.byte_fallback(), named):
        with pytest.raises(ChatTemplateMissing):
            Tokenizer(reference).chat.render(HELLO, add_generation_prompt=True)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for _ in ("none", "a directory"):
        with pytest.raises(
            TokenizerUnusable, match=r"no usable tokenizer: there is no file tokenizer\.json$"
        ):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").mkdir(exist_ok=True)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"added_tokens": [], "model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_one_line_that_names_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json: damaged, or of an unknown form \(.+\)$"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_said_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "tokenizer.json")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fails)
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json: it cannot be read: Too many open files$"):
        load_tokenizer(tmp_path)


def saved(tmp_path: Path, **config: Any) -> Path:
    """The tiny tokenizer's directory, of a model of `config`."""
    tiny.byte_level().save_pretrained(tmp_path)
    words = {"vocab_size": 420, "max_position_embeddings": 64, **config}
    (tmp_path / "config.json").write_text(json.dumps(words))
    return tmp_path


def test_tokens_that_the_model_lacks_are_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = len(tiny.byte_level())
    directory = saved(tmp_path, vocab_size=whole)
    load_served_model(directory, read_model(directory))
    assert not caplog.records
    saved(directory, vocab_size=whole - 3)
    model = load_served_model(directory, read_model(directory))
    (said,) = caplog.records
    fields = said.__dict__["baton_fields"]
    assert (fields["tokens"], fields["first"]) == (3, model.tokenizer.piece(whole - 3))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}", r"line 1: "),
        ("fine\n{{ broken", r"line 2: "),
        ("{% nonsense %}", r"line 1: .*nonsense"),
        ("{{ a | nosuchfilter }}", r"line 1: .*nosuchfilter"),
    ],
)
def test_a_chat_template_that_does_not_compile_is_refused_at_the_start(
    tmp_path: Path, template: str, why: str
) -> None:
    directory = saved(tmp_path)
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(
        TokenizerUnusable, match=rf"chat_template\.jinja: the chat template does not compile: {why}"
    ):
        load_served_model(directory, read_model(directory))


def test_the_chat_template_of_a_model_that_reads_images_too_is_found_beside_its_processor(
    tmp_path: Path,
) -> None:
    directory = saved(tmp_path)
    (directory / "chat_template.jinja").unlink()
    file = directory / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    chat = [{"role": "user", "content": "Hi"}]
    assert load_tokenizer(directory).chat.render(chat, add_generation_prompt=True) == "Hi!"
    file.write_text(json.dumps({"chat_template": "{{ broken"}))
    with pytest.raises(TokenizerUnusable, match=r"chat_template\.json: the chat template does not compile"):
        load_served_model(directory, read_model(directory))


def test_the_ends_of_a_container_are_its_own_and_its_texts(tmp_path: Path) -> None:
    text = {"model_type": "qwen3", "vocab_size": 448, "max_position_embeddings": 512, "eos_token_id": 7}
    directory = saved(tmp_path, model_type="qwen3_vl", text_config=text, eos_token_id=[3, 5])
    assert {3, 5, 7} <= set(read_model(directory).eos_token_ids)


def test_nothing_of_a_model_directory_runs_for_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template cannot reach Python's internals either."""
    marker = tmp_path / "ran"
    directory = saved(tmp_path, auto_map={"AutoConfig": "mine.Mine"}, model_type="mine")
    (directory / "mine.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    settings = directory / "tokenizer_config.json"
    words = {**json.loads(settings.read_text()), "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    settings.write_text(json.dumps(words))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with suppress(TokenizerUnusable):
        load_tokenizer(directory)
    saved(directory)
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (directory / "chat_template.jinja").write_text(reach)
    with pytest.raises(ChatTemplateFailed, match="SecurityError"):
        load_tokenizer(directory).chat.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert not marker.exists()


def test_a_served_model_is_read_from_its_directory(tmp_path: Path) -> None:
    tiny.byte_level().save_pretrained(tmp_path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 448,
        "max_position_embeddings": 512,
        "eos_token_id": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_served_model(tmp_path, read_model(tmp_path, "mine"))
    assert (model.name, model.vocabulary, set(model.eos_token_ids)) == ("mine", 448, {5, tiny.END_ID})
    assert model.tokenizer.encode("The fox", add_special_tokens=False) == tiny.ids("The fox")


def test_the_whole_api_runs_without_torch(tmp_path: Path) -> None:
    """A fresh process loads, renders, encodes and builds the application without torch, and prints
    nothing."""
    tiny.byte_level().save_pretrained(tmp_path)
    program = f"""
import sys
from pathlib import Path
from traceback import walk_tb
import baton.api.app, baton.api.served_model
from baton.api.served_model import load_served_model
from baton.api.text.tokenizer import keep_torch_out, load_tokenizer
keep_torch_out()
tokenizer = load_tokenizer(Path({str(tmp_path)!r}))
text = tokenizer.chat.render([{{"role": "user", "content": "hi"}}], add_generation_prompt=True)
ids = tokenizer.encode(text, add_special_tokens=False)
assert tokenizer.decode(ids, skip_special_tokens=False) == text
assert sys.modules["torch"] is None
assert not [name for name in sys.modules if name.startswith("torch.")]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_torch_that_is_there_already_is_not_hidden() -> None:
    program = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
from baton.api.served_model import load_served_model
from baton.api.text.tokenizer import keep_torch_out
try:
    keep_torch_out()
except RuntimeError:
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 7


def test_a_text_of_too_many_tokens_leaves_nothing_of_them_in_its_error() -> None:
    """Each token takes hundreds of bytes. They are freed while the error is passed on."""
    with pytest.raises(TooManyTokens) as caught:
        Tokenizer(tiny.byte_level()).encode("a b c d e f", add_special_tokens=False, most=2)
    kept = [value for frame, _ in walk_tb(caught.tb) for value in frame.f_locals.values()]
    assert not [value for value in kept if type(value).__name__ == "Encoding"]
