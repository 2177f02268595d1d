"""The policy written as the equations read: loops over items, attributes and pairs, nothing shared with the library.

Only `asked` and `shown` numbers go in and a decision comes out, so that tests and the benchmark can compare it with
`cdr_lib.d2d.policy.decide`.
"""
import math


def scores(space, prefs, uncertainty="rss"):
    p, u = [], []
    for row in range(len(space)):
        total = spread = 0.0
        held = 0
        for pair in space.flat[row].tolist():
            if pair >= 0:
                total += float(prefs.p[pair])
                spread += float(prefs.u[pair]) if uncertainty == "sum" else float(prefs.u[pair]) ** 2
                held += 1
        weight = 1 + float(space.similarity[row])
        p.append(weight * total)
        if uncertainty == "rms":
            spread /= max(held, 1)
        u.append(weight * (spread if uncertainty == "sum" else math.sqrt(spread)))
    return p, u


def ranked(space, p, rows):
    return sorted(rows, key=lambda row: (-round(p[row], 9), -float(space.similarity[row]), row))


def top(p, u, rows, tau):
    if not rows:
        return []
    best, found = rows[0], []
    low, high = p[best] - u[best], p[best] + u[best]
    for row in rows:
        if high - low <= 1e-9:
            inside = p[row] - u[row] - 1e-9 <= p[best] <= p[row] + u[row] + 1e-9
        else:
            common = min(high, p[row] + u[row]) - max(low, p[row] - u[row])
            inside = common >= -1e-9 and common / (high - low) >= tau - 1e-9
        if inside:
            found.append(row)
    return found


def worth(space, prefs, rows, config):
    found = []
    for j in range(len(space.attributes)):
        held = [(place, pair) for place, row in enumerate(rows, 1) if (pair := int(space.flat[row, j])) >= 0]
        mass = {}
        for place, pair in held:
            mass[pair] = mass.get(pair, 0.0) + 1 / math.log2(1 + place)
        total = sum(mass.values())
        entropy = -sum(part / total * math.log(part / total) for part in mass.values())
        kinds = len(mass) if config.ace_scale == "values" else len(rows)
        ace = entropy / math.log(kinds) if len(mass) > 1 else 0.0
        delta = 0.0
        for a in range(len(held)):
            for b in range(a):
                first, second = held[a][1], held[b][1]
                if config.delta_pairs == "different" and first == second:
                    continue
                us = [float(prefs.u[pair]) if config.apu else 1.0 for pair in (first, second)]
                ps = [float(prefs.p[pair]) for pair in (first, second)]
                delta += max(0.0, min(ps[0] + us[0], ps[1] + us[1]) - max(ps[0] - us[0], ps[1] - us[1]))
        found.append((ace, delta))
    return found


def known(space, prefs, j):
    return any(float(prefs.p[pair]) - float(prefs.u[pair]) > 1e-9 for pair in space.pairs(j))


def question(space, prefs, rows, config):
    closed = {j for j in range(len(space.attributes))
              if j in prefs.asked or config.apu and not config.ask_known and known(space, prefs, j)}
    values = [(0.0 if j in closed else ace * delta if config.ace else delta, j)
              for j, (ace, delta) in enumerate(worth(space, prefs, rows, config))]
    order = sorted((pair for pair in values if pair[0] > 1e-9), key=lambda pair: (-round(math.log(pair[0]), 9), pair[1]))
    if not order:
        return None
    best = order[0][1]
    counts = {}
    for row in rows:
        pair = int(space.flat[row, best])
        if pair >= 0:
            counts[pair] = counts.get(pair, 0) + 1
    if 1 < len(counts) <= config.named_values:
        return "values", (best,), tuple(sorted(counts, key=lambda pair: (-counts[pair], pair))), ()
    return "attribute", tuple(j for _, j in order[:config.attributes_per_question]), (), ()


def compare(space, prefs, rows, config):
    for a, first in enumerate(rows):
        for second in rows[a + 1:]:
            counted, open_, differing = 0, False, []
            for j in range(len(space.attributes)):
                one, other = int(space.flat[first, j]), int(space.flat[second, j])
                if one != other:
                    differing.append(j)
                    open_ = open_ or j not in prefs.asked
                    counted += config.difference == "values" or (one < 0) != (other < 0)
            if open_ and counted <= config.item_differences:
                return "items", tuple(differing), (), (first, second)
    return None


def decide(space, prefs, config):
    """(recommended rows, question as (kind, attributes, values, items) or None, size of the top set)."""
    p, u = scores(space, prefs, config.uncertainty)
    out = (set(prefs.shown) if config.exclude_shown else set()) | set(prefs.out)
    race = ranked(space, p, [row for row in range(len(space)) if row not in out])
    tops = top(p, u, race, config.tau)

    def show():
        best = tops[:config.m]
        return tuple(best + [row for row in race if row not in best][:config.m - len(best)] if config.fill else best)

    recommend = len(tops) <= config.m if config.timing == "overlap" else True
    shown = show() if recommend else ()
    asked = None
    if not recommend and config.item_questions and config.m < len(tops) <= 2 * config.m:
        asked = compare(space, prefs, tops, config)
    if asked is None and (not recommend or config.ask_with_recommendation):
        field = race
        if recommend and config.scope == "remaining" and config.exclude_shown:
            field = [row for row in race if row not in shown]
        about = tops if not (recommend and config.scope == "remaining") else top(p, u, field, config.tau)
        asked = question(space, prefs, about, config)
        if asked is None:
            asked = question(space, prefs, field, config)
    if not recommend and asked is None and race:
        shown = show()
    return shown, asked, len(tops)
