"""Personal data: every kind in its spellings, what must be left alone, placeholders, and reports that repeat nothing."""

import itertools
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.core.io import read_jsonl, write_jsonl
from cdr_lib.curation.pii import KINDS, TransformerNames, find_pii, pii_counts, pii_report, redact


def found(text: str, **options) -> list[tuple[str, str]]:
    return [(kind, text[start:stop]) for kind, start, stop in find_pii(text, **options)]


# Test numbers published by the card networks, example IBANs of the SWIFT registry, addresses reserved for documentation.
HELD = [
    (
        "email",
        "Write to <{}>, please.",
        [
            "a.b@c.example.co",
            "x+y@sub.example.org",
            "o'neil@example.ie",
            "иван@пример.рф",
            "UPPER@EXAMPLE.COM",
            "joe@xn--bcher-kva.example",
            "john(at)example.com",
            "jane [at] example [dot] com",
        ],
    ),
    ("email", "邮箱{}，谢谢", ["zhang@example.com"]),
    ("email", "이메일 {}으로", ["kim@example.com"]),
    (
        "phone",
        "You can call me: {}.",
        [
            "(212) 555-0123",
            "212-555-0123",
            "212.555.0123",
            "2125550123",
            "555-0123",
            "+44 20 7946 0958",
            "+49 (0)30 1234567",
            "0049 30 1234567",
            "030 12345678",
            "06.12.34.56.78",
            "+86 138 1234 5678",
        ],
    ),
    ("phone", "it is {} then", ["(555) 123-4567", "555-123-4567", "+33 6 12 34 56 78", "+1-800-555-0199 ext. 12"]),
    ("phone", "{}", ["2125550123"]),
    ("phone", "a stranger said no in Riga. {} is mine", ["(415) 555-0182"]),
    ("phone", "please note it as {}", ["650-390-9450"]),
    ("phone", "电话：{}", ["13812345678"]),
    (
        "card",
        "Charge {}, thanks",
        [
            "4111111111111111",
            "4111 1111 1111 1111",
            "4111-1111-1111-1111",
            "5555555555554444",
            "5105 1051 0510 5100",
            "378282246310005",
            "3782 822463 10005",
            "6011111111111117",
            "30569309025904",
            "3530111333300000",
            "2223003122003222",
        ],
    ),
    (
        "iban",
        "Pay to {}, please",
        [
            "DE89370400440532013000",
            "DE89 3704 0044 0532 0130 00",
            "GB29 NWBK 6016 1331 9268 19",
            "FR14 2004 1010 0505 0001 3M02 606",
            "gb29nwbk60161331926819",
            "NO9386011117947",
        ],
    ),
    (
        "ip",
        "It came from {}.",
        [
            "203.0.113.7",
            "192.168.1.1",
            "2001:db8::1",
            "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
            "fe80::1ff:fe23:4567:890a",
        ],
    ),
    (
        "key",
        "use {} today",
        [
            "sk-proj-abc123DEF456ghi789jkl",
            "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
            "github_pat_11ABCDEFG0abcdefghijklmnop",
            "AKIAIOSFODNN7EXAMPLE",
            "sk_live_4eC39HqLyjWDarjtT1",
            "xoxb-123456789012-abcdefghijkl",
            "AIzaSyA1234567890abcdefghijklmnopqrstuv",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.dozjgNryP4J3jVmNHl0w",
            "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\n-----END PRIVATE KEY-----",
        ],
    ),
    ("card", "name,card,until\nAna,{},12/25", ["4111111111111111", "4111 1111 1111 1111"]),
    ("card", "card no.{}", ["4111111111111111"]),
    ("ip", "the server {} is down", ["203.0.113.7"]),
    ("ip", "on my linux {} works", ["203.0.113.7"]),
    ("ip", "of node {}", ["10.1.2.3"]),
    ("ip", "mapped {}", ["::ffff:192.0.2.1"]),
    ("key", "Authorization: Bearer {}", ["abc123def456ghi789"]),
    ("key", "my password is {} now", ["hunter2"]),
    ("key", "密码：{}。", ["abc123456"]),
    ("key", "Mein Passwort ist {}", ["geheim99"]),
    ("key", "password: {}", ["hunter2!", "Tr0ub4dor&3"]),
]


@pytest.mark.parametrize(
    "kind, frame, value", [(kind, frame, value) for kind, frame, values in HELD for value in values]
)
def test_found_whole(kind, frame, value):
    assert found(frame.format(value)) == [(kind, value)]


CLEAR = [
    "Order 4711-0815-22 arrives 2024-05-01 at 10:30:45",
    "order number 2125550123",
    "parcels 2345-6789-12 and 2125-5501-23",
    "invoice #212-555-0123",
    "between 10/12/2024 and 11/12/2024",
    "2023-10-05 14:30:22",
    "$1,299.00 or 1.299,00 EUR or 199.99 - 249.99",
    "phone costs 199.99-249.99",
    "405.58 930.30 662.94",
    "no. 212-555-0123",
    "id: 212 555 0123",
    "call me on 2024-05-01",
    "pi is 3.141592653589793",
    "epoch 1700000000 passed",
    "8:00-17:00, 9-5",
    "ISBN 978-3-16-148410-0",
    "tracking 1Z999AA10123456784",
    "IMEI 356938035643809",
    "version 10.0.0.12",
    "v1.2.3.4",
    "Chrome/120.0.0.0",
    "1.2.3.4.5",
    "256.1.1.1",
    "loopback 127.0.0.1 and 0.0.0.0",
    "mask 255.255.255.0",
    "00:1A:2B:3C:4D:5E",
    "std::vector<int>",
    "dead::beef",
    "between 10::30 and 12::30",
    "10:20:30:40:50:60:70:80",
    "upgrade to 2.4.10.1",
    "updated from 2.4.10.1",
    "SQL Server 15.0.200.5",
    "§ 4.3.2.1",
    "4111 1111 1111 1112",
    "1234 5678 9012 3456",
    "0000 0000 0000 0000",
    "0.4111111111111111",
    "123e4567-e89b-12d3-a456-426614174000",
    "DE89 3704 0044 0532 0130 01",
    "XX89370400440532013000",
    "photo@2x.png",
    "@handle",
    "user@localhost",
    "name@domain..com",
    "look @ this. Now",
    "sk-learn-contrib-imbalanced",
    "risk-based-approach",
    "the bearer of bad news",
    "password: required",
    "token: [KEY_1]",
    "2 x 4 x 6 = 48",
    "git@github.com:org/repo.git",
    "my password is incorrect!",
    "the token is expired",
    "a PRIVATE KEY is secret",
    "1,000,000 and 2 000 000 people",
    "",
    " \n",
    "😊" * 30,
]


@pytest.mark.parametrize("text", CLEAR)
def test_left_alone(text):
    assert found(text) == [] and redact(text) == text


def test_overlap_covers_everything_that_was_found():
    # the digits of an IBAN may look like a phone number; login and host share characters
    assert found("tel DE89 3704 0044 0532 0130 00") == [("iban", "DE89 3704 0044 0532 0130 00")]
    assert found("https://me:s3cret@host.example/x") == [("key", "me:s3cret@host.example")]
    assert found("by ann.lee@example.com", names=lambda text: [(0, 6)]) == [("email", "by ann.lee@example.com")]


def test_kinds_and_region():
    text = "a@example.com, 030 1234567 from 203.0.113.7"
    assert found(text, kinds=["ip"]) == [("ip", "203.0.113.7")]
    assert ("phone", "030 1234567") in found(text, region="DE")
    assert found(text, region=None) == [("email", "a@example.com"), ("ip", "203.0.113.7")]
    with pytest.raises(CdrError, match="known are"):
        find_pii(text, kinds=["mail"])
    with pytest.raises(CdrError, match="names="):
        find_pii(text, kinds=["name"])


def talk(*texts: str, id="c", source="s", **fields) -> Conversation:
    return Conversation(id, tuple(Turn("user", text) for text in texts), source, **fields)


def test_placeholders_are_consistent_within_a_conversation():
    texts = ["I am a@example.com, +1 212 555 0123", "not b@example.com but A@Example.com", "call (212) 555-0123"]
    assert [turn.text for turn in redact(talk(*texts)).turns] == [
        "I am [EMAIL_1], [PHONE_1]",
        "not [EMAIL_2] but [EMAIL_1]",
        "call [PHONE_1]",
    ]


def test_placeholders_are_consistent_within_a_corpus():
    first, second = redact(talk("a@example.com"), key="k"), redact(talk("x", "b@example.com a@example.com"), key="k")
    assert second.turns[1].text.endswith(first.turns[0].text)
    assert redact("a@example.com", key="other") != first.turns[0].text
    assert "example" not in second.turns[1].text


def test_speaker_meta_and_labels_are_searched_and_the_rest_is_untouched(tmp_path):
    before = Conversation(
        "a@example.com",
        (Turn("tool", "4111 1111 1111 1111", "a@example.com", {"to": ["b@example.com", 7]}),),
        "s",
        {"n": 1, "host": {"ip": "203.0.113.7"}},
        {"summary": "pays with 4111111111111111"},
    )
    after = redact(before)
    assert after == Conversation(
        "a@example.com",
        (Turn("tool", "[CARD_1]", "[EMAIL_1]", {"to": ["[EMAIL_2]", 7]}),),
        "s",
        {"n": 1, "host": {"ip": "[IP_1]"}},
        {"summary": "pays with [CARD_1]"},
    )
    write_jsonl([after], tmp_path / "x.jsonl")
    assert list(read_jsonl(tmp_path / "x.jsonl")) == [after]
    clean = talk("nothing here")
    assert redact(clean) is clean


def test_existing_placeholders_are_not_taken_twice():
    assert redact("[EMAIL_1] and a@example.com") == "[EMAIL_1] and [EMAIL_2]"


@given(
    st.lists(
        st.sampled_from(
            [
                "a@example.com",
                "4111 1111 1111 1111",
                "203.0.113.7",
                "call 212-555-0123",
                "[EMAIL_1]",
                "你好",
                "sk-abcDEF1234567890abcdef",
                "DE89 3704 0044 0532 0130 00",
                "and",
                "12",
                "\n",
                "://",
            ]
        ),
        max_size=8,
    ),
    st.sampled_from([" ", ", ", "\n"]),
)
@settings(max_examples=80, deadline=None)
def test_redaction_is_complete_and_stable(parts, gap):
    text = gap.join(parts)
    once = redact(text)
    assert find_pii(once) == [] and redact(once) == once
    matches = find_pii(text)
    assert all(0 <= a < b <= len(text) for _, a, b in matches)
    assert all(left.stop <= right.start for left, right in itertools.pairwise(matches))


@given(st.text(st.sampled_from(string.printable + "é你🙂\u200b\u00a0٣"), max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text(text):
    assert find_pii(redact(text), kinds=["email", "card", "iban"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "@" * 300_000,
        "a@" * 300_000,
        "1" * 1_000_000,
        "password=" * 100_000,
        "eyJ-" * 200_000,
        "sk-" * 300_000,
        "-----BEGIN PRIVATE KEY-----" * 20_000,
        "://a:" * 100_000 + "@",
        "DE89" + "A1" * 300_000,
        "a[at]b" * 100_000,
        "a:" * 300_000,
        "1." * 300_000,
        "bearer:" * 100_000,
    ],
)
def test_no_text_makes_it_slow(text):
    start = time.perf_counter()
    find_pii(text)
    assert time.perf_counter() - start < 20  # at most a second or two on a free machine


def test_report_counts_without_repeating():
    corpus = [
        talk("a@example.com A@EXAMPLE.COM", id="1"),
        talk("a@example.com, 203.0.113.7", id="2"),
        talk("no", id="3"),
        talk("hi", id="4", source="t"),
    ]
    report = pii_report(iter(corpus))
    assert report.values.tolist() == [["s", "email", 3, 1, 2, 2 / 3], ["s", "ip", 1, 1, 1, 1 / 3]]
    assert "example" not in report.to_string().lower() and "203" not in report.to_string()
    assert pii_counts(corpus[1]) == {"email": 1, "ip": 1} and pii_counts(corpus[2]) == {}
    assert list(pii_report([]).columns) == ["source", "kind", "matches", "distinct", "conversations", "share"]
    assert set(report["kind"]) <= set(KINDS)


def test_a_model_for_names(tmp_path):
    """The mechanics with a tiny untrained model whose answer is forced: spans, joining, pieces of long texts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Ann", "Lee", "met", "Bob"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=512,
        id2label={0: "O", 1: "B-PER"},
        label2id={"O": 0, "B-PER": 1},
    )
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for table in (
            model.bert.embeddings.position_embeddings,
            model.bert.embeddings.token_type_embeddings,
            model.bert.embeddings.word_embeddings,
        ):
            table.weight.zero_()
        model.bert.embeddings.word_embeddings.weight[[4, 5, 7], 0] = 5
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
        model.classifier.weight[1, 0], model.classifier.weight[0, 0] = 5, -5
        model.classifier.bias[0] = 1
    model.save_pretrained(tmp_path)
    names = TransformerNames(str(tmp_path))
    assert found("Ann Lee met Bob. " * 100, names=names) == [("name", "Ann Lee"), ("name", "Bob")] * 100
    assert (
        redact("Ann Lee met Bob, ann lee", names=lambda text: [(0, 7), (12, 15), (17, 24)])
        == "[NAME_1] met [NAME_2], [NAME_1]"
    )


def test_a_generated_corpus_whose_data_is_known():
    from cdr_lib.curation.dirty import dirty_corpus

    checked = 0
    for chat in dirty_corpus(2000, seed=3):
        planted = [value for values in chat.labels.get("pii", {}).values() for value in values]
        shown = "\n".join(turn.text for turn in redact(chat).turns)
        assert not [value for value in planted if value in shown]
        checked += len(planted)
        if chat.labels["kind"] in ("clean", "short", "spam", "repeated"):
            assert not [match for turn in chat.turns for match in find_pii(turn.text)], chat.id
    assert checked > 50
