"""Catalogues, prices, normalisation, search, the Amazon construction, shoppers and the sample shops."""
import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError, data_dir
from cdr_lib.core.conversation import BadRecord
from cdr_lib.core.llm import LLM
from cdr_lib.d2d.amazon import (AMAZON_URL, amazon_files, item_of_row, read_amazon_items, read_amazon_reviews, row_of_item,
                                select_amazon, with_reviews)
from cdr_lib.d2d.catalog import (Catalog, Item, Price, normalise_name, normalise_value, numeric_value, parse_price,
                                 read_catalog, same_quantities, within_budget)
from cdr_lib.d2d.index import CatalogIndex, recall_curve, target_ranks
from cdr_lib.d2d.sample import DOMAINS, load_domain_set, sample_card, sample_folder, write_domain
from cdr_lib.d2d.shoppers import (Shopper, ShoppingSet, describe_by_llm, describe_by_rule, identifying, read_shopping_set,
                                  shoppers_for, shoppers_from, write_shopping_set)

from .fake_llm import FakeLLM

TEMPLATES = data_dir() / "templates" / "catalogs"


# prices

def test_D2D_02_prices_in_all_their_forms():
    written = ["$1,299.00", "$12.99 - $25.49", "from 8.49", None, "\u2014", "", "N/A", 19.99, "19.99", "\u20b91,499",
               "1.299,00 \u20ac", ".a-box-inner{background:#fff}", "NaN"]
    prices = [parse_price(value) for value in written]
    assert [[price.low, price.high] if price else None for price in prices] == [
        [1299.0, 1299.0], [12.99, 25.49], [8.49, None], None, None, None, None, [19.99, 19.99], [19.99, 19.99],
        [1499.0, 1499.0], [1299.0, 1299.0], None, None]
    assert [price.currency if price else None for price in prices] == [
        "USD", "USD", None, None, None, None, None, None, None, "INR", "EUR", None, None]
    assert [within_budget(price, 20) for price in prices] == [
        "no", "partly", "partly", None, None, None, None, "yes", "yes", "other currency", "other currency", None, None]
    assert prices[0].text == "$1,299.00" and prices[10].text == "1.299,00 \u20ac"


@pytest.mark.parametrize("text, low, high, currency", [
    ("&#36;5.00", 5, 5, "USD"), ("US $1,000", 1000, 1000, "USD"), ("CA$ 7.50", 7.5, 7.5, "CAD"), ("EUR 3,50", 3.5, 3.5, "EUR"),
    ("\u20ac1.499", 1499, 1499, "EUR"), ("1 299,90 kr", 1299.9, 1299.9, "kr"), ("\u00a312\u2013\u00a315", 12, 15, "GBP"),
    ("$5.00 to $9.00", 5, 9, "USD"), ("between $5 and $9", 5, 9, "USD"), ("Rs. 1,29,999", 129999, 129999, "INR"), ("$10+", 10, None, "USD"),
    ("<span>$4.99</span>", 4.99, 4.99, "USD"), ("19,- \u20ac", 19, 19, "EUR"), ("\uff04\uff11\uff12", 12, 12, "USD"), ("under $30", None, 30, "USD"),
    (np.float32(2.5), 2.5, 2.5, None), ("$0.99", 0.99, 0.99, "USD"), ("starting at $8", 8, None, "USD")])
def test_prices_that_can_be_read(text, low, high, currency):
    price = parse_price(text)
    assert (price.low, price.high, price.currency) == (low, high, currency)


@pytest.mark.parametrize("text", [
    "0", "$0.00", "-5", "$-5", "free", "2 for $5", "$5 off", "20%", "1e5", "inf", float("nan"), float("inf"), True, [], {}, b"5", "$25 - $12",
    "$1 - $2 - $3", "5 USD - 6 EUR", "$30 $20", "var(--x): 5px", "1.2.3", "12,3,4", "None", "   ", "call 555 1234 now for price x"])
def test_what_is_no_price_is_none_and_within_no_budget(text):
    assert parse_price(text) is None
    assert within_budget(parse_price(text), 1e9) is None


@pytest.mark.parametrize("text", ["$" + "9" * 400, "9" * 5000, "." * 100_000, "1 " * 50_000, "$" * 50_000])
def test_a_hostile_price_is_none_and_soon(text):
    assert parse_price(text) is None


def test_an_invisible_mark_does_not_hide_a_price():
    assert parse_price("\u200e$12.99").low == 12.99


def test_budgets():
    assert within_budget(Price(10, 30), 30) == "yes"
    assert within_budget(Price(10, 30), 9.99) == "no"
    assert within_budget(Price(None, 30), 20) == "partly"
    assert within_budget(Price(10, 10, "EUR"), 20, "EUR") == "yes"
    assert within_budget(Price(10, 10, "EUR"), 20) == "other currency"
    for wrong in (float("nan"), float("inf"), -1):
        with pytest.raises(CdrError):
            within_budget(Price(1, 1), wrong)
    with pytest.raises(CdrError):
        Price(2, 1)


@given(st.one_of(st.text(max_size=30), st.text("0123456789.,$\u20ac -fromt", max_size=14)))
@settings(max_examples=300, deadline=None)
def test_a_price_is_none_or_positive(text):
    price = parse_price(text)
    if price is not None:
        assert all(amount > 0 for amount in (price.low, price.high) if amount is not None) and price.text == text
        assert within_budget(price, 0, price.currency or "USD") != "yes"


# values

@pytest.mark.parametrize("same", [
    ["14 in", "14 inches", '14"', "14-inch", "14\u2033", "14 Inch"], ["1 TB", "1tb", "1 terabyte"], ["2 lbs", "2 pounds", "2 LB."],
    ["1,000 ml", "1000ml"], ["Grey", "gray", " GRAY "], ["True", "yes", "Y"], ["5 hours", "5 hrs", "5h"], ["16 Fl Oz", "16 fl. oz"]])
def test_values_that_are_one(same):
    assert len({normalise_value(value) for value in same}) == 1


def test_values_that_are_not_one():
    assert len({normalise_value(value) for value in ("14 in", "14", "14 cm", "15 in", "2-in-1", "2 in")}) == 6
    assert numeric_value("3 ft") == numeric_value("36 in")
    assert numeric_value("1 kg") == numeric_value("1000 g")
    assert numeric_value("10 x 20 in") is None and numeric_value("red") is None
    assert [normalise_name(name) for name in ("Item Weight", "item_weight", "ItemWeight", "Weight:")] == ["weight"] * 4


def test_a_leading_point_or_sign_belongs_to_the_number():
    assert normalise_value(".5 in") == normalise_value("0.5 inches") == "0.5 in"
    assert normalise_value(" . red.") == "red"
    assert numeric_value("-20 \u00b0c") == numeric_value("\u221220 \u00b0c") == (-20, "\u00b0c") and numeric_value("20 \u00b0c") == (20, "\u00b0c")


def test_hostile_values_end_in_text_or_nothing():
    for text in ("9" * 400 + " in", "9" * 5000 + "/2 in", "9" * 400, "1/0 in"):
        value = normalise_value(text)
        assert value and "inf" not in value and numeric_value(value) is None
    assert normalise_value("\u200b") == normalise_name("\u200b") == ""


@given(st.one_of(st.text(max_size=30), st.text("0123456789 .,/-'\"inchlbmgkx", max_size=12)))
@settings(max_examples=300, deadline=None)
def test_normalising_twice_changes_nothing(text):
    once = normalise_value(text)
    assert normalise_value(once) == once
    assert normalise_name(normalise_name(text)) == normalise_name(text)


def test_quantities_of_different_units_become_one_value():
    items = [Item(str(n), "x", {"capacity": value}) for n, value in enumerate(["1 l", "1000 ml", "1 l", "1 l glass", "35.56 cm", "14 in"])]
    assert [item.attributes["capacity"] for item in same_quantities(items)] == ["1 l", "1 l", "1 l", "1 l glass", "14 in", "14 in"]


# catalogues

def test_relevance_is_equation_7_by_hand():
    catalog = Catalog("c", [Item("a", "A", {"x": "1", "y": "1", "z": "1"}), Item("b", "B", {"x": "1", "y": "2"}),
                            Item("c", "C", {"w": "1"}), Item("d", "D", {})])
    assert catalog.relevance(0).tolist() == [1, 0.5, 0, 0]
    assert catalog.relevance(1).tolist() == [0.5, 1, 0, 0]
    assert catalog.relevance(3).tolist() == [0, 0, 0, 1]


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"), max_size=4), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_relevance_is_what_a_plain_loop_gives(rows):
    catalog = Catalog("c", [Item(str(n), "t", row) for n, row in enumerate(rows)])
    for i, one in enumerate(rows):
        for j, two in enumerate(rows):
            common = set(one) & set(two)
            rho = 1.0 if i == j else sum(one[k] == two[k] for k in common) / len(common) if common else 0.0
            assert catalog.relevance(i)[j] == pytest.approx(rho)


def test_odd_catalogues():
    bare = Catalog("bare", [Item("a", "A", {}), Item("b", "B", {})])
    assert bare.attributes == () and bare.codes.shape == (2, 0) and np.isnan(bare.statistics()["missing"].iloc[0])
    one = Catalog("one", [Item("a", "A", {"x": "1"})])
    assert np.isnan(one.nearest_relevance()).all() and one.relevance(0).tolist() == [1]
    same = Catalog("same", [Item(str(n), "A", {"x": "1"}) for n in range(5)])
    assert same.nearest_relevance().tolist() == [1] * 5
    assert "<img" not in Catalog("<img>", [Item("<img>", "<img>", {"<img>": "<img>"})])._repr_html_()
    with pytest.raises(ValueError):
        same.codes[0, 0] = 7


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "jsonl.gz", "parquet", "yaml"])
def test_every_format_gives_the_same_catalogue(tmp_path, suffix):
    rows = [{"sku": "1", "label": "Cup &amp; saucer", "colour": "Grey", "cost": "$4.50"}, {"sku": "2", "label": "Mug", "colour": "", "cost": "N/A"}]
    path = tmp_path / f"shop.{suffix}"
    if suffix in ("csv", "tsv"):
        pd.DataFrame(rows).to_csv(path, index=False, sep="\t" if suffix == "tsv" else ",")
    elif suffix == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif suffix.startswith("jsonl"):
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    else:
        path.write_text(json.dumps(rows))  # JSON is YAML
    catalog = read_catalog({"name": "shop", "file": path.name, "id": "sku", "title": "label", "price": "cost",
                            "attributes": {"Colour": "colour"}}, tmp_path)
    assert [(item.id, item.title, dict(item.attributes), item.price and item.price.low) for item in catalog.items] == [
        ("1", "Cup & saucer", {"color": "gray"}, 4.5), ("2", "Mug", {}, None)]


def test_nan_in_a_table_is_missing(tmp_path):
    path = tmp_path / "items.parquet"
    nan = float("nan")
    pq.write_table(pa.table({"id": ["a", "b"], "title": ["A", "B"], "stars": [4.5, nan], "n": [3.0, nan], "cost": [nan, 5.0]}), path)
    spec = {"name": "c", "file": path.name, "id": "id", "title": "title", "rating": "stars", "n_reviews": "n", "price": "cost"}
    catalog = read_catalog(spec, tmp_path)
    assert [(item.rating, item.n_reviews, item.price and item.price.low) for item in catalog.items] == [(4.5, 3, None), (None, 0, 5.0)]
    pq.write_table(pa.table({"id": ["a"], "title": [nan]}), path)
    with pytest.raises(CdrError, match="needs a title"):
        read_catalog({"name": "c", "file": path.name, "id": "id", "title": "title"}, tmp_path)


def test_a_wrong_description_of_a_catalogue_is_an_error(tmp_path):
    (tmp_path / "a.json").write_text('[{"id": 1, "name": "x", "n": 3}]')
    good = {"name": "a", "file": "a.json", "id": "id", "title": "name"}
    assert read_catalog(good, tmp_path).ids == ("1",)
    for change, word in [({"colour": "x"}, "unknown colour"), ({"file": "b.json"}, "no such file"), ({"title": None}, "lacks title"),
                         ({"items": "*.*"}, "not an object"), ({"items": "*.*.*"}, "neither a list"), ({"price": "prices"}, "no record"), ({"format": "xls"}, "format"),
                         ({"attributes_from": "name"}, "not an object"), ({"rating": "name"}, "not a number")]:
        with pytest.raises(CdrError, match=word):
            read_catalog({**good, **change}, tmp_path)
    (tmp_path / "a.csv").write_text("id,name\n1\n")
    with pytest.raises(CdrError, match="as many fields"):
        read_catalog({**good, "file": "a.csv"}, tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("name, items, attributes", [("tau_retail", 591, 66), ("retail_demo_store", 2465, 3)])
def test_real_catalogues(name, items, attributes):
    if not os.environ.get("CDR_DATA"):
        pytest.skip("CDR_DATA is not set")
    catalog = read_catalog(TEMPLATES / f"{name}.yaml")
    assert len(catalog) == items and len(catalog.attributes) >= attributes and not catalog.rejects
    assert all(item.price and item.price.currency == "USD" for item in catalog.items)
    shoppers = shoppers_for(catalog, 30)
    assert len(shoppers) == 30
    for shopper in shoppers.shoppers:
        assert not identifying([*shopper.description, shopper.query], shoppers.target(shopper), catalog)


# search

def test_search_orders_ties_by_row_and_counts_a_target_that_is_not_found():
    catalog = Catalog("c", [Item("a", "red cup", {}), Item("b", "red cup", {}), Item("c", "blue pan", {})])
    asks = [Shopper("1", "b", "red cup", ()), Shopper("2", "c", "red cup", ())]
    words = CatalogIndex(catalog, "bm25")
    assert words.search("red cup")[0].tolist() == [0, 1]
    assert target_ranks(words, asks).tolist() == [2, np.inf]
    assert recall_curve(words, asks, (1, 2, 99))["recall"].tolist() == [0, 0.5, 0.5]
    meaning = CatalogIndex(catalog, "hash")
    assert meaning.search("red cup", 2)[0].tolist() == [0, 1]
    with pytest.raises(CdrError, match="no item"):
        recall_curve(words, [Shopper("1", "z", "red", ())])


# Amazon Reviews 2023

def lines(path: Path, rows: list[dict]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_D2D_06_joins_and_texts(tmp_path, suffix):
    reviews = lines(tmp_path / f"r.jsonl{suffix}", [
        {"asin": "B1-RED", "parent_asin": "B1", "rating": 5.0, "text": "ok"}, {"asin": "B1-RED", "parent_asin": "B1", "rating": 5.0, "text": "ok"},
        {"asin": "B2", "parent_asin": "B2", "rating": 0.0, "text": "?"}])
    meta = lines(tmp_path / f"m.jsonl{suffix}", [
        {"parent_asin": "B1", "title": "Kettle &amp; Base", "description": [], "features": ["1.7 L"], "details": {"Brand": "X"}, "price": None}] * 2)
    counts: Counter = Counter()
    read = read_amazon_reviews(reviews, counts=counts)
    items = with_reviews(read_amazon_items(meta, counts=counts), read)
    assert [item.id for item in items] == ["B1"]
    assert sorted({review.item for review in read} - {item.id for item in items}) == ["B2"]
    assert items[0].n_reviews == 1 and items[0].rating == 5.0
    text = items[0].document()
    assert all(part in text for part in ("Kettle & Base", "1.7 L", "Brand", "X"))
    assert not any(part in text for part in ("[]", "None", "nan", "&amp;", "{"))
    assert counts["reviews with stars outside 1 to 5"] == 1 and read[-1].stars is None


@pytest.mark.parametrize("field, value", [("details", None), ("details", "{}"), ("details", '{"Brand": "X"}'), ("details", []), ("features", None),
                                          ("description", "None"), ("description", [None, "[]", ""]), ("price", "None"), ("price", {}),
                                          ("average_rating", None), ("rating_number", None), ("categories", None), ("store", float("nan"))])
def test_empty_fields_of_the_corpus_leave_no_trace(field, value):
    item = item_of_row({"parent_asin": "B", "title": "T", "details": {}, "features": [], "description": [], field: value})
    text = item.document()
    assert not any(part in text for part in ("[]", "None", "nan", "{"))
    assert item_of_row(row_of_item(item), curated=True) == item


def test_one_bad_row_of_metadata_does_not_end_the_reading(tmp_path):
    rows = [{"parent_asin": " B1 ", "title": "T", "average_rating": 0},
            {"parent_asin": "B2", "title": "\u200b"}, {"parent_asin": "\u200b", "title": "T"},
            {"parent_asin": "B3", "title": "T", "details": {"Color": "\u200b", "\u200b": "red"}},
            {"parent_asin": "B4", "title": "T", "price": "$" + "9" * 400, "details": {"Size": "9" * 5000 + "/2 in"},
             "categories": [["Home", "Kettles"]]}]
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts: Counter = Counter()
    items = read_amazon_items(path, counts=counts)
    assert [item.id for item in items] == ["B1", "B3", "B4"] and counts["metadata without id or title"] == 2
    assert [(item.rating, item.n_reviews, item.price) for item in items] == [(None, 0, None)] * 3
    assert items[1].attributes == {} and items[2].attributes["product type"] == "kettles"
    endless = item_of_row({"parent_asin": "B", "title": "T", "average_rating": float("inf"), "rating_number": float("inf")})
    assert endless.rating is None and endless.n_reviews == 0


def test_files_are_pinned_to_a_commit():
    assert "/resolve/2b6d039ed471f2ba5fd2acb718bf33b0a7e5598e/raw" in AMAZON_URL
    assert list(amazon_files("Electronics").values())[1].endswith("/raw/review_categories/Electronics.jsonl")


def test_a_sample_shop_goes_through_the_construction(tmp_path):
    write_domain("electronics", tmp_path, n_items=60, n_users=12)
    chosen = select_amazon(tmp_path / "meta.jsonl", tmp_path / "reviews.jsonl", "again", n_items=40, n_shoppers=8, progress=False)
    stars = {(review.user, review.item): review for review in chosen.reviews}
    assert 1 <= len(chosen.purchases) <= 8
    for purchase in chosen.purchases:
        assert purchase.target.stars > 3 and all(review.time < purchase.target.time for review in purchase.history)
        later = [review for review in stars.values() if review.user == purchase.user and review.time > purchase.target.time]
        assert all(review.stars <= 3 for review in later)
    made = shoppers_from(chosen)
    assert [shopper.target for shopper in made.shoppers] == [purchase.target.item for purchase in chosen.purchases]
    assert made == shoppers_from(chosen)


# shoppers

TOYS = Catalog("toys", [
    Item("b1", "Ostra Trail 750 bottle", {"brand": "ostra", "product type": "bottle", "material": "steel", "color": "red", "model number": "tx-750"},
         price=parse_price("$34.56")),
    Item("b2", "Kumo Flask", {"brand": "kumo", "product type": "bottle", "material": "steel", "color": "blue"}),
    Item("b3", "Kumo Cup", {"brand": "kumo", "product type": "bottle", "material": "glass", "color": "red"})])


@pytest.mark.parametrize("text, kinds", [
    ("an Ostra one", {"brand", "combination"}), ("it is the TX-750", {"model", "combination"}), ("Trail 750", {"title"}), ("costs $34.56", {"price"}),
    ("red, made of steel", {"combination"}), ("Ostra Trail 750 bottle", {"brand", "title", "combination"}), ("item b1", {"id"}),
    ("a bottle of steel", set()), ("something red", set()), ("around $35", set()), ("an ostrava souvenir", set())])
def test_what_gives_a_target_away(text, kinds):
    assert {leak.kind for leak in identifying([text], TOYS.items[0], TOYS)} == kinds


def test_spelling_of_the_catalogue_does_not_hide_a_leak():
    shop = Catalog("c", [Item("B01", "Boiler", {"Brand": "Ostra", "Color": "Red", "lid": "yes"}), Item("B02", "Pot", {"Color": "Red", "lid": "no"})])
    assert [leak.kind for leak in identifying(["an ostra, please"], shop.items[0], shop)] == ["brand", "combination"]
    assert identifying(["red"], shop.items[0], shop) == identifying(["red"], Item("B01", "Boiler", {"Brand": "N/A", "Color": "Red"}), shop) == []
    assert [leak.kind for leak in identifying(["red", "with a lid"], shop.items[0], shop)] == ["combination"]


@pytest.mark.parametrize("wrong", [{"description": None}, {"description": 5}, {"description": {"a": 1}}, {"history": None}, {"profile": 5}, {"scenario": None}])
def test_a_shopper_of_wrong_types_is_a_bad_record_with_its_line(tmp_path, wrong):
    row = {"id": "u", "target": "B", "query": "q", "description": ["d"]} | wrong
    lines(tmp_path / "meta.jsonl", [{"parent_asin": "B", "title": "T"}])
    lines(tmp_path / "shoppers.jsonl", [row])
    with pytest.raises(CdrError, match="shoppers.jsonl, line 1"):
        read_shopping_set(tmp_path)


def test_attributes_that_are_no_mapping_are_a_bad_record():
    for wrong in (None, ["color"], "color"):
        with pytest.raises(CdrError, match="mapping"):
            Item("a", "t", wrong)


def test_a_rule_never_gives_the_target_away():
    for item in TOYS.items:
        for seed in range(20):
            shopper = describe_by_rule("s", item, TOYS, seed=seed)
            assert not identifying([*shopper.description, shopper.query], item, TOYS)


def test_described_over_the_wire_and_told_what_leaked():
    seen = []

    def answer(request):
        text = request["messages"][-1]["content"]
        seen.append(text)
        told = "gave the product away" in text
        points = ["holds a drink", "made of steel" if told else "made by Ostra", "for walks"]
        return json.dumps({"profile": "New here.", "scenario": "A trip.", "description": points, "query": "something to drink from"})

    shop = ShoppingSet("toys", TOYS, (Shopper("anna", "b1", "q", ()),))
    with FakeLLM(answer) as server:
        llm = LLM("fake", base_url=server.base_url, retries=0)
        found = describe_by_llm(llm, shop, progress=False)
    assert not found.failures and found.shopping_set.shoppers[0].description[1] == "made of steel"
    assert len(seen) == 2 and "brand: ostra" in seen[1]


# the sample shops

@pytest.mark.parametrize("name", DOMAINS)
def test_sample_is_what_its_seed_gives(tmp_path, name):
    made = write_domain(name, tmp_path)
    for file in ("meta.jsonl", "reviews.jsonl", "shoppers.jsonl"):
        assert (tmp_path / file).read_bytes() == (sample_folder(name) / file).read_bytes(), file
    stored = load_domain_set(name)
    assert (made.catalog.items, made.shoppers, made.reviews) == (stored.catalog.items, stored.shoppers, stored.reviews)
    assert sum(file.stat().st_size for file in sample_folder(name).iterdir()) < 1.2e6
    assert len(stored.catalog) >= 500 and len(stored) >= 100
    reviews = Counter(review.user for review in stored.reviews)
    stars = {(review.user, review.item): review.stars for review in stored.reviews}
    for shopper in stored.shoppers:
        assert reviews[shopper.id] >= 4 and stars[shopper.id, shopper.target] > 3 and shopper.target not in shopper.history
        assert 3 <= len(shopper.description) <= 5
        assert not identifying([*shopper.description, shopper.query], stored.target(shopper), stored.catalog)


def test_sample_card_has_the_numbers():
    card = sample_card({name: load_domain_set(name) for name in DOMAINS})
    assert card == (data_dir() / "sample" / "d2d" / "README.md").read_text(encoding="utf-8")


def test_a_set_survives_the_disk(tmp_path):
    shop = ShoppingSet("toys", TOYS, (Shopper("anna", "b1", "q", ("p",), history=("b2",)),))
    write_shopping_set(shop, tmp_path, "# Toys\n")
    again = read_shopping_set(tmp_path, "toys")
    assert again.catalog.items == shop.catalog.items and again.shoppers == shop.shoppers
    with pytest.raises(BadRecord, match="line 2"):
        with open(tmp_path / "shoppers.jsonl", "a") as file:
            file.write("{broken\n")
        read_shopping_set(tmp_path)
