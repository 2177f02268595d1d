"""D2D: one decision against loops over pairs of items, and whole sessions of ten methods against the clock.

The reference decides the same, written as the equations read (`tests/d2d_reference.py`). The sessions run in one process,
with the scripted shopper, on a sample shop; the target is the time that two cores may take for all of them.
"""
import time

import numpy as np

from tests import d2d_reference

SESSIONS, LIMIT_S, DECISION_MS = 200, 60.0, 5.0
METHODS = ("d2d", "bm25", "dense", "dense-dialogue", "popularity", "always", "random-attribute", "no-ace", "no-apu", "no-toi")


def _states(n_items: int, n_attributes: int):
    "Sessions of the size of the paper's in the beginning, in the middle and near the end."
    from cdr_lib.d2d.catalog import Catalog, Item
    from cdr_lib.d2d.preferences import Preferences, Space, prefer

    rng = np.random.default_rng(0)
    kinds = rng.integers(2, 30, n_attributes)
    items = [Item(f"{row:04}", f"item {row}", {f"attribute {j:02}": f"value {rng.integers(kinds[j])}" for j in range(n_attributes)
                                               if rng.random() > 0.45}) for row in range(n_items)]
    space = Space.of(Catalog("made", items), range(n_items), np.sort(rng.random(n_items))[::-1])
    prefs, states = Preferences.start(space), []
    for answers in (0, 3, 5, 4):
        for j in rng.permutation(n_attributes)[:answers].tolist():
            prefs = prefer(space, prefs, j, liked=[int(rng.choice(list(space.pairs(j))))]).after_asking([j])
        states.append(prefs)
    return space, states


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from cdr_lib.core.store import Store
    from cdr_lib.d2d.assistants import make_assistants
    from cdr_lib.d2d.index import CatalogIndex
    from cdr_lib.d2d.policy import PolicyConfig, decide
    from cdr_lib.d2d.sample import load_domain_set
    from cdr_lib.d2d.simulate import simulate

    config = PolicyConfig()
    space, states = _states(*((60, 15) if quick else (200, 50)))
    decide(space, states[0], config)
    start = time.perf_counter()
    expected = [d2d_reference.decide(space, prefs, config) for prefs in states]
    loops = (time.perf_counter() - start) / len(states)
    times = []
    for _ in range(5 if quick else 50):
        for prefs in states:
            start = time.perf_counter()
            decide(space, prefs, config)
            times.append(time.perf_counter() - start)
    for prefs, (shown, asked, size) in zip(states, expected):
        decision = decide(space, prefs, config)
        found = decision.question
        assert decision.recommend == shown and decision.explanation["top_set"] == size
        assert (found and (found.kind, found.attributes, found.values, found.items)) == asked
    ours, worst = float(np.mean(times)), float(np.max(times))
    rows = [{"case": f"D2D, one decision: {len(space)} items, {len(space.attributes)} attributes", "ours_s": ours,
             "reference_s": loops, "ratio": loops / ours, "target": None if quick else 50.0,
             "checked": "equal decisions", "peak_mib": None,
             "note": f"{ours * 1000:.2f} ms, slowest {worst * 1000:.2f} ms (limit {DECISION_MS:g} ms); equal decisions in "
                     f"{len(states)} states; reference: loops over pairs of items"}]

    data = load_domain_set("electronics")
    names = METHODS[:3] if quick else METHODS
    n = 5 if quick else min(SESSIONS, len(data))
    trials = 1 if quick else -(-SESSIONS // n)  # the set has fewer shoppers: some come twice, in other words
    index = CatalogIndex(data.catalog, "minilm", store=Store())
    index.search(data.shoppers[0].query)  # loads the model
    assistants = make_assistants(names, data, index)
    start, cpu = time.perf_counter(), time.process_time()
    sessions = simulate(data.take(n), assistants, trials=trials, progress=False)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    count = n * trials
    errors = sum(record["stop"] == "error" for record in sessions.records)
    assert len(sessions.records) == count * len(names) and not errors
    scaled = wall * SESSIONS / count * (len(METHODS) / len(names))
    rows.append({"case": f"D2D, scripted sessions: {count} of each of {len(names)} methods", "ours_s": wall,
                 "reference_s": LIMIT_S,
                 "ratio": LIMIT_S / scaled, "target": None if quick else 1.0, "checked": "no errors", "peak_mib": None,
                 "note": f"{wall / count / len(names) * 1000:.1f} ms a session ({cpu / count / len(names) * 1000:.1f} ms CPU); "
                         f"{SESSIONS} of each of {len(METHODS)} take {scaled:.0f} s; reference: the limit of {LIMIT_S:g} s"})
    return rows


if __name__ == "__main__":
    import json
    import sys

    for line in bench("--quick" in sys.argv):
        print(json.dumps(line))
