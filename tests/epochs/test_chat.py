"""Chats through the template of the tokenizer: only what the assistant says is trained."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import fmsdata
from fmsdata.errors import ConfigError, DataError

BEGIN, END = "<|begin|>", "<|end|>"
PLAIN = (
    "{{ bos_token }}{% for m in messages %}" + BEGIN + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + BEGIN + "assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}" + BEGIN + "{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}" + END + "{% endgeneration %}"
    "{% else %}{{ m['content'] }}" + END + "{% endif %}\n{% endfor %}"
)
# Only the last answer keeps its thoughts, as templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}" + BEGIN + "{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('|')[-1] }}{% endif %}"
    + END
    + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + BEGIN + "assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def tokenizer(template: str | None = PLAIN) -> Any:
    from transformers import PreTrainedTokenizerFast

    letters = [*map(chr, range(32, 127)), "\n"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)} | {"so": 96}, [("s", "o")])
    )
    found = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", additional_special_tokens=[BEGIN, END])
    found.chat_template = template
    return found


def made(chats: list[Any], template: str | None = PLAIN, **options: Any) -> fmsdata.FineTuningRows:
    rows = [{"messages": chat} for chat in chats]
    return fmsdata.FineTuningRows(rows, tokenizer(template), seq_len=256, messages="messages", **options)


def trained(rows: fmsdata.FineTuningRows, row: int) -> str:
    labels = rows[row]["labels"]
    return "".join(tokenizer().convert_ids_to_tokens(labels[labels != -100].tolist()))


def test_only_the_turns_of_the_assistant_are_trained() -> None:
    first = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "x"}]
    rows = made([CHAT, CHAT[:3], CHAT[1:4], first[::-1]])
    assert trained(rows, 0) == f"yes?{END}\nso long{END}\n"
    assert trained(rows, 1) == trained(rows, 2) == f"yes?{END}\n"
    assert trained(rows, 3) == f"hello{END}\n"
    whole = tokenizer().apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert rows[0]["input_ids"].tolist() == whole


def test_what_comes_before_an_assistant_that_begins_is_not_trained() -> None:
    chat = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "x"}]
    assert trained(made([chat]), 0) == f"hello{END}\n"
    assert trained(made([chat], "You are helpful." + PLAIN), 0) == f"hello{END}\n"
    first = "{% if messages[0]['role'] != 'system' %}You are helpful.{% endif %}"
    with pytest.raises(DataError, match="row 0: its first message is of the assistant, and the chat template does not"):
        made([chat], first + PLAIN).table  # noqa: B018


def test_a_message_without_a_content_has_another_field_that_the_template_uses() -> None:
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": "[f()]"}]
    with pytest.raises(DataError, match="row 0: message 1 has no 'content'"):
        made([chat]).table  # noqa: B018
    template = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['tool_calls'] }}")
    assert trained(made([chat], template), 0) == f"[f()]{END}\n"


def test_a_template_that_marks_the_turns_is_believed() -> None:
    rows = made([CHAT, CHAT[:3]], MARKED)
    assert trained(rows, 0) == f"yes?{END}so long{END}"
    assert trained(rows, 1) == f"yes?{END}"
    strict = MARKED.replace("{{ m['content'] }}", "{{ m['content'] + '' }}")
    with pytest.raises(DataError, match="row 1: the chat template refused its messages"):
        made([CHAT, [{"role": "assistant", "content": 1}]], strict).table  # noqa: B018
    with pytest.raises(DataError, match="row 0: its chat template marks no token"):
        made([CHAT], MARKED.replace("== 'assistant'", "== 'model'")).table  # noqa: B018
    given = fmsdata.FineTuningRows(
        [{"messages": CHAT}], tokenizer(None), seq_len=256, messages="messages", chat_template=MARKED
    )
    assert given[0]["input_ids"].tolist() == rows[0]["input_ids"].tolist()
    assert given[0]["labels"].tolist() == rows[0]["labels"].tolist()


def test_global_tokens_count_all_turns_in_every_mode() -> None:
    chats = [CHAT[: 3 + 2 * (at % 2)] for at in range(12)]
    for mode in ("split", "pad", "bestfit"):
        for shift in (True, False):
            rows = made(chats, mode=mode, shift=shift)
            sampler = fmsdata.EpochSampler(rows, global_batch=2, rank=0, world_size=1, drop_last=False)
            labels = 0
            for batch in fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=2):
                assert int(batch["global_tokens"]) == int((batch["labels"] != -100).sum())
                labels += int(batch["global_tokens"])
            whole = 6 * (len("yes?") + 2) + 6 * (len("yes?") + 2 + len("so long") - 1 + 2)
            cut = whole if mode != "split" or shift else whole - 12
            assert cut <= labels <= whole


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": "thought|yes?"}, *CHAT[3:]]
    with pytest.raises(
        DataError, match=r"row 1: the chat up to message 2 is not a beginning of the whole chat.*a row of"
    ):
        made([CHAT, chat], FORGETFUL).table  # noqa: B018
    assert trained(made([CHAT, chat[:3]], FORGETFUL), 1) == f"thought|yes?{END}\n"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "row 1: field 'messages' is a str; it must be a list of messages"),
        ([{"content": "x"}], "row 1: message 0 has no 'role'; its fields are content"),
        (CHAT[:2], "row 1: none of its 2 messages has the role 'assistant'"),
        ([], "row 1: none of its 0 messages"),
        ([{"role": "assistant", "content": {1, 2}}], "row 1: its messages are not plain data"),
        ([{"role": "user", "content": 1}, CHAT[2]], "row 1: the chat template refused its messages"),
        ([{"role": "user", "text": "x"}, CHAT[2]], "row 1: message 0 has no 'content', .* its fields are role, text"),
        ([CHAT[1], {"role": "assistant", "content": None}], "row 1: message 1 has no 'content'"),
        ([CHAT[1], {"role": "assistant", "content": "\U0001f600 \udc80"}], r"row 1: field 'messages' has '\\udc80'"),
    ],
)
def test_a_wrong_chat_is_named(messages: Any, message: str) -> None:
    template = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] + '' }}")
    with pytest.raises(DataError, match=message):
        made([CHAT, messages], template).table  # noqa: B018


def test_fields_without_a_value_are_as_if_they_were_not_there() -> None:
    """Datasets with a schema fill up missing fields with None."""
    template = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] }}{% if 'tool' in m %}{{ 1 / 0 }}{% endif %}")
    rows = made([[{**message, "tool": None} for message in CHAT]], template)
    assert rows[0]["input_ids"].tolist() == made([CHAT])[0]["input_ids"].tolist()


def test_a_tokenizer_without_a_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template; give one with chat_template="):
        made([CHAT], None)
    (tmp_path / "empty").mkdir()
    for other in (tokenizer().backend_tokenizer, str(tmp_path / "nothing"), tmp_path / "empty"):
        with pytest.raises(ConfigError, match="messages= needs a tokenizer with a chat template"):
            fmsdata.FineTuningRows([{"messages": CHAT}], other, seq_len=64, messages="messages")
    tokenizer().save_pretrained(tmp_path)
    rows = fmsdata.FineTuningRows([{"messages": CHAT}], tmp_path, seq_len=256, messages="messages")
    assert rows[0]["input_ids"].tolist() == made([CHAT])[0]["input_ids"].tolist()


def test_another_template_is_another_file_and_another_state() -> None:
    plain, marked = made([CHAT] * 4), made([CHAT] * 4, MARKED)
    assert plain.table.path != marked.table.path
    assert plain.content == marked.content
    assert plain.settings["chat_template"] != marked.settings["chat_template"]


def test_packed_rows_give_a_hugging_face_model_what_each_row_gives_alone() -> None:
    """With `position_ids` and no attention mask, the model sees the rows of a line apart."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=256, **sizes)).double().eval()
    rows = made([CHAT, CHAT[:3], CHAT[1:3]], shift=False)
    sampler = fmsdata.EpochSampler(rows, global_batch=1, rank=0, world_size=1, drop_last=False)
    (batch,) = fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=1)
    assert batch["rows_per_line"].tolist() == [3]
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        if int(transformers.__version__.partition(".")[0]) < 5:  # earlier ones do so with flash attention only
            documents = batch["document_ids"]
            inside = (documents[:, :, None] == documents[:, None]).tril()
            inputs["attention_mask"] = torch.zeros(inside.shape).double().masked_fill(~inside, -torch.inf)[:, None]
        packed = model(**inputs, num_items_in_batch=batch["global_tokens"], use_cache=False)
        loss = 0.0
        for document, row in enumerate(batch["index"].tolist()):
            alone = model(
                input_ids=rows[row]["input_ids"][None],
                labels=rows[row]["labels"][None],
                num_items_in_batch=batch["global_tokens"],
            )
            torch.testing.assert_close(packed.logits[batch["document_ids"] == document], alone.logits[0])
            loss += float(alone.loss)
    assert float(packed.loss) == pytest.approx(loss)
