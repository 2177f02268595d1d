"""Signals and rules against hand computation, and languages against texts whose language is known."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.curation.language import detect, detect_conversations, language_shares, scripts
from cdr_lib.curation.signals import (
    GOPHER,
    RULES,
    SIGNALS,
    Rule,
    ends_sentence,
    first_failing,
    judge,
    link_spans,
    signals,
)


def talk(*texts: str, id: str = "c") -> Conversation:
    return Conversation(id, tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)))


def one(*texts: str) -> dict:
    return {name: column[0] for name, column in signals([talk(*texts)]).items()}


def test_CUR_09_blank_lines_and_empty_texts():
    texts = ["Hello there\n\n\n\nHow are you?\n\nBye", "buy now\nbuy now\nbuy now\nreal question?", "", "   \n "]
    assert [one(text)["dup_lines"] for text in texts] == [0.0, 0.5, 0.0, 0.0]
    found = signals([talk(text) for text in texts])
    assert all(np.isfinite(column).all() for column in found.values())
    assert judge(found).tolist()[2:] == ["empty", "empty"] and judge(found)[0] == ""


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r", "\u2028"])
def test_CUR_09_every_kind_of_line_end(line_end):
    text = line_end.join(["one two", "", "one two", "", "", "three"])
    found = one(text)
    assert found["dup_lines"] == np.float32(1 / 3) and found["dup_paragraphs"] == np.float32(1 / 3)


def test_CUR_11_url_characters_not_matches():
    text = "look https://a.example/x and (https://b.example/yy)."
    assert [text[a:b] for a, b in link_spans(text)] == ["https://a.example/x", "https://b.example/yy"]
    assert one(text)["url_ratio"] == 0.75 and one(text)["n_chars"] == 52
    assert one("")["url_ratio"] == 0.0


@pytest.mark.parametrize(
    "text, links",
    [
        ("See https://en.example/wiki/A_(b), please", ["https://en.example/wiki/A_(b)"]),
        ("[link](https://a.example/b)!", ["https://a.example/b"]),
        ("Www.a.example or WWW.B.EXAMPLE", ["Www.a.example", "WWW.B.EXAMPLE"]),
        ("<https://a.example/?q=1&r=2>", ["https://a.example/?q=1&r=2"]),
        ("www.a.example. And WWW is not", ["www.a.example"]),
        ("«https://a.example/x»…", ["https://a.example/x"]),
        ("看https://a.example/x。好", ["https://a.example/x"]),
        ("no :// link, nor http://", []),
        ("https://a.example/https://b.example", ["https://a.example/https://b.example"]),
    ],
)
def test_link_spans(text, links):
    assert [text[a:b] for a, b in link_spans(text)] == links


def test_CUR_13_sentence_ends_of_many_scripts():
    texts = [
        "你好。",
        "本当ですか？",
        "متى؟",
        "धन्यवाद।",
        'He said "yes."',
        "(really!)",
        "ok…",
        "hello",
        "see https://a.example/x",
        "first,",
    ]
    assert [ends_sentence(text) for text in texts] == [True] * 7 + [False] * 3
    assert [bool(one(text)["ends_sentence"]) for text in texts] == [True] * 7 + [False] * 3
    assert signals([talk("a;")], ends=";")["ends_sentence"][0] == 1
    # the share is over the turns that show something
    assert one("Yes.", " ", "no", "Fine!")["ends_sentence"] == np.float32(2 / 3)


def test_ratios_by_hand():
    found = one("Ab1, x€", "ÀB 22")  # 7 + 5 characters
    assert found["n_chars"] == 12 and found["n_words"] == 4 and found["n_turns"] == 2
    assert found["punctuation_ratio"] == np.float32(1 / 12) and found["symbol_ratio"] == np.float32(1 / 12)
    assert found["digit_ratio"] == np.float32(3 / 12)
    assert found["upper_ratio"] == np.float32(3 / 5)
    assert found["letter_ratio"] == np.float32(5 / 10)
    assert found["role_balance"] == 1 and found["user_share"] == np.float32(7 / 12)


def test_repeats_are_what_comes_after_the_first():
    # "go go go go": words 3-11 repeat the bigram, 8 of 11 characters
    assert one("go go go go")["top_2"] == np.float32(8 / 11)
    # the phrase of five words stands twice: its second copy is 9 of 25 characters
    assert one("a b c d e", "x y z", "a b c d e")["dup_5"] == np.float32(9 / 23)
    assert all(one("every word stands here only once")[f"top_{n}"] == 0 for n in (2, 3, 4))
    # two different bigrams repeat: the one that covers more counts
    assert one("aa bb", "c d", "aa bb", "c d")["top_2"] == np.float32(5 / 16)


@given(
    st.lists(st.lists(st.text(st.sampled_from("ab \n.1é你😊\u200b"), max_size=40), min_size=1, max_size=3), max_size=6)
)
@settings(max_examples=60, deadline=None)
def test_signals_are_shares_and_independent_of_company(texts):
    corpus = [talk(*turns, id=str(i)) for i, turns in enumerate(texts)]
    found = signals(corpus)
    assert tuple(found) == SIGNALS
    for name, column in found.items():
        assert len(column) == len(corpus) and np.isfinite(column).all() and (column >= 0).all()
        if not name.startswith("n_") and name != "word_length":
            assert (column <= 1).all(), name
        assert np.array_equal(column, signals(iter(corpus), batch_chars=5)[name]), name


def test_same_numbers_in_every_process():
    script = (
        "import hashlib; from cdr_lib.core.conversation import Conversation; from cdr_lib.curation.signals import signals;"
        "f = signals([Conversation.make(str(i), ('user', 'word ' * i + 'ü你' * i)) for i in range(50)]);"
        "print(hashlib.sha256(b''.join(c.tobytes() for c in f.values())).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1


@pytest.mark.parametrize(
    "text",
    [
        "a" * 1_000_000,
        "ha " * 333_333,
        "\n" * 1_000_000,
        "https://a.example/" + ")" * 999_000,
        "a://" * 250_000,
        "你" * 1_000_000,
        "www." * 250_000,
        "😊" * 1_000_000,
    ],
)
def test_a_turn_of_a_million_characters(text):
    start = time.perf_counter()
    found = signals([talk("hi"), talk(text), talk("bye")])
    assert time.perf_counter() - start < 20  # a busy machine; about half a second on a free one
    assert all(np.isfinite(column).all() for column in found.values())
    assert found["n_chars"].tolist() == [2, len(text), 3]


def test_rules():
    found = signals([talk("hello there"), talk("")])
    assert first_failing(found).tolist() == [-1, 0]
    assert judge(found, [Rule("n_words", most=1, reason="long")]).tolist() == ["long", ""]
    # a share at the limit is inside, although 0.2 is no float32
    assert judge({"url_ratio": np.array([0.2, 0.2001], np.float32)}, [Rule("url_ratio", most=0.2)]).tolist() == [
        "",
        "url_ratio",
    ]
    with pytest.raises(CdrError, match="known are"):
        Rule("nope", most=1)
    with pytest.raises(CdrError, match="missing"):
        judge({"n_words": np.zeros(1)}, [Rule("url_ratio", most=1)])
    assert {rule.signal for rule in (*RULES, *GOPHER)} <= set(SIGNALS)


@pytest.mark.parametrize(
    "text, code",
    [
        ("Could you tell me where the station is?", "en"),
        ("Können Sie mir sagen, wo der Bahnhof ist?", "de"),
        ("¿Me puede decir dónde está la estación?", "es"),
        ("Pouvez-vous me dire où est la gare ?", "fr"),
        ("Скажите, пожалуйста, где находится вокзал?", "ru"),
        ("請問車站在哪裡？", "zh"),
        ("駅はどこですか", "ja"),
        ("역이 어디예요?", "ko"),
        ("สถานีอยู่ที่ไหน", "th"),
        ("Πού είναι ο σταθμός;", "el"),
        ("أين تقع محطة القطار من فضلك؟", "ar"),
        ("क्या आप बता सकते हैं कि स्टेशन कहाँ है?", "hi"),
        ("ok", "und"),
        ("12:30, 4.50", "und"),
        ("", "und"),
        ("👍👍👍", "und"),
        ("https://en.example/all/these/words/are/english", "und"),
    ],
)
def test_language(text, code):
    codes, probabilities = detect([text])
    assert codes.tolist() == [code] and (probabilities[0] > 0) == (code != "und") and probabilities.dtype == np.float32


def test_a_guess_is_no_language():
    said = ["iPhone 15 Pro Max", 'print("hello world")', "asdfghjkl qwertyuiop zxcvb", "Where is my parcel, please?"]
    codes, probabilities = detect(said)
    assert codes.tolist() == ["und", "und", "und", "en"] and (probabilities[:3] == 0).all()
    assert detect(said[:1], least=0)[0][0] != "und"


def test_language_of_a_conversation():
    assert detect_conversations([talk("hi", "ok", "ja bitte, gern", "vielen Dank und auf Wiedersehen")])[
        0
    ].tolist() == ["de"]
    assert detect_conversations([])[0].tolist() == []
    both = language_shares(talk("Where can I find the train station?", "ok", "Wo finde ich denn den Bahnhof?"))
    assert set(both) == {"en", "de"} and both["en"] == 35 / 65
    assert detect_conversations([talk("word " * 200_000, "你好" * 100_000)])[0][0] in ("en", "zh")
    system = Conversation(
        "s", (Turn("system", "You are a very helpful assistant who answers in German."), Turn("user", "你好"))
    )
    assert detect_conversations([system])[0].tolist() == ["zh"]


def test_scripts():
    assert scripts("abc где") == {"Cyrillic": 0.5, "Latin": 0.5}
    assert scripts("123 !") == {} and scripts("한국어 日本") == {"Hangul": 0.6, "Han": 0.4}


@pytest.mark.real
def test_language_of_real_turns():
    from cdr_lib.core.config import corpora_dir

    folder = corpora_dir() and corpora_dir() / "xdailydialog" / "1k_part_data"
    if not folder or not folder.is_dir():
        pytest.skip("needs CDR_DATA with xdailydialog")
    for name, code in (("De", "de"), ("En", "en"), ("It", "it"), ("Zh", "zh")):
        lines = (folder / f"dialogues_text_{name}.txt").read_text(encoding="utf-8").splitlines()[:100]
        turns = [turn for line in lines for turn in line.split("__eou__") if turn.strip()]
        codes, _ = detect(turns)
        named = codes != "und"
        assert (codes[named] == code).mean() > 0.98 and named.mean() > 0.85


def test_what_a_tool_returned_is_not_looked_at():
    plain = talk("Where is my parcel?", "At the post office.")
    called = Conversation("t", (plain.turns[0], Turn("tool", "{}, " * 500), plain.turns[1]))
    one_, other = signals([plain]), signals([called])
    assert other.pop("n_turns")[0] == 3 and one_.pop("n_turns")[0] == 2
    assert all(np.array_equal(one_[name], other[name]) for name in one_)


def test_short_talk_is_kept_and_signs_are_not():
    found = signals(
        [
            talk("ok?", "yes!"),
            talk("hi", "hi!"),
            talk("Order 4711-0815", "ok"),
            talk("~~ <> 345.10 || :: 12"),
            talk("!!!", "???"),
        ]
    )
    assert judge(found).tolist() == ["", "", "", "few letters", "punctuation"]


def test_a_short_answer_or_a_brace_may_repeat_and_a_long_line_may_not():
    asked = ["Shall I look for a table?", "Is four people right?", "Any time after seven?", "Then I book it now, fine?"]
    answered = talk(*(turn for question in asked for turn in (question, "yes")))
    code = talk("\n".join(f"if (is_{word}(order)) {{\n    {word}_it();\n}}" for word in ("paid", "sent", "lost", "back")))
    spam = talk("buy the kettle now " + "\nbuy the kettle now" * 3, "no", "why", "ok", "bye", "stop", "end")
    found = signals([answered, code, spam])
    assert (found["dup_lines"] >= 0.25).all() and judge(found).tolist() == ["", "", "repeated lines"]
    assert judge(found, GOPHER)[0] == "repeated lines"


def test_a_generated_corpus_whose_faults_are_known():
    from cdr_lib.curation.dirty import dirty_corpus

    corpus = list(dirty_corpus(3000, seed=5))
    kinds, reasons = np.array([chat.labels["kind"] for chat in corpus]), judge(signals(corpus))
    assert set(reasons[kinds == "clean"]) == {""} and set(reasons[kinds == "pii"]) == {""}
    for kind, expected in (
        ("blank", {"empty"}),
        ("urls", {"urls"}),
        ("spam", {"urls"}),
        ("repeated", {"repeated lines"}),
    ):
        assert (kinds == kind).any() and set(reasons[kinds == kind]) == expected, kind
    assert (reasons[kinds == "symbols"] != "").all()
