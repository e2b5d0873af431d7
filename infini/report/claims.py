"""Measures the paper's claims on published runs. `conf/report/claims.yaml` and `own_claims` of the other reports list
them, `verdicts.judge` judges them.

A claim about the passkey task is measured on rows whose training inputs are at most as long as the paper's. A row with
length extension is judged only where the claim says so.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, get_args

import numpy as np

from infini.config.lengths import format_length, parse_depths, parse_lengths
from infini.config.schema import groups, settings_in
from infini.config.typed import build
from infini.errors import InputError, did_you_mean, one_of, require
from infini.report.book_scores import difference_of_scores, slope_weights, tokens_read
from infini.report.footprint import ENTRIES_65K, PAPER, TABLE1, printed
from infini.report.intervals import Estimate, effective_trials, proportion_p
from infini.report.kind import FINISHED_RUNS, OwnVerb, ReportKind
from infini.report.passkey import PasskeyReport, chosen_cells, percent
from infini.report.selection import RunReport, Selection
from infini.report.stats import Effect, paired_difference
from infini.report.summaries import SummaryReport
from infini.report.tables import MISSING, Cell, RenderedReport, Row, Table, counted, in_words
from infini.report.text_measures import equal_tokens
from infini.report.text_report import Report
from infini.report.verdicts import Claim, Measured, PValues, Verdict, judge

SPECIALISED, MIXER, MOVED = (0.1, 0.9), (0.4, 0.6), 0.01
"""Gates outside the first interval are specialised. Gates within the second are mixers if they differ from 0.5 by more
than the third number."""
MORE_SEEDS, MORE_DOCUMENTS, MORE_PROMPTS = (4, 5, 6, 8, 10, 15, 20), (2, 4, 8, 16), (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Numbers of seeds, and multiples of documents and prompts, that are tried to find what would decide a claim."""
WITHOUT_RUNS = "By arithmetic, or not testable"
"""Title of the claims that no report's runs are judged for."""


@dataclass(frozen=True)
class Fixed:
    """The time at which the tests of some claims were fixed, as `conf/report/claims.yaml` declares it."""

    claims: str
    date: str
    """Year-month-day, or several."""
    runs: str
    """Whether that was before or after the runs that judge the claims."""


@dataclass(frozen=True)
class ClaimsReport(ReportKind):
    """The report of the claims, as `conf/report/claims.yaml` and `own_claims` of the other reports declare it."""

    sign = "claims"
    shows_own_runs = False
    verbs: ClassVar[Mapping[str, OwnVerb]] = {"table": OwnVerb(FINISHED_RUNS, module="infini.runs.claims")}

    claims: tuple[Claim, ...]
    fixed: tuple[Fixed, ...] = ()

    @property
    def reports(self) -> list[str]:
        """Names of the reports whose runs are judged."""
        return list(dict.fromkeys(claim.report for claim in self.claims if claim.report))

    def about(self, report: str) -> ClaimsReport:
        """The claims about a report alone. Their verdicts are the same: a family has the claims of one report."""
        return replace(self, claims=tuple(claim for claim in self.claims if claim.report == report))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ClaimsReport:
        """The claims that it lists, then those that the YAMLs of other reports declare."""
        own = [
            {"report": name, **claim}
            for name in groups()["report"]
            for claim in settings_in("report", name).get("own_claims", ())
        ]
        listed = config["claims"]
        return build(cls, {**config, "claims": [*listed, *own] if isinstance(listed, list) else listed}, "report")

    def __post_init__(self) -> None:
        if twice := [name for name, count in Counter(claim.name for claim in self.claims).items() if count > 1]:
            raise InputError(f"report.claims: two claims are called {twice[0]!r}")
        for claim in self.claims:
            allowed = f"must be one of {', '.join(MEASURES)}{did_you_mean(claim.measure, MEASURES)}"
            require(claim.measure in MEASURES, f"report.claims.{claim.name}.measure", claim.measure, allowed)
            MEASURES[claim.measure].check(claim)


@dataclass(frozen=True)
class Evidence:
    """A report and its published runs by task."""

    report: RunReport
    by_task: Mapping[str, Selection]

    def check(self, claim: Claim) -> None:
        """Raise InputError if the claim's measure is not for this report, or the report has no such task or row."""
        key, titles, needs = f"report.claims.{claim.name}", self.report.titles, MEASURES[claim.measure].needs
        assert needs is not None
        fits = isinstance(self.report, needs[0])
        require(fits, f"{key}.report", claim.report, f"measure={claim.measure} {needs[1]}")
        if isinstance(self.report, SummaryReport) and claim.measure != "gates":
            lengths, asked = parse_lengths(self.report.input_lengths), claim.options.get("length")
            if asked is not None:
                one_of(f"{key}.options.length", asked, [format_length(length) for length in lengths])
            several = len(lengths) > 1 and asked is None
            allowed = "overall is for one input length (of several, options.length), overall_by_length for several"
            require(several == (claim.measure == "overall_by_length"), f"{key}.measure", claim.measure, allowed)
        # Gates are judged together for all tasks, unless the claim names one.
        if claim.task not in self.by_task and (claim.task or claim.measure != "gates"):
            raise InputError(f"{key}.task={claim.task!r}: must be one of {', '.join(self.by_task)}")
        paper_of = claim.options.get("paper_of")
        named = [("rows", claim.rows), ("options.less", claim.options.get("less", ()))]
        for at, rows in [*named, ("options.paper_of", () if paper_of is None else (paper_of,))]:
            for row in rows:
                if row not in titles:
                    has = f"it has {', '.join(titles)}{did_you_mean(row, titles)}"
                    raise InputError(f"{key}.{at}: {claim.report} has no row {row!r}; {has}")
        if claim.measure == "token_accuracy" and isinstance(self.report, PasskeyReport):
            in_paper = [name for name, row in self.report.rows.items() if row.paper]
            allowed = f"the paper prints nothing for it; set options.paper_of to one of {', '.join(in_paper)}"
            require((paper_of or claim.rows[0]) in in_paper, f"{key}.rows", claim.rows[0], allowed)

    def of(self, claim: Claim) -> Selection:
        """The runs of a claim's task."""
        return self.by_task[claim.task]


def build_claims(report: ClaimsReport, scale: str, evidence: Mapping[str, Evidence]) -> RenderedReport:
    """Every claim with its test, the measurement, the verdict, and what would decide it; then when these tests were
    fixed. evidence: by report name."""
    for claim in report.claims:
        if MEASURES[claim.measure].needs:
            evidence[claim.report].check(claim)
    measured = [
        (claim, MEASURES[claim.measure].measure(claim, evidence[claim.report] if claim.report else None))
        for claim in report.claims
    ]
    rows: dict[str, list[Row]] = {}
    for (claim, _), found in zip(measured, judge(measured), strict=True):
        cell = MISSING
        if found.run_ids:
            cell = Cell(found.measured, "measured", run_ids=found.run_ids, source="published")
        elif found.measured:
            cell = Cell(found.measured, "computed")
        titles = evidence[claim.report].report.titles if claim.report else {}
        test = "; ".join(filter(None, (MEASURES[claim.measure].test(claim, titles), claim.test)))
        cells = (
            Cell(claim.place, "quoted", source="paper"),
            Cell(test, "computed"),
            cell,
            Cell(found.verdict, "computed"),
            Cell(found.to_decide, "computed") if found.to_decide else MISSING,
        )
        about = evidence[claim.report].report.title if claim.report else WITHOUT_RUNS
        rows.setdefault(about, []).append(Row(claim.name, claim.says, cells))
    columns = ("Where", "Test", "Measured", "Verdict", "To decide")
    tables = [
        Table(
            f"{about}: {_totals(group, named=False)}",
            columns,
            tuple(group),
            "Claim",
            short_columns=("Where", "Verdict"),
            is_prose=True,
        )
        for about, group in rows.items()
    ]
    if report.fixed:
        tables.append(_when_fixed(report.fixed))
    return report.rendered(scale, tables, (), totals=_totals([row for group in rows.values() for row in group]))


def _when_fixed(fixed: Sequence[Fixed]) -> Table:
    rows = tuple(
        Row(str(index), entry.claims, (Cell(entry.date, "computed"), Cell(entry.runs, "computed")))
        for index, entry in enumerate(fixed)
    )
    columns = ("Fixed on", "Before or after its runs")
    return Table("When measures, margins and rules were fixed", columns, rows, "Claims", is_prose=True)


def _totals(rows: Sequence[Row], named: bool = True) -> str:
    """The claims and their verdicts, counted. named: verdicts that no claim has are named, too."""
    verdicts = Counter(row.cells[3].text for row in rows)
    found = ", ".join(f"{name} {verdicts[name]}" for name in get_args(Verdict) if named or verdicts[name])
    return f"{counted(len(rows), 'claim')}: {found}"


def _of_estimates(claim: Claim, estimates: Sequence[Estimate], what: str) -> dict[str, Any]:
    """The parts of a claim that means lie below or above the margin: now, with more seeds, then with more documents."""

    def parts(found: Sequence[Estimate]) -> tuple[PValues, ...]:
        ordered = (estimate.p_values(claim.margin) for estimate in found)
        return tuple((above, below) if claim.direction == "above" else (below, above) for above, below in ordered)

    def later(n_seeds: int, n_documents: int) -> tuple[PValues, ...]:
        return parts([estimate.with_more(n_seeds, n_documents) for estimate in estimates])

    seeds, documents = estimates[0].n_seeds, estimates[0].n_documents
    steps = [(n, k) for k in (1, *MORE_DOCUMENTS) for n in MORE_SEEDS if n > seeds]
    named = {(n, k): f"{n} seeds" + f" and {k * documents} {what}" * (k > 1) for n, k in steps}
    more = [(name, partial(later, n, k * documents)) for (n, k), name in named.items()]
    return {"parts": parts(estimates), "with_more": more}


def _missing_seeds(claim: Claim, n_seeds: int) -> str:
    return "" if n_seeds >= claim.seeds else in_words(claim.seeds - n_seeds, "more seed")


def _described(estimate: Estimate, unit: str, form: str, documents: str) -> str:
    low, high = estimate.interval
    alone = ", which says nothing about others" * (estimate.n_seeds == 1)
    counts = f"{documents}; {counted(estimate.n_seeds, 'seed')}{alone}"
    return f"{estimate.mean:+{form}} [{low:+{form}}, {high:+{form}}] {unit} ({counts})"


def _loss(claim: Claim, evidence: Evidence | None) -> Measured:
    """Loss of the first row minus the loss of each other, nats a token."""
    assert evidence is not None
    selection, titles = evidence.of(claim), evidence.report.titles
    first, *others = claim.rows
    found = {other: _difference(claim, selection, titles, first, other) for other in others}
    effects = {other: effect for other, effect in found.items() if isinstance(effect, Effect)}
    problems = [problem for problem in found.values() if isinstance(problem, Measured)]
    if not effects:
        return problems[0]
    nearest = max(effects, key=lambda row: effects[row].mean * (1 if claim.direction == "below" else -1))
    closest = effects[nearest]
    documents = f"{closest.n_documents} documents, effective number {closest.effective_documents:.1f}"
    text = _described(closest, "nats a token", ".4f", documents)
    if len(others) > 1:
        seeds = f"with {in_words(claim.seeds, 'seed')}"
        among = f"the nearest of {len(others)} rows"
        if problems:
            among = f"the nearest of {len(effects)} rows {seeds}, of {len(others)}"
        if len(effects) == 1:
            among = f"the only one of {len(others)} rows {seeds}"
        text = f'against "{titles[nearest]}", {among}: {text}'
    measured = _of_estimates(claim, list(effects.values()), "documents")
    if problems:
        # A missing row may be the better one. It counts among the rows any of which could decide against the claim.
        measured["parts"] += ((1.0, 1.0),) * len(problems)
        measured["to_decide"] = f"{in_words(len(problems), 'more row')} with {in_words(claim.seeds, 'seed')}"
    run_ids = dict.fromkeys(run_id for effect in effects.values() for run_id in effect.run_ids)
    return Measured(text, tuple(run_ids), **measured)


def _difference(claim: Claim, selection: Selection, titles: Mapping[str, str], a: str, b: str) -> Effect | Measured:
    """Loss of row a minus that of row b, or what is missing."""
    rows = [a, b, *claim.options.get("less", ())]
    if other := _not_as_declared(rows, selection, titles):
        return other
    pair = [selection.runs.get(row, []) for row in rows]
    of_which = "both models" if len(pair) == 2 else f"all {in_words(len(pair), 'model')}"
    without_seeds = Measured(missing=f"{in_words(claim.seeds, 'seed')} of {of_which}")
    if not all(pair):
        return without_seeds
    try:
        effect = paired_difference(*pair)
    except InputError as error:
        return Measured(str(error), missing="evaluations on the same documents")
    if effect is None:
        return without_seeds
    text = _described(effect, "nats a token", ".4f", counted(effect.n_documents, "document"))
    if effect.n_documents < claim.documents:
        return Measured(text, effect.run_ids, missing=f"{claim.documents} documents")
    if not (claim.unequal_tokens or equal_tokens(selection, pair)):
        return Measured("trained on different numbers of tokens", effect.run_ids, missing="equal training tokens")
    if missing := _missing_seeds(claim, effect.n_seeds):
        return Measured(text, effect.run_ids, missing=missing)
    return effect


def _not_as_declared(rows: Sequence[str], selection: Selection, titles: Mapping[str, str]) -> Measured | None:
    """The first row whose runs differ from what it declares, and how."""
    for row in rows:
        if row in selection.mismatches:
            how = selection.mismatches[row][0]
            return Measured(f'"{titles[row]}" is not as declared: {how}', missing=f'"{titles[row]}" as declared')
    return None


def _test_of_loss(claim: Claim, titles: Mapping[str, str]) -> str:
    margin = f"{claim.margin:g} nats a token" if claim.margin else "0"
    each = ", for each of the other rows" if len(claim.rows) > 2 else ""
    first, *others = (f'"{titles[row]}"' for row in claim.rows)
    difference = f"loss of {first} minus that of {' / '.join(others)}"
    if claim.options.get("less"):
        difference += f", minus the change that {claim.options['control']} shows,"
    return f"{difference} is {claim.direction} {margin}{each}"


def _overall(claim: Claim, evidence: Evidence | None) -> Measured:
    """Overall of the first row minus that of the second, points; or the slope of a row's Overall over the logarithm of
    the tokens that are read, points a doubling. Clustered by book and seed."""
    assert evidence is not None and isinstance(evidence.report, SummaryReport)
    selection = evidence.of(claim)
    asked = claim.options.get("length")
    lengths = parse_lengths([asked] if asked else evidence.report.input_lengths)
    wanted = [(row, length) for row in claim.rows for length in lengths]
    by_length = claim.measure == "overall_by_length"
    if other := _not_as_declared(claim.rows, selection, evidence.report.titles):
        return other
    if by_length:
        read = [tokens_read(selection.runs.get(claim.rows[0], ()), length) for length in lengths]
        weights, unit = slope_weights(read), "points a doubling"
    else:
        weights, unit = np.array([1.0, -1.0]), "points"
    found = difference_of_scores(selection, wanted, weights)
    if found is None:
        each = "at every length" if by_length else "of both models"
        return Measured(missing=f"{in_words(claim.seeds, 'seed')} {each}, with an Overall above 0")
    estimate, used = found
    text = _described(estimate, unit, ".2f", counted(estimate.n_documents, "book"))
    if estimate.n_documents < claim.documents:
        return Measured(text, used, missing=f"{claim.documents} books")
    if missing := _missing_seeds(claim, estimate.n_seeds):
        return Measured(text, used, missing=missing)
    return Measured(text, used, **_of_estimates(claim, [estimate], "books"))


def _test_of_overall(claim: Claim, titles: Mapping[str, str]) -> str:
    first, second = (titles.get(row, row) for row in claim.rows)
    length = claim.options.get("length")
    after = f", after {length} tokens of a book," if length else ""
    return f'Overall of "{first}" minus that of "{second}"{after} is {claim.direction} {claim.margin:g}'


@dataclass(frozen=True)
class _CellAccuracy:
    """The accuracy of a cell by seed, the prompts of all seeds, and the side on which the accuracy should be."""

    accuracy: list[float]
    asked: int
    expected: float
    above: bool

    def p_values(self, times: float = 1.0, n_seeds: int | None = None) -> PValues:
        """The p-values as measured, or as expected with `times` as many prompts per seed and n_seeds seeds."""
        trials = effective_trials(self.accuracy, self.asked, times, n_seeds)
        p, q = proportion_p(statistics.fmean(self.accuracy) * trials, trials, self.expected)
        return (p, q) if self.above else (q, p)


def _passkey(claim: Claim, evidence: Evidence | None) -> Measured:
    """Token accuracy of every cell for which the paper prints a number, compared with `_expected`."""
    assert evidence is not None and isinstance(evidence.report, PasskeyReport)
    report, (row,) = evidence.report, claim.rows
    of_paper = report.rows[claim.options.get("paper_of") or row]
    paper = of_paper.printed()
    runs = evidence.of(claim).runs.get(row, [])
    only, wanted = claim.options.get("only_seeds"), claim.options.get("prompts")
    counting = [run for run in runs if only is None or run.seed in only]
    # Later runs with other numbers of prompts do not take the place of those that were fixed.
    fixed = [run for run in counting if {cell["examples"] for cell in run.series["cells"]} == {wanted}]
    cells = chosen_cells(report, fixed or counting)
    texts: list[str] = []
    used: dict[str, None] = {}
    shares: list[_CellAccuracy] = []
    seeds: list[set[int]] = []
    examples: set[int] = set()
    not_asked: dict[str, int] = {}
    for length in parse_lengths(report.lengths):
        beside = paper.get(length, {})
        by_depth = {
            depth: {seed: pair for (seed, *place), pair in cells.items() if place == [length, depth]}
            for depth in parse_depths(report.depths)
            if not paper or depth in beside
        }
        if not by_depth:
            continue
        if not all(by_depth.values()):
            not_asked[format_length(length)] = len(by_depth)
            continue
        means: list[str] = []
        for depth, found in by_depth.items():
            accuracy = [float(cell["token_accuracy"]) for _, cell in found.values()]
            asked = [int(cell["examples"]) for _, cell in found.values()]
            shares.append(_CellAccuracy(accuracy, sum(asked), *_expected(claim, beside.get(depth), depth)))
            means.append(percent(100 * statistics.fmean(accuracy)))
            used |= {run.run_id: None for run, _ in found.values()}
            seeds.append(set(found))
            examples |= set(asked)
        shown = f" (paper {of_paper.beside(length, by_depth)})" if paper else ""
        texts.append(f"{format_length(length)} {'/'.join(means)}{shown}")
    if not texts:
        return Measured(missing=f"{in_words(claim.seeds, 'seed')} at every length and place")
    n_seeds = len(set.intersection(*seeds))
    fewest, most = min(map(len, seeds)), max(map(len, seeds))
    if not_asked:
        texts.append(f"{', '.join(not_asked)} not asked")
    few, many = min(examples), max(examples)
    each = counted(few, "prompt") if few == many else f"{few} to {many} prompts"
    of_seeds = " for 1 seed" if n_seeds == 1 else f" for each of {n_seeds} seeds"
    if fewest < most:
        of_seeds = f" and seed, {fewest} to {most} seeds"
    text = f"{'; '.join(texts)}; {each} per cell{of_seeds}"
    if several := evidence.of(claim).several_trainings(row):
        text += f"; several trainings of seed {', '.join(map(str, several))}"
    parts = tuple(share.p_values() for share in shares)
    if wanted is not None and {run.seed for run in counting} != {run.seed for run in fixed}:
        # With another number, which could be chosen with results in sight, it is not the test that was fixed.
        return Measured(text, tuple(used), missing=f"{wanted} prompts per cell")
    if missing := _missing_seeds(claim, n_seeds):
        if not_asked:
            # One length at which it fails is enough for "does not hold".
            missing += f"; to hold, also prompts of {', '.join(not_asked)}"
        return Measured(text, tuple(used), missing=missing)
    if not_asked:
        # The lengths that are missing may be the ones at which it fails. Each of their places counts.
        parts += ((1.0, 1.0),) * sum(not_asked.values())
        return Measured(text, tuple(used), parts, to_decide=f"prompts of {', '.join(not_asked)}")
    if wanted is not None:
        return Measured(text, tuple(used), parts, to_decide="another confirmation, fixed before its runs")
    more_of = {k: str(k * few) if few == many else f"{k} times as many" for k in MORE_PROMPTS}
    prompts = {k: f"{number} prompts per cell" for k, number in more_of.items()}
    more_seeds = [n for n in MORE_SEEDS if n > n_seeds]
    steps = [(k, n_seeds, f"{what} and seed") for k, what in prompts.items()]
    steps += [(1, n, f"{n} seeds") for n in more_seeds]
    steps += [(k, n, f"{n} seeds with {what}") for k, what in prompts.items() for n in more_seeds]
    more = [(what, lambda k=k, n=n: [share.p_values(k, n) for share in shares]) for k, n, what in steps]
    return Measured(text, tuple(used), parts, with_more=more)


def _expected(claim: Claim, paper: float | None, depth: str) -> tuple[float, bool]:
    """(share, whether the accuracy should be above it) of a cell. paper: the paper's accuracy in per cent."""
    if claim.measure == "zero_shot_accuracy":
        at_end = depth == "end"
        return (claim.options["at_end"] if at_end else claim.margin) / 100, at_end
    assert paper is not None
    return (paper + claim.margin) / 100, True


def _two_kinds(layers: Sequence[Sequence[float]]) -> bool:
    values = [value for layer in layers for value in layer]
    specialised = sum(not SPECIALISED[0] <= value <= SPECIALISED[1] for value in values)
    mixers = sum(MIXER[0] <= value <= MIXER[1] and abs(value - 0.5) > MOVED for value in values)
    return specialised > 0 and mixers > 0 and specialised + mixers > len(values) / 2


def _interleaved(layers: Sequence[Sequence[float]]) -> bool:
    def both(part: Sequence[Sequence[float]]) -> bool:
        values = [value for layer in part for value in layer]
        return max(values) > 0.5 + MOVED and min(values) < 0.5 - MOVED

    # The middle layer belongs to both halves.
    half = (len(layers) + 1) // 2
    return both(layers[:half]) and both(layers[-half:])


PATTERNS: dict[str, tuple[Callable[[Sequence[Sequence[float]]], bool], str]] = {
    "short_range": (
        lambda layers: all(min(layer) < SPECIALISED[0] for layer in layers),
        f"every layer has a gate below {SPECIALISED[0]}",
    ),
    "two_kinds": (
        _two_kinds,
        f"specialised gates (below {SPECIALISED[0]} or above {SPECIALISED[1]}) and mixers ({MIXER[0]} to {MIXER[1]}) "
        "both occur, and together they are more than half of all gates; values within "
        f"{MOVED:g} of the start, 0.5, count as neither",
    ),
    "interleaved": (
        _interleaved,
        f"the lower half of the layers and the upper half (the middle one is of both) have a gate above "
        f"{0.5 + MOVED:g} and one below {0.5 - MOVED:g}",
    ),
}
"""Name -> whether the gates of a model, [layers][heads], have the pattern, and what it is."""


def _gates(claim: Claim, evidence: Evidence | None) -> Measured:
    """The share of trainings whose gates have a pattern. The claim holds if most have it."""
    assert evidence is not None
    has, _ = PATTERNS[claim.options["pattern"]]
    rows = [
        [run for run in selection.runs.get(row, []) if run.series.get("gates") and row not in selection.mismatches]
        for selection in ([evidence.of(claim)] if claim.task else evidence.by_task.values())
        for row in claim.rows
    ]
    runs = [run for row in rows for run in row]
    without_seeds = f"{in_words(claim.seeds, 'seed')} of each model"
    if not runs:
        return Measured(missing=without_seeds)
    having = sum(has(run.series["gates"]) for run in runs)
    n_seeds = min(len({run.seed for run in row}) for row in rows)
    each = f" ({counted(n_seeds, 'seed')} of each)" if n_seeds else ", and none of another"
    text = f"{having} of {len(runs)} trained models{each}"
    run_ids = tuple(run.run_id for run in runs)
    if not n_seeds:
        return Measured(text, run_ids, missing=without_seeds)
    if missing := _missing_seeds(claim, n_seeds):
        return Measured(text, run_ids, missing=missing)
    # Models of one corpus and seed began with the same weights and read the same batches.
    alike: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for run in runs:
        alike[run.task, run.seed].append(has(run.series["gates"]))
    share = sum(sum(found) / len(found) for found in alike.values())

    def parts(times: int = 1) -> Sequence[PValues]:
        p, q = proportion_p(share * times, len(alike) * times, claim.margin)
        return [(p, q) if claim.direction == "above" else (q, p)]

    more = [(f"{k * n_seeds} seeds", lambda k=k: parts(k)) for k in MORE_PROMPTS]
    return Measured(text, run_ids, tuple(parts()), with_more=more)


def _test_of_gates(claim: Claim, titles: Mapping[str, str]) -> str:
    _, pattern = PATTERNS[claim.options["pattern"]]
    ours = "The paper gives no measure; ours is: " * (claim.options["pattern"] == "interleaved")
    return (
        f"{ours}in more than half of all models trained with gates that begin at 0.5, {pattern}. Models with the same "
        "corpus and seed count as one model."
    )


def _exact(holds: bool, text: str) -> Measured:
    return Measured(text, parts=((0.0, 1.0) if holds else (1.0, 0.0),), exact=True)


def _memory_ratio(claim: Claim, evidence: Evidence | None) -> Measured:
    infini = TABLE1["infini_linear"].floats(PAPER)
    large = (PAPER.d_key + PAPER.d_value) * PAPER.H * ENTRIES_65K
    ratio = (large + TABLE1["transformer_xl"].floats(PAPER)) / infini
    formula = TABLE1["memorizing"].floats(PAPER) / infini
    text = f"{ratio:.1f}x; without the cache {large / infini:.1f}x, by Table 1's formula {formula:.1f}x"
    return _exact(ratio >= claim.margin, text)


def _size(claim: Claim, evidence: Evidence | None) -> Measured:
    text, value, _ = _printed_size(claim)
    found = f"{value / 1e6:.1f}M" if value < 1e7 else f"{value / 1e6:.0f}M"
    return _exact(found == text, f"{value:,.0f}")


def _printed_size(claim: Claim) -> tuple[str, float, str]:
    """The size in Table 2, the number by Table 1's formula, and the assumption behind it."""
    return next(
        (text, value, if_) for model, text, value, if_ in printed() if model == claim.rows[0] and text.endswith("M")
    )


def _test_of_size(claim: Claim, titles: Mapping[str, str]) -> str:
    assumed = _printed_size(claim)[2]
    return f"arithmetic, no run: Table 1's formula at the paper's sizes, rounded; assumed: {assumed}"


@dataclass(frozen=True)
class LossOptions:
    """Options of claims about losses."""

    less: tuple[str, ...] = ()
    """Two rows, whose difference is subtracted."""
    control: str = ""
    """Describes these two rows in words."""


@dataclass(frozen=True)
class OverallOptions:
    """Options of claims about summaries."""

    length: str | None = None
    """The input length that judges the claim; null: the report's only one."""


@dataclass(frozen=True)
class PasskeyOptions:
    """Options of claims about the passkey task."""

    paper_of: str | None = None
    """The row whose numbers in the paper count; null: that of the claim."""
    only_seeds: tuple[int, ...] | None = None
    """The seeds that judge the claim; null: all."""
    prompts: int | None = None
    """Number of prompts that each cell of a seed must have; null: any number."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(PasskeyOptions):
    """Options of claims about models that were not trained on prompts."""

    at_end: float
    """Accuracy at the end, in per cent, above which the claim puts it."""


@dataclass(frozen=True)
class GatesOptions:
    """Options of claims about gates."""

    pattern: str = ""
    """A key of PATTERNS."""


TEXT: tuple[type[RunReport], str] = (Report, "needs a table of running text, for example table2_lm")
PASSKEY: tuple[type[RunReport], str] = (PasskeyReport, "needs a table of the passkey task, for example table3_passkey")
SUMMARIES: tuple[type[RunReport], str] = (SummaryReport, "needs a table of summaries, for example table4_booksum")
ANY_RUNS: tuple[type[RunReport], str] = (RunReport, "needs a table of runs, for example lm_gates")


@dataclass(frozen=True)
class Measure:
    """The measure of a kind of claims and the description of their test: a function, or a template that is filled with
    the claim `c` and the titles of its `rows`."""

    measure: Callable[[Claim, Evidence | None], Measured]
    described: str | Callable[[Claim, Mapping[str, str]], str]
    needs: tuple[type[RunReport], str] | None = None
    """The class of reports whose runs can be judged, and the message for any other; None: no report is needed."""
    rows: int = 0
    """Number of rows."""
    or_more: bool = False
    options: type[LossOptions | OverallOptions | PasskeyOptions | GatesOptions] | None = None
    """The class of its options; None: it has none."""

    def check(self, claim: Claim) -> None:
        """Raise InputError for what this measure does not take. Evidence.check does so for what depends on a report."""
        key, of = f"report.claims.{claim.name}", f"measure={claim.measure}"
        if self.needs:
            require(bool(claim.report), f"{key}.report", claim.report, f"{of} {self.needs[1]}")
        fits = len(claim.rows) == self.rows or (self.or_more and len(claim.rows) > self.rows)
        takes = f"{of} takes {in_words(self.rows, 'row')}{' or more' * self.or_more}"
        require(fits, f"{key}.rows", list(claim.rows), takes)
        if claim.measure == "memory_size":
            one_of(f"{key}.rows", claim.rows[0], [model for model, text, *_ in printed() if text.endswith("M")])
        if self.options is None:
            require(not claim.options, f"{key}.options", claim.options, f"{of} takes none")
            return
        options = build(self.options, claim.options, f"{key}.options")
        if isinstance(options, GatesOptions):
            one_of(f"{key}.options.pattern", options.pattern, list(PATTERNS))
        if isinstance(options, LossOptions):
            fits = (len(options.less), bool(options.control)) in ((0, False), (2, True))
            require(fits, f"{key}.options", claim.options, "two rows in less and words in control, or neither")

    def test(self, claim: Claim, titles: Mapping[str, str]) -> str:
        """The description of a claim's test. titles: row of its report -> title."""
        if isinstance(self.described, str):
            return self.described.format(c=claim, rows=[titles.get(row, row) for row in claim.rows])
        return self.described(claim, titles)


MEASURES: dict[str, Measure] = {
    "loss": Measure(_loss, _test_of_loss, TEXT, rows=2, or_more=True, options=LossOptions),
    "overall": Measure(_overall, _test_of_overall, SUMMARIES, rows=2, options=OverallOptions),
    "overall_by_length": Measure(
        _overall,
        'slope of the Overall of "{rows[0]}" over the logarithm of the tokens read, on the validation books, is '
        "{c.direction} {c.margin:g}",
        SUMMARIES,
        rows=1,
    ),
    "token_accuracy": Measure(
        _passkey,
        lambda claim, titles: (
            f"token accuracy at every length and place is above the paper's minus {-claim.margin:g} points"
        ),
        PASSKEY,
        rows=1,
        options=PasskeyOptions,
    ),
    "zero_shot_accuracy": Measure(
        _passkey,
        "token accuracy at every length is below {c.margin:g} % where memory is needed and above "
        "{c.options[at_end]:g} % at the end",
        PASSKEY,
        rows=1,
        options=ZeroShotOptions,
    ),
    "gates": Measure(_gates, _test_of_gates, ANY_RUNS, rows=1, or_more=True, options=GatesOptions),
    "memory_ratio": Measure(
        _memory_ratio,
        "arithmetic, no run: 65,000 entries in one layer and the cache of all 12 layers, which is how the printed 183M "
        "comes out, are {c.margin:g} times Infini-Transformer's memory or more",
    ),
    "memory_size": Measure(_size, _test_of_size, rows=1),
    "none": Measure(lambda claim, evidence: Measured(), "none", or_more=True),
}
"""Name of a measure in `conf/report/claims.yaml` -> how it is made."""
