"""Duplicates: exact, fuzzy and semantic, with text-dedup, datatrove, datasketch and semhash beside.

Run alone with `python tests/bench/bench_dedup.py [--quick]`, or with the others by `make bench`. The peers do not fit our
pins: they get an environment of their own, `.cache/bench-peers`, made on the first run. Without a package index their rows
say so. Everything is counted in CPU seconds of all processes, so that the rows are per core.
"""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEERS = ("datasketch==2.0.0", "datatrove[processing]==0.10.1", "spacy==3.8.18", "text-dedup==0.4.0", "semhash==0.5.0")
THRESHOLD, PERMUTATIONS, WORDS = 0.8, 128, 5
ONE_CORE = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")
}


def cpu_seconds() -> float:
    "User and system time of this process and of those that it has waited for."
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# What runs in the peers' environment: texts in, best-ranked first; which of them are kept, out.


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def peer_datasketch(texts: list[str]) -> list[int]:
    from datasketch import MinHash, MinHashLSH

    def shingles(text: str) -> list[bytes]:
        words = words_of(text)
        return [" ".join(words[i : i + WORDS]).encode() for i in range(max(1, len(words) - WORDS + 1))]

    index, kept = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS), []
    for number, sketch in enumerate(MinHash.generator(map(shingles, texts), num_perm=PERMUTATIONS)):
        if not index.query(sketch):
            index.insert(number, sketch, check_duplication=False)
            kept.append(number)
    return kept


def peer_text_dedup(texts: list[str]) -> list[int]:
    import datasets
    from text_dedup.minhash import main

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/texts.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text, "number": number}) + "\n" for number, text in enumerate(texts))
        main(
            [
                "--path",
                "json",
                "--data_files",
                f"{folder}/texts.jsonl",
                "--split",
                "train",
                "--cache_dir",
                f"{folder}/cache",
                "--output",
                f"{folder}/out",
                "--column",
                "text",
                "--ngram",
                str(WORDS),
                "--min_length",
                "1",
                "--num_perm",
                str(PERMUTATIONS),
                "--threshold",
                str(THRESHOLD),
                "--num_proc",
                "1",
            ],
            standalone_mode=False,
        )
        return datasets.load_from_disk(f"{folder}/out")["number"][:]


def peer_datatrove(texts: list[str]) -> list[int]:
    from datatrove.data import Document
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    def documents():
        return (Document(text=text, id=str(number)) for number, text in enumerate(texts))

    # Its bands are 8 values wide by default; 16 of them use up the permutations.
    config = MinhashConfig(n_grams=WORDS, num_buckets=PERMUTATIONS // 8, hashes_per_bucket=8)
    with tempfile.TemporaryDirectory() as folder:
        MinhashDedupSignature(f"{folder}/signatures", config).run(documents())
        for bucket in range(config.num_buckets):
            MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config).run(
                None, bucket, config.num_buckets
            )
        MinhashDedupCluster(f"{folder}/buckets", f"{folder}/removed", config=config).run(None, 0, 1)
        return [int(document.id) for document in MinhashDedupFilter(f"{folder}/removed").run(documents())]


def peer_semhash(vectors_path: str, threshold: float) -> list[int]:
    import numpy as np
    from semhash import SemHash

    vectors = np.load(vectors_path)
    # Vectors are given: none is computed in the search.
    found = SemHash.from_embeddings(vectors, [str(number) for number in range(len(vectors))], model=None)
    return [int(number) for number in found.self_deduplicate(threshold=threshold).selected]


def peer_main(name: str, given: str, answer: str) -> None:
    task = json.loads(Path(given).read_text(encoding="utf-8"))
    # Imports and the first use of a tokenizer are not counted.
    if name != "semhash":
        globals()[f"peer_{name}"](["one two three four five six seven", "something else"] * 2)
    start = cpu_seconds()
    kept = globals()[f"peer_{name}"](*task)
    Path(answer).write_text(json.dumps({"kept": list(kept), "seconds": cpu_seconds() - start}))


# What runs in ours.


def environment() -> Path:
    "The interpreter of the peers' environment, made if it is missing."
    from cdr_lib.core.config import cache_dir

    folder = cache_dir() / "bench-peers"
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    if not mark.is_file() or mark.read_text() != "\n".join(PEERS):
        print("making the environment of the peers ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PEERS], check=True)
        mark.write_text("\n".join(PEERS))
    return python


def ask(name: str, *task) -> dict:  # kept, seconds; or error
    "Let a peer do the work in its own environment."
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder, "given.json"), Path(folder, "answer.json")
        given.write_text(json.dumps(task), encoding="utf-8")
        try:
            ran = subprocess.run(
                [environment(), __file__, "--peer", name, given, answer],
                capture_output=True,
                text=True,
                env={**os.environ, **ONE_CORE, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
                timeout=3600,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": f"{name} could not be installed or run here: {type(error).__name__}"}
        if ran.returncode or not answer.is_file():
            return {"error": f"{name} failed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:150]}"}
        return json.loads(answer.read_text())


@contextlib.contextmanager
def one_thread():
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield


def corpus(n: int) -> list:
    from cdr_lib.curation.dirty import dirty_corpus

    return list(dirty_corpus(n))


def visible(chats: list) -> list:
    "Those that every peer can read: with something to see, in scripts with spaces between words."
    from cdr_lib.curation.settle import talk_text
    from cdr_lib.curation.exact import normal_text
    from cdr_lib.curation.fuzzy import _unspaced

    chats = [chat for chat in chats if normal_text(talk_text(chat))]
    unspaced = _unspaced([talk_text(chat) for chat in chats])
    return [chat for chat, skip in zip(chats, unspaced) if not skip]


def fuzzy_rows(n: int, quick: bool) -> list[dict]:
    import numpy as np

    from cdr_lib.curation.settle import talk_text
    from cdr_lib.curation.dirty import planted
    from cdr_lib.curation.fuzzy import FuzzyConfig, fuzzy_duplicates, score_kept, sketch
    from cdr_lib.curation.settle import preference

    chats = visible(corpus(n))
    texts = [talk_text(chat) for chat in chats]
    clusters = planted(chats, ("exact", "near"))
    order = np.argsort(preference([len(text) for text in texts], [chat.id for chat in chats]))
    texts, clusters = [texts[i] for i in order], clusters[order]
    config = FuzzyConfig(THRESHOLD, WORDS, permutations=PERMUTATIONS)
    start = cpu_seconds()
    sketches = sketch(texts, config)
    found = fuzzy_duplicates(sketches, np.arange(len(texts)), progress=False)
    ours = cpu_seconds() - start
    score = score_kept(found.kept, clusters)
    told = f"{len(texts) / ours:,.0f} conversations a second and core; precision {score['precision']:.4f}, recall {score['recall']:.4f}, F1 {score['f1']:.4f}"
    rows = []
    for name, target in (("text_dedup", 1.0), ("datatrove", 1.0), ("datasketch", 1.0)):
        answer = ask(name, texts)
        row = {
            "case": f"fuzzy, end to end, {len(texts):,} conversations, against {name.replace('_', '-')}",
            "ours_s": ours,
            "reference_s": None,
            "ratio": None,
            "target": target,
            "peak_mib": None,
            "f1": score["f1"],
            "checked": "against planted copies",
        }
        if "error" in answer:
            row["note"] = f"ours {told}; {answer['error']}"
        else:
            kept = np.isin(np.arange(len(texts)), answer["kept"])
            other = score_kept(kept, clusters)
            row |= {
                "reference_s": answer["seconds"],
                "ratio": answer["seconds"] / ours,
                "reference_f1": other["f1"],
                "note": f"ours {told}; {name.replace('_', '-')} {len(texts) / answer['seconds']:,.0f} a second, precision "
                f"{other['precision']:.4f}, recall {other['recall']:.4f}, F1 {other['f1']:.4f}",
            }
            assert quick or score["f1"] >= other["f1"], row["note"]
        rows.append(row)
    return rows


def growth_rows(sizes: tuple[int, ...], quick: bool) -> list[dict]:
    "How time grows with the corpus, and how fast exact keys are."
    import numpy as np

    from cdr_lib.curation.settle import talk_text
    from cdr_lib.curation.dirty import dirty_corpus
    from cdr_lib.curation.exact import exact_duplicates, exact_keys
    from cdr_lib.curation.fuzzy import FuzzyConfig, Sketches, fuzzy_duplicates, sketch
    from cdr_lib.curation.settle import preference

    config, parts, ids = FuzzyConfig(THRESHOLD, WORDS, permutations=PERMUTATIONS), [], []
    sketching, exact_s, keys, seconds = 0.0, 0.0, [], []
    for size in sizes:
        while len(ids) < size:
            chats = list(dirty_corpus(min(10_000, size - len(ids)), start=len(ids)))
            ids += [chat.id for chat in chats]
            texts = [talk_text(chat) for chat in chats]
            start = cpu_seconds()
            parts.append(sketch(texts, config))
            sketching += cpu_seconds() - start
            start = cpu_seconds()
            keys.append(exact_keys(chats))
            exact_s += cpu_seconds() - start
        sketches = Sketches.concat(parts)
        start = cpu_seconds()
        rank = preference(sketches.lengths, ids)
        found = fuzzy_duplicates(sketches, rank, progress=False)
        seconds.append(sketching + cpu_seconds() - start)
    start = cpu_seconds()
    exact = exact_duplicates(np.concatenate(keys), rank)
    exact_s += cpu_seconds() - start
    exponent = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = ", ".join(f"{size:,}: {used:.1f} s" for size, used in zip(sizes, seconds))
    n = sizes[-1]
    return [
        {
            "case": f"fuzzy, growth exponent from {sizes[0]:,} to {n:,} (at most 1.1)",
            "ours_s": seconds[-1],
            "reference_s": None,
            "ratio": 1.1 / exponent,
            "target": None if quick else 1.0,
            "peak_mib": peak,
            "exponent": exponent,
            "checked": f"{int((~found.kept).sum()):,} dropped",
            "note": f"exponent {exponent:.3f}; {told}; {n / seconds[-1]:,.0f} a second and core; the ratio is 1.1 to it",
        },
        {
            "case": f"exact, {n:,} conversations (at least 20,000 a second and core)",
            "ours_s": exact_s,
            "reference_s": n / 20_000,
            "ratio": n / 20_000 / exact_s,
            "target": None if quick else 1.0,
            "peak_mib": None,
            "checked": f"{int((~exact.kept).sum()):,} dropped",
            "note": f"{n / exact_s:,.0f} a second and core; the reference is the time at 20,000 a second",
        },
    ]


def semantic_rows(n: int, quick: bool) -> list[dict]:
    import numpy as np

    from cdr_lib.curation.semantic import neighbour_pairs, semantic_duplicates

    # Vectors like those of an encoder: groups of neighbours at all distances.
    rng, dim = np.random.default_rng(0), 384
    base = rng.normal(size=(n // 3, dim))
    vectors = np.repeat(base, 3, axis=0) + rng.normal(size=(n // 3 * 3, dim)) * rng.uniform(0.05, 0.9, (n // 3 * 3, 1))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    n, threshold = len(vectors), 0.8
    rank = np.arange(n)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/vectors.npy", vectors)
        answer = ask("semhash", f"{folder}/vectors.npy", threshold)
    exact = None
    for blocks in (None, "kmeans"):
        start = cpu_seconds()
        with one_thread():
            pairs = neighbour_pairs(vectors, threshold, blocks, progress=False)
        decided = semantic_duplicates(pairs, threshold, rank)
        ours = cpu_seconds() - start
        exact = exact or pairs
        share = len(pairs) / max(1, len(exact))
        row = {
            "case": f"semantic, {n:,} vectors at {threshold}, {'all pairs' if blocks is None else 'k-means blocks'}, against semhash",
            "ours_s": ours,
            "reference_s": None,
            "ratio": None,
            "target": None,
            "peak_mib": None,
            "pairs": len(pairs),
            "checked": f"{share:.4f} of the exact pairs",
        }
        told = f"ours finds {share:.1%} of the {len(exact):,} pairs, drops {int((~decided.kept).sum()):,}"
        if "error" in answer:
            row["note"] = f"{told}; {answer['error']}"
        else:
            kept = np.isin(np.arange(n), answer["kept"])
            # A kept vector with a better-ranked kept neighbour was missed.
            missed = int((kept[exact.left] & kept[exact.right]).sum())
            row |= {
                "reference_s": answer["seconds"],
                "ratio": answer["seconds"] / ours,
                "note": f"{told}; semhash (approximate) drops {int((~kept).sum()):,} and leaves {missed:,} pairs of kept neighbours, "
                f"ours {int((decided.kept[exact.left] & decided.kept[exact.right]).sum()):,}",
            }
        rows.append(row)
    return rows


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    rows = fuzzy_rows(1_000 if quick else 20_000, quick)
    rows += growth_rows((500, 1_000, 2_000) if quick else (10_000, 30_000, 100_000, 300_000), quick)
    return rows + semantic_rows(900 if quick else 30_000, quick)


if __name__ == "__main__":
    if "--peer" in sys.argv:
        peer_main(*sys.argv[sys.argv.index("--peer") + 1 :])
    else:
        began = time.perf_counter()
        for row in bench("--quick" in sys.argv):
            print(json.dumps(row))
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
