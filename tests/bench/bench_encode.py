"""Three granularities embedded by one call, against three calls of SentenceTransformer.encode with its defaults.

On the project's sample and, where CDR_DATA names it, on the Schema-Guided Dialogue set.
"""
import time

import numpy as np

GRANULARITIES = ("turn", "window", "session")


def corpora(n: int) -> dict[str, list]:
    "`n` conversations of each corpus, drawn with a fixed seed."
    from cdr_lib.core.config import corpora_dir, data_dir
    from cdr_lib.core.layouts import read_cdr
    from cdr_lib.core.sources import load_source

    found = {"sample": list(read_cdr(data_dir() / "sample" / "cdr").conversations.values())}
    if corpora_dir() is not None and (corpora_dir() / "sgd").is_dir():
        found["SGD"] = list(load_source("sgd"))
    for name, conversations in found.items():
        order = np.random.default_rng(0).permutation(len(conversations))
        found[name] = [conversations[place] for place in sorted(order[:n])]
    return found


def interleaved(runs: dict, rounds: int) -> dict:
    "Shortest time of each run; the runs take turns, so that a busy moment of the machine hits all of them."
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    return [row for name, conversations in corpora(10 if quick else 100).items()
            for row in bench_corpus(name, conversations, 1 if quick else 2)]


def bench_corpus(name: str, conversations: list, rounds: int) -> list[dict]:
    import torch
    from sentence_transformers import SentenceTransformer

    from cdr_lib.core.encoders import embed, get_encoder
    from cdr_lib.core.models import packaged_minilm
    from cdr_lib.retrieval.segment import segment

    units = [segment(conversations, granularity, k=3).texts for granularity in GRANULARITIES]
    texts = [text for part in units for text in part]
    distinct = list(dict.fromkeys(texts))
    reference = SentenceTransformer(packaged_minilm(), device="cpu", local_files_only=True)
    encoders = {"fp32": get_encoder("minilm", device="cpu"),
                "bf16": get_encoder("minilm", device="cpu", dtype="bfloat16"),
                "openvino": get_encoder("minilm", backend="openvino", dtype="bfloat16")}

    def one_call(kind: str) -> np.ndarray:
        return embed(encoders[kind], texts, progress=False)

    def as_they_come() -> None:
        for start in range(0, len(distinct), 32):
            encoders["fp32"]._forward(distinct[start:start + 32], "document", 32)

    expected = np.concatenate([reference.encode(part, normalize_embeddings=True) for part in units])  # warms up, too
    cosines = {kind: float((one_call(kind) * expected).sum(axis=1).min()) for kind in encoders}
    assert min(cosines.values()) >= 0.999, cosines

    best = interleaved({"reference": lambda: [reference.encode(part) for part in units],
                        **{kind: lambda kind=kind: one_call(kind) for kind in encoders}}, rounds)
    parts = interleaved({"all": lambda: encoders["fp32"].encode(texts, progress=False),
                         "distinct": lambda: encoders["fp32"].encode(distinct, progress=False),
                         "unsorted": as_they_come}, 1)

    counts = f"{name}: {len(conversations)} conversations, " + ", ".join(
        f"{len(part):,} {granularity}s" for granularity, part in zip(GRANULARITIES, units))
    threads = f"{torch.get_num_threads()} threads on both sides"

    def row(case: str, ours: float, theirs: float, target: float | None, checked: str, note: str) -> dict:
        return {"case": case, "ours_s": ours, "reference_s": theirs, "ratio": theirs / ours, "target": target,
                "checked": checked, "peak_mib": None, "note": note}

    labels = {"fp32": ("fp32, one call", None), "bf16": ("bf16 in torch, one call", 1.8),
              "openvino": ("bf16 in OpenVINO, one call", 2.4)}
    rows = [row(f"{name}, three granularities: {label}", best[kind], best["reference"], target,
                f"cosine to theirs at least {cosines[kind]:.5f}",
                f"{counts}; reference: three calls in fp32; {threads}")
            for kind, (label, target) in labels.items()]
    rows.append(row(f"{name}, of which, in fp32: each distinct text once", parts["distinct"], parts["all"], None, "",
                    f"{len(texts):,} texts, {len(distinct):,} distinct; reference: the same with all texts"))
    rows.append(row(f"{name}, of which, in fp32: sorted by tokens, batches filled by tokens", parts["distinct"],
                    parts["unsorted"], None, "", "reference: the same texts as they come, 32 in a batch "
                    "(the library's own call sorts by characters)"))
    return rows
