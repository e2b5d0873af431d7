"""Perplexity per word and bits per byte of records that estimate how many words and bytes they scored."""

import math

import pytest
from report_runs import make_eval, make_train, report_settings

from infini.records import RunRecord
from infini.report.text_measures import bits_per_byte, counted, word_perplexity
from infini.report.text_report import Report


def with_sizes(run: RunRecord, share: float) -> RunRecord:
    """The run with words and bytes in its documents: counted (share 1), or as other shares of them."""
    for number, document in enumerate(run.documents):
        document["words"], document["bytes"] = (30 + number, 170 + number) if share == 1 else (31.25, 170.75)
    nll = math.fsum(document["nll"] for document in run.documents)
    words, size = (sum(document[key] for document in run.documents) for key in ("words", "bytes"))
    run.results["word_perplexity"] = {"value": math.exp(nll / words)}
    run.results["bits_per_byte"] = {"value": nll / math.log(2) / size}
    return run


def test_words_that_were_estimated_are_those_that_another_run_counted() -> None:
    """Two models with one loss on the same text have one perplexity per word, whenever they were evaluated."""
    new, old = with_sizes(make_eval("local", 1), 1), with_sizes(make_eval("infini_linear", 1, loss=4.0), 0.9)
    for document, other in zip(old.documents, new.documents, strict=True):
        document["nll"] = other["nll"]
    for measure, name in ((word_perplexity, "word_perplexity"), (bits_per_byte, "bits_per_byte")):
        assert measure(old, {}) == old.metric(name) != new.metric(name)
        assert measure(old, counted([new, old])) == pytest.approx(new.metric(name), rel=1e-12)
        assert measure(new, counted([new, old])) == new.metric(name)
    rendered = Report.from_config(report_settings()).render("laptop", [new, old])
    (measures,) = [table for table in rendered.tables if "other measures" in table.title]
    values = {row.model: [cell.text for cell in row.cells[1:]] for row in measures.rows}
    assert values["local"] == values["infini_linear"]


def test_a_model_that_nobody_trained_has_no_training_tokens() -> None:
    """They are none, not unknown."""
    runs = [make_train("local", 1), make_eval("local", 1), make_eval("infini_linear", 1, parent=None)]
    rendered = Report.from_config(report_settings() | {"untrained": ["infini_linear"]}).render("laptop", runs)
    (note,) = [note for note in rendered.notes if "training tokens" in note]
    assert "none for Infini-Transformer (Linear)" in note and "unknown" not in note


@pytest.mark.parametrize("change", ["tokens", "tokenizer"])
def test_counts_are_of_the_same_text_alone(change: str) -> None:
    new, old = with_sizes(make_eval("local", 1), 1), with_sizes(make_eval("infini_linear", 1), 0.9)
    if change == "tokens":
        new.documents[0]["tokens"] += 1
    else:
        new.data["tokenizer"] = "another"
    assert word_perplexity(old, counted([new])) == old.metric("word_perplexity")


def test_a_text_without_word_perplexity_gets_none() -> None:
    new, old = with_sizes(make_eval("local", 1), 1), with_sizes(make_eval("infini_linear", 1), 0.9)
    old.results["word_perplexity"]["value"] = None
    assert word_perplexity(old, counted([new])) is None
