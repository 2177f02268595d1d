"""Three granularities by late pooling, one pass over each conversation, against three passes over turns, windows and sessions.

The same encoder, the same batches on both sides; on 60 conversations of the project's sample and, where CDR_DATA names
it, 60 of the Schema-Guided Dialogue set (two minutes on two cores).
"""
from functools import partial

import numpy as np

from tests.bench.bench_encode import GRANULARITIES, corpora, interleaved

TARGET = 2.5


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    return [row for name, conversations in corpora(10 if quick else 60).items()
            for row in bench_corpus(name, conversations, 1 if quick else 2)]


def bench_corpus(name: str, conversations: list, rounds: int) -> list[dict]:
    import torch

    from cdr_lib.core.encoders import Encoder, embed, get_encoder
    from cdr_lib.retrieval.late import embed_late
    from cdr_lib.retrieval.segment import Units, segment

    def three_passes(encoder: Encoder, units: dict[str, Units]) -> dict[str, np.ndarray]:
        return {granularity: embed(encoder, part.texts, progress=False) for granularity, part in units.items()}

    units = {granularity: segment(conversations, granularity, k=3) for granularity in GRANULARITIES}
    counts = f"{name}: {len(conversations)} conversations, " + ", ".join(
        f"{len(part):,} {granularity}s" for granularity, part in units.items())
    rows = []
    for label, encoder, least in (
            ("fp32", get_encoder("minilm", device="cpu"), 0.99999),
            ("bf16 in OpenVINO", get_encoder("minilm", backend="openvino", dtype="bfloat16"), 0.998)):
        late = embed_late(encoder, units, progress=False)  # warms up, too
        plain = three_passes(encoder, units)
        # What fits the model has the same session vector on both sides, but for rounding.
        fits = np.array(encoder.token_lengths(units["session"].texts)) <= encoder.max_length
        cosine = float((late["session"] * plain["session"])[fits].sum(axis=1).min())
        assert cosine >= least, cosine
        best = interleaved({"late": partial(embed_late, encoder, units, progress=False),
                            "plain": partial(three_passes, encoder, units)}, rounds)
        rows.append({"case": f"{name}, three granularities by late pooling: {label}", "ours_s": best["late"],
                     "reference_s": best["plain"], "ratio": best["plain"] / best["late"], "target": TARGET,
                     "checked": f"session vectors of {fits.sum()} conversations that fit the model: cosine at least {cosine:.5f}",
                     "peak_mib": None,
                     "note": f"{counts}; reference: turns, windows and sessions one after the other, each distinct text once, "
                             f"with the same encoder; {torch.get_num_threads()} threads on both sides"})
    return rows
