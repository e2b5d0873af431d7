"""What the paper claims about summaries of whole books, and how each claim is judged; see infini.report.claims.

Scores are means over seeds of each book's; the overall value is the geometric mean of the means over books of R-1, R-2
and R-L. Errors are standard deviations over resampled books, the same for all that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from infini.lengths import format_length, parse_lengths
from infini.records import RunRecord
from infini.report import claims
from infini.report.claims import Claim, Evidence, Finding
from infini.report.footprint import TABLE1
from infini.report.summaries import cells_at
from infini.report.tables import PLUS_MINUS

TABLE, LENGTHS = "table4_booksum", "booksum_lengths"
"""Reports whose runs are judged: of the test books, and of the validation books by length of the input."""
BASELINES = ("bart", "bart_unlimiformer", "primera", "primera_unlimiformer")
OURS = ("infini_linear", "infini_delta")
RESAMPLES = 2000
ROUNDED = 1e-4
"""Points to which records hold scores: less is no difference."""
_COLUMNS = ("rouge1", "rouge2", "rougeL")


class _Scores(NamedTuple):
    """What runs of a row scored at one length."""

    revision: str
    books: tuple[str, ...]
    by_seed: dict[int, np.ndarray]
    """Seed -> [books, 3], R-1, R-2 and R-L of each book."""
    run_ids: tuple[str, ...]

    def over(self, seeds: Sequence[int]) -> np.ndarray:
        """[books, 3], the mean over these seeds."""
        mean: np.ndarray = np.mean([self.by_seed[seed] for seed in seeds], axis=0)
        return mean


def summary_claims() -> list[Claim]:
    """All claims of the section about BookSum, in the paper's order."""
    surely = f"more than {claims.SURE:g} standard errors over books, paired by seed and book"
    names = {row: TABLE1[row].title for row in OURS}
    found = [
        Claim(
            f"booksum_{row}",
            f"BookSum: {names[row]} has a higher overall ROUGE than BART and PRIMERA, with and without Unlimiformer",
            "Section 3.2, Table 4",
            f"higher than each of the four by {surely}",
            _higher(row, BASELINES),
        )
        for row in OURS
    ]
    found.append(
        Claim(
            "booksum_delta",
            "BookSum: Linear + Delta has a higher overall ROUGE than Linear",
            "Table 4",
            f"higher by {surely}",
            _higher("infini_delta", ("infini_linear",)),
        )
    )
    found.append(
        Claim(
            "booksum_values",
            "BookSum: the ROUGE values themselves",
            "Table 4",
            "none: other books, and weights from scratch where the paper has a pre-trained model of 8 billion",
            _values,
        )
    )
    found += [
        Claim(
            f"booksum_lengths_{row}",
            f"BookSum: with more text of the books as input the overall ROUGE of {names[row]} rises",
            "Section 3.2, figure of ROUGE by input length",
            "validation books, every length of the figure: slope over the logarithm of the length above 0, and the "
            f"longest input above the shortest, by {surely}",
            _rises(row),
        )
        for row in OURS
    ]
    return found


def _higher(row: str, others: Sequence[str]) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        if TABLE not in evidence.summaries:
            return Finding("not measured yet")
        report, selection = evidence.summaries[TABLE]
        length = parse_lengths(report.input_lengths)[0]
        scores = {name: _scores(selection.runs.get(name, []), length) for name in (row, *others)}
        ours = scores[row]
        parts: list[str] = []
        missing, used = [], {} if ours is None else dict.fromkeys(ours.run_ids)
        sure = True
        for name in others:
            theirs = scores[name]
            seeds = [] if ours is None or theirs is None else sorted(ours.by_seed.keys() & theirs.by_seed.keys())
            if ours is None or theirs is None or not seeds:
                missing.append(report.systems[name].title)
                continue
            if (theirs.revision, theirs.books) != (ours.revision, ours.books):
                return Finding("not measured yet", "on different books")
            if len(ours.books) < claims.FEWEST_DOCUMENTS:
                return Finding("not measured yet", f"on {len(ours.books)} books only")
            a, b = ours.over(seeds), theirs.over(seeds)
            drawn = _drawn(len(ours.books))
            mean = float(_overall(a) - _overall(b))
            error = float(np.std(_overall(a[drawn]) - _overall(b[drawn])))
            sure &= _surely_above_0(mean, error)
            parts.append(f"{mean:+.2f} {PLUS_MINUS} {error:.2f} over {report.systems[name].title} ({len(seeds)} seeds)")
            used |= dict.fromkeys(theirs.run_ids)
        if ours is None or not parts:
            return Finding("not measured yet")
        measured = f"{'; '.join(parts)}; {len(ours.books)} books"
        if not sure:
            return Finding("does not hold", measured, tuple(used))
        if missing:
            return Finding("not measured yet", f"{measured}; no runs to compare of {', '.join(missing)}", tuple(used))
        return Finding("holds", measured, tuple(used))

    return judge


def _values(evidence: Evidence) -> Finding:
    if TABLE not in evidence.summaries:
        return Finding("not measured yet")
    report, selection = evidence.summaries[TABLE]
    length = parse_lengths(report.input_lengths)[0]
    parts, used = [], dict[str, None]()
    for name, row in report.systems.items():
        if row.paper and (found := _scores(selection.runs.get(name, []), length)) is not None:
            table = found.over(list(found.by_seed))
            ours = "/".join(f"{value:.1f}" for value in (*table.mean(0), _overall(table)))
            parts.append(f"{row.title} {ours} (paper {'/'.join(map(str, row.paper))})")
            used |= dict.fromkeys(found.run_ids)
    if not parts:
        return Finding("not measured yet")
    return Finding("not testable at this scale", "; ".join(parts), tuple(used))


def _rises(row: str) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        if LENGTHS not in evidence.summaries:
            return Finding("not measured yet")
        report, selection = evidence.summaries[LENGTHS]
        lengths = parse_lengths(report.input_lengths)
        found = [_scores(selection.runs.get(row, []), length) for length in lengths]
        scores = [entry for entry in found if entry is not None]
        seeds = sorted(set.intersection(*(set(entry.by_seed) for entry in scores))) if scores else []
        if len(scores) < len(lengths) or not seeds:
            return Finding("not measured yet")
        if len({(entry.revision, entry.books) for entry in scores}) > 1:
            return Finding("not measured yet", "on different books")
        n_books = len(scores[0].books)
        if n_books < claims.FEWEST_DOCUMENTS:
            return Finding("not measured yet", f"on {n_books} books only")
        tables_LBM = np.stack([entry.over(seeds) for entry in scores])
        # Least squares: the weight of each length in the slope.
        doublings = np.log2(lengths) - np.log2(lengths).mean()
        weights = doublings / (doublings**2).sum()
        mean = float(weights @ _overall(tables_LBM))
        drawn_LR = _overall(tables_LBM[:, _drawn(n_books)])
        error = float(np.std(weights @ drawn_LR))
        gain = float(_overall(tables_LBM[-1]) - _overall(tables_LBM[0]))
        sure = _surely_above_0(mean, error) and _surely_above_0(gain, float(np.std(drawn_LR[-1] - drawn_LR[0])))
        named = zip(lengths, _overall(tables_LBM), strict=True)
        values = ", ".join(f"{format_length(length)} {value:.2f}" for length, value in named)
        measured = f"{mean:+.3f} {PLUS_MINUS} {error:.3f} a doubling ({values}; {n_books} books, {len(seeds)} seeds)"
        used = tuple(dict.fromkeys(run_id for entry in scores for run_id in entry.run_ids))
        return Finding("holds" if sure else "does not hold", measured, used)

    return judge


def _scores(runs: Sequence[RunRecord], length: int) -> _Scores | None:
    """What the runs of a row scored at a length; None where none did, or where seeds were asked different books."""
    found = cells_at(runs, length)
    if not found:
        return None
    by_seed, books = {}, set()
    for run, cell in found:
        scored = sorted(cell["books"], key=lambda book: str(book["name"]))
        books.add((str(run.data.get("revision")), tuple(str(book["name"]) for book in scored)))
        by_seed[run.seed] = np.array([[float(book[name]) for name in _COLUMNS] for book in scored])
    if len(books) > 1:
        return None
    ((revision, names),) = books
    return _Scores(revision, names, by_seed, tuple(run.run_id for run, _ in found))


def _overall(scores: np.ndarray) -> np.ndarray:
    """[..., books, 3] -> [...]: the geometric mean of the means over books."""
    value: np.ndarray = scores.mean(-2).prod(-1) ** (1 / 3)
    return value


def _surely_above_0(mean: float, error: float) -> bool:
    return mean > max(claims.SURE * error, ROUNDED)


def _drawn(n_books: int) -> np.ndarray:
    """[RESAMPLES, books], each a draw of as many books."""
    return np.random.default_rng(0).integers(n_books, size=(RESAMPLES, n_books))
