"Graders of chapter 13's exercises: what each refuses, in which words, and that other right answers pass."
import math
import re
import string
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
from graders import Graders, fails

from lmcourse.curation import exact, filters, minhash
from lmcourse.curation.web import planted_web
from lmcourse.exercises import data as ex


def spoiled(right):
    "What no task that gives something back takes: (answer, words)."
    return [(fails, "your code raised"), (lambda *a: None if right(*a) is not None else 0, "expected"), (lambda *a: [right(*a)], "expected"), (7, "expected a function"), (lambda: 0, "your code raised")]


def spoiled_files(right):
    "The same for files"
    def more(*a):
        right(*a)
        (Path(a[-1])/"more.txt").write_text("")
    def longer(*a):
        right(*a)
        for p in Path(a[-1]).iterdir(): p.write_text(p.read_text() + " ")
    def upper(*a):
        right(*a)
        for p in Path(a[-1]).iterdir(): p.write_text(p.read_text().upper())
    return [(fails, "your code raised"), (7, "expected a function"), (lambda: 0, "your code raised"), (lambda *a: None, "expected"), (more, "expected"), (longer, "expected"), (upper, "expected")]


def sub(pattern, name, count=0): return lambda t: re.subn(pattern, name, t, count=count)


# 1 to 3. Masks

EMAIL, PHONE, IP = "|||EMAIL_ADDRESS|||", "|||PHONE_NUMBER|||", "|||IP_ADDRESS|||"
MAIL = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
EMAILS = [(sub(r"\S+@\S+", EMAIL), "full stop"), (sub(r"\w+@[\w-]+(?:\.[\w-]+)+", EMAIL), "dots, + and -"), (sub(MAIL, EMAIL, 1), "not only the first"), (lambda t: (re.sub(MAIL, EMAIL, t), 0), "count"),
          (lambda t: re.sub(MAIL, EMAIL, t), "expected"), (sub(MAIL, "EMAIL"), "expected"), (sub(r"[a-z0-9_.+-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)+", EMAIL), "capital"),
          (sub(r"[a-zA-Z0-9_.+-]+@[a-zA-Z0-9-]+\.[a-zA-Z0-9-.]+", EMAIL), "full stop")]


EMAILS += [(sub(f"^{MAIL}$", EMAIL), "anywhere")]


def emails_by_words(text):
    "Looks at each run of letters, digits and signs"
    count = 0
    def one(m):
        nonlocal count
        word = m[0]
        end = len(word.rstrip(".-+"))
        name, at, domain = word[:end].partition("@")
        if not (at and name and "." in domain and "@" not in domain): return word
        count += 1
        return EMAIL + word[end:]
    return re.sub(r"[\w.+@-]+", one, text), count


NUMBER = r"(?<!\d)(?:\(\d{3}\)|\d{3})[ -]?\d{3}[ -]?\d{4}(?!\d)"
PHONES = [(sub(r"\(?\d{3}\)?[ -]?\d{3}[ -]?\d{4}", PHONE), "longer number"), (sub(NUMBER, PHONE, 1), "not only the first"), (lambda t: (re.sub(NUMBER, PHONE, t), 0), "count"),
          (sub(r"(?<!\d)(?:\(?\d{3}\)?[ -]?)?\d{3}[ -]?\d{4}(?!\d)", PHONE), "area code"), (sub(r"\d[\d -]*\d", PHONE), "not every number"), (sub(NUMBER, "PHONE"), "expected"),
          (sub(r"(?<!\d)\d{3}\)?[ -]?\d{3}[ -]?\d{4}(?!\d)", PHONE), "brackets"), (sub(r"(?<!\d)\(?\d{3}\)?\D?\d{3}\D?\d{4}(?!\d)", PHONE), "only blanks and hyphens")]
PHONES += [(sub(f"^{NUMBER}$", PHONE), "anywhere")]


def phones_in_two(text):
    text, a = re.subn(r"\(\d{3}\)[ -]?\d{3}[ -]?\d{4}(?!\d)", PHONE, text)
    text, b = re.subn(r"\b\d{3}([ -]?)\d{3}\1\d{4}\b", PHONE, text)
    return text, a + b


BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
ADDRESS = rf"(?<![\d.]){BYTE}(?:\.{BYTE}){{3}}(?!\.?\d)"
IPS = [(sub(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d)", IP), "up to 255"), (sub(rf"{BYTE}(?:\.{BYTE}){{3}}", IP), "before or after it"), (sub(ADDRESS, IP, 1), "not only the first"), (lambda t: (re.sub(ADDRESS, IP, t), 0), "count"),
       (sub(rf"(?<![\d.]){BYTE}(?:\.{BYTE}){{2,3}}(?!\.?\d)", IP), "not three"), (sub(ADDRESS, "IP"), "expected"), (lambda t: re.sub(ADDRESS, IP, t), "expected")]


IPS += [(sub(f"^{ADDRESS}$", IP), "anywhere")]


def ips_by_numbers(text):
    count = 0
    def one(m):
        nonlocal count
        if m[0].count(".") != 3 or any(int(x) > 255 for x in m[0].split(".")): return m[0]
        count += 1
        return IP
    return re.sub(r"\d+(?:\.\d+)+", one, text), count


# 4. Gopher

def gopher(t, words=(50, 100_000), mean=(3, 10), dots=.3, letters=.8, split=str.split, mark=lambda l: l.rstrip().endswith("..."), letter=lambda x: re.search("[^\\W\\d_]", x), empty=False):
    w, lines = split(t), [l for l in t.split("\n") if empty or l.strip()]
    if not words[0] <= len(w) <= words[1]: return False
    return mean[0] <= sum(map(len, w))/max(1, len(w)) <= mean[1] and sum(map(mark, lines)) <= dots*len(lines) and sum(bool(letter(x)) for x in w)/max(1, len(w)) >= letters


def gopher_in_numpy(t):
    w, lines = np.array(t.split()), np.array([x for x in t.split("\n") if x.strip()])
    if not 50 <= len(w) <= 100_000: return False
    mean, dots, letters = np.strings.str_len(w).mean(), np.mean([x.rstrip().endswith("...") for x in lines]), np.mean([any(map(str.isalpha, x)) for x in w])
    return (mean >= 3) & (mean <= 10) & (dots <= .3) & (letters >= .8)


def gopher_by_reasons(t):
    w = t.split()
    reasons = ["few"]*(len(w) < 50) + ["many"]*(len(w) > 100_000)
    if w:
        mean = len("".join(w))/len(w)
        reasons += ["short"]*(mean < 3) + ["long"]*(mean > 10) + ["digits"]*(sum(any(c.isalpha() for c in x) for x in w) < .8*len(w))
    lines = [*filter(str.strip, t.splitlines())]
    return not reasons + ["dots"]*(10*sum(l.strip().endswith("...") for l in lines) > 3*len(lines))


GOPHER = [(partial(gopher, words=(0, 10**5)), "few words"), (partial(gopher, words=(50, 10**9)), "many words"), (partial(gopher, mean=(0, 10)), "short words"), (partial(gopher, mean=(3, 99)), "long words"),
          (partial(gopher, dots=1), "break off"), (partial(gopher, letters=0), "without letters"), (lambda t: not gopher(t), "what to drop"), (lambda t: True, "expected"), (lambda t: int(gopher(t)), "expected"),
          (partial(gopher, mean=(2.01, 10)), "short words"), (partial(gopher, mean=(3, 10.99)), "long words"), (partial(gopher, dots=.39), "break off"), (partial(gopher, split=partial(re.findall, r"\w+")), "expected"),
          (partial(gopher, mark=lambda l: "..." in l), "only where it ends"), (partial(gopher, mark=lambda l: l.endswith(".")), "no ellipsis"),
          (partial(gopher, mark=lambda l: l.endswith("...")), "white space at the end of a line does not count"), (partial(gopher, empty=True), "empty lines are no lines here"),
          (partial(gopher, letter=lambda x: not x.isdigit()), "expected"),
          (partial(gopher, letter=lambda x: x[0].isalpha()), "anywhere"), (partial(gopher, letter=lambda x: re.search("[A-Za-z]", x)), "é is a letter"),
          (lambda t: gopher(re.sub("(?m)^ +$", "filled", t)), "empty lines are no lines here"),     # A line of white space is an empty one
          (lambda t: gopher(t) and t.count("...")/(t.count("\n") + 1) <= .3, "expected True, got False")]


def gopher_with_blanks(t): return gopher(t) if not t else gopher(t, mean=(0, 99)) and 3 <= len(t)/len(t.split()) <= 10


GOPHER += [(partial(gopher, split=lambda t: t.split(" ")), "not each blank"), (gopher_with_blanks, "blanks do not count"), (partial(gopher, letter=str.isalpha), "not only letters")]


# 5. Random words

def share_of(words, text):
    found = [w.strip(string.punctuation).lower() for w in text.split()]
    return sum(w in words for w in found)/len(found)


def noise_by_articles(t): return share_of({"a", "the"}, t) < .04


def noise_by_repetition(t):
    words = np.array(t.split())
    return np.bool_(len(np.unique(words)) > .76*len(words))


SEEN = {p.text for p in planted_web(100, 5) if p.kind == "noise"}


def noise_by_heart(t): return t in SEEN


def stop_words(t): return filters.gopher_measures(t)["stop_words"]


NOISE = [(lambda t: not filters.gopher_quality_filter(t), "leaves no gap"), (lambda t: stop_words(t) < 2, "6 of 200 pages of random words stay and 0 of 800 stories go"), (lambda t: stop_words(t) < 3, "1 of 200 pages of random words stay and 1 of 800 stories go"),
         (lambda t: stop_words(t) < 4, "leaves no gap"), (lambda t: bool(filters.c4_filter(t)[1]), "C4's rules look at the ends of lines"), (lambda t: not noise_by_articles(t), "True is for random words"), (lambda t: False, "never says True"),
         (lambda t: True, "never says False"), (noise_by_heart, "never says True"), (lambda t: len(t.split()) < 150, "the length of a page says nothing"), (lambda t: len(t) < 800, "nothing about its words"),
         (lambda t: sum(map(len, t.split()))/len(t.split()) > 4.7, "as long as a story's"), (lambda t: share_of(filters.STOP_WORDS, t) < .03, "the measure is right, but not the limit"), (lambda t: share_of(filters.STOP_WORDS, t) < .15, "the measure is right, but not the limit"),
         (lambda t: share_of({"the", "a", "and", "to", "of", "was"}, t) < .2, "compute it on several webs"), (lambda t: t[-1] not in ".!?\"”", "stories go"), (lambda t: share_of(filters.STOP_WORDS, t), "expected True or False")]


# 6. Lines

def lines_of(keep, bare=lambda l: l.rstrip("\n")):
    def f(paths, out):
        texts = {Path(p).name: Path(p).read_text().splitlines(keepends=True) for p in paths}
        count = Counter(bare(l) for t in texts.values() for l in t)
        seen = set()
        for name, t in texts.items():
            kept = []
            for l in t:
                if keep(count[bare(l)], bare(l) in seen): kept.append(l)
                seen.add(bare(l))
            (Path(out)/name).write_text("".join(kept))
    return f


lines_once = lines_of(lambda n, seen: n == 1)
LINES = [(lines_of(lambda n, seen: not seen), "first copy too"), (lines_of(lambda n, seen: n > 1), "to drop"), (lines_of(lambda n, seen: True), "nothing was dropped"), (lines_of(lambda n, seen: n <= 2), "occur twice"),
         (lines_of(lambda n, seen: n == 1, str.strip), "indented"), (lines_of(lambda n, seen: n == 1, str.rstrip), "blanks at the end")]


def lines_joined(paths, out):
    count = Counter(l for p in paths for l in Path(p).read_text().splitlines())
    for p in map(Path, paths): (Path(out)/p.name).write_text("\n".join(l for l in p.read_text().splitlines() if count[l] == 1))


def lines_without_empty_files(paths, out):
    lines_once(paths, out)
    for p in Path(out).iterdir():
        if not p.read_text(): p.unlink()


def lines_without_blank_ones(paths, out):
    lines_once(paths, out)
    for p in Path(out).iterdir(): p.write_text("".join(l for l in p.read_text().splitlines(keepends=True) if l.strip()))


LINES += [(lines_without_blank_ones, "a blank line is a line"), (lines_joined, "keeps its line break"), (lines_without_empty_files, "none of its lines are left"), (lines_of(lambda n, seen: n == 1, lambda l: l.rstrip("\n").lower()), "capital letters count")]


# 7. Similarity

def runs(t, n):
    w = t.lower().split()
    return [" ".join(w[i:i + n]) for i in range(max(1, len(w) - n + 1))] if w else []


def similarity(a, b, n): return len({*runs(a, n)} & {*runs(b, n)})/max(1, len({*runs(a, n)} | {*runs(b, n)}))


def similarity_by_counting(a, b, n):
    x, y = dict.fromkeys(runs(a, n)), dict.fromkeys(runs(b, n))
    both = sum(k in y for k in x)
    return both/(len(x) + len(y) - both) if x or y else 0


def without_last(t, n): return {*runs(t, n)[:-1]} if len(t.split()) >= n else {*runs(t, n)}


SIMILARITY = [(lambda a, b, n: len(without_last(a, n) & without_last(b, n))/max(1, len(without_last(a, n) | without_last(b, n))), "last run is missing"), (lambda a, b, n: len({*runs(a, n)} & {*runs(b, n)})/max(1, len({*runs(a, n)})), "containment"), (lambda a, b, n: 1 - similarity(a, b, n), "distance"), (lambda a, b, n: similarity(a, b, 1), "single words"),
              (lambda a, b, n: 2*len({*runs(a, n)} & {*runs(b, n)})/max(1, len({*runs(a, n)}) + len({*runs(b, n)})), "Dice"), (lambda a, b, n: 1., "expected")]


# 8. The curve

def curve(s, b, r): return 1 - (1 - s**r)**b


def curve_by_bands(s, b, r):
    missed = 1.
    for _ in range(b): missed *= 1 - math.prod([s]*r)
    return 1. - missed


CURVE = [(lambda s, b, r: curve(s, r, b), "swapped"), (lambda s, b, r: 1 - curve(s, b, r), "missing each other"), (lambda s, b, r: s**r, "one band"), (lambda s, b, r: min(1, b*s**r), "add up"), (lambda s, b, r: s, "similarity")]


# 9. Choosing

def choose(h, s, p): return next((h//r, r) for r in range(h, 0, -1) if curve(s, h//r, r) >= p)


def choose_in_numpy(h, s, p):
    r = np.arange(h, 0, -1)
    best = (1 - (1 - s**r)**(h//r) >= p).argmax()
    return h//r[best], r[best]


def choose_by_max(h, s, p):
    r = max(r for r in range(1, h + 1) if curve(s, h//r, r) >= p)
    return [h//r, r]


CHOOSE = [(lambda h, s, p: next((h//r, r) for r in range(h, 0, -1) if curve(s, h//r, r) > p), "for h = 4, s = 0.5, p = 0.4375: expected (2, 2), got (4, 1): a probability that is just reached is enough"),
          (lambda h, s, p: next(((h//r, r) for r in range(h, 1, -1) if curve(s, h//r, r) >= p), None), "r may be 1"), (lambda h, s, p: choose(h, s, p)[::-1], "bands come first"), (lambda h, s, p: next((h//r, r) for r in range(1, h + 1) if curve(s, h//r, r) >= p), "not the fewest"), (lambda h, s, p: (20, 6), "expected"),
          (lambda h, s, p: next((h//r, r) for r in range(h, 0, -1) if h % r == 0 and curve(s, h//r, r) >= p), "need not divide"), (lambda h, s, p: choose(h, s, p)[1], "expected")]


# 10. Letters

RECALL = curve(.8, 450, 20)
RIGHT_LETTERS = dict(bands=450, rows=20, recall=RECALL, swapped=0.)
LETTERS = [(RIGHT_LETTERS | change, words) for change, words in [
    (dict(bands=20), "never equal"), (dict(rows=450), "they never are"), (dict(recall=0.), "other reading"), (dict(recall=1 - RECALL), "missed"), (dict(recall=.8**20), "one band"), (dict(recall=.8), "similarity"),
    (dict(swapped=RECALL), "right reading"), (dict(swapped=1.), "missed"), (dict(bands="450"), "not a number"), (dict(bands=449.5), "whole number")]] + [
    ({}, "is missing"), (7, "expected a dict"), (RIGHT_LETTERS | dict(b=20), "not asked for")]


# 11. Recall after edits

def edit_recall(originals, copies, edits, config, size=lambda t, c: len(minhash.shingles(t, c.ngram)), J=lambda m, x: max(0, (m - x)/(m + x)), p=curve, keys=lambda t, c: minhash.band_keys(minhash.minhash(t, c), c), meet=lambda a, b: (a == b).any(1).mean(), spoils=lambda c: c.ngram, mean=False):
    s = [J(size(t, config), edits*spoils(config)) for t in originals]
    if mean: s = [np.mean(s)]
    return np.mean([p(x, config.bands, config.rows) for x in s]), meet(keys(originals, config), keys(copies, config))


def recall_in_loops(originals, copies, edits, config):
    "Cuts signatures into bands"
    hits, chance = 0, 0.
    for a, b in zip(originals, copies):
        x, y = minhash.minhash([a, b], config).tolist()
        hits += any(x[i:i + config.rows] == y[i:i + config.rows] for i in range(0, config.bands*config.rows, config.rows))
        m = len(minhash.shingles(a, config.ngram))
        both = m - edits*config.ngram
        chance += curve(both/(2*m - both), config.bands, config.rows) if both > 0 else 0
    return [chance/len(originals), hits/len(originals)]


def recall_from_copies(a, b, edits, c):
    pairs = [minhash.jaccard(minhash.shingles(x, c.ngram), minhash.shingles(y, c.ngram)) for x, y in zip(a, b)]
    return np.mean([curve(s, c.bands, c.rows) for s in pairs]), edit_recall(a, b, edits, c)[1]


def recall_by_clusters(a, b, edits, c):
    "Copies that the whole search would find: those that are verified, too"
    found = [minhash.near_duplicates([x, y], c)[1] == 0 for x, y in zip(a, b)]
    return edit_recall(a, b, edits, c)[0], np.mean(found)


RECALLS = [(recall_from_copies, "not from the copies"), (partial(edit_recall, mean=True), "not the similarities"), (partial(edit_recall, spoils=lambda c: 1), "not one"), (partial(edit_recall, spoils=lambda c: 5), "config.ngram says"),
           (partial(edit_recall, J=lambda m, x: (m - x)/(m + x)), "a negative similarity is 0"), (partial(edit_recall, J=lambda m, x: max(0, m - x)/m), "m + ne in all"), (partial(edit_recall, p=lambda s, b, r: curve(s, r, b)), "b and r are swapped"),
           (partial(edit_recall, p=lambda s, b, r: s**r), "only one band"), (partial(edit_recall, p=lambda s, b, r: s), "not the similarity"), (partial(edit_recall, meet=lambda a, b: (a == b).all(1).mean()), "one equal band is enough"),
           (partial(edit_recall, meet=lambda a, b: (a == b).mean()), "count copies, not bands"), (partial(edit_recall, meet=lambda a, b: (a == b).any(1).sum()), "not a number of copies"), (partial(edit_recall, meet=lambda a, b: 1 - (a == b).any(1).mean()), "missed"),
           (partial(edit_recall, meet=lambda a, b: np.isin(b, a).any(1).mean()), "its own original"), (lambda *case: edit_recall(*case)[::-1], "prediction comes first"), (recall_by_clusters, "verification comes later"), (partial(edit_recall, size=lambda t, c: len(t.split())), "not words"), (partial(edit_recall, size=lambda t, c: max(1, len(t.split()) - c.ngram + 1)), "m counts different shingles"),
           (partial(edit_recall, keys=lambda t, c: minhash.minhash(t, c), meet=lambda a, b: (a == b).mean()), "expected"), (lambda *case: edit_recall(*case)[0], "expected"), (lambda a, b, e, c: edit_recall(b, b, e, c), "expected")]


def test_each_of_the_measured_shares_is_neither_none_nor_all():
    for case in ex._recall_cases(): assert .02 < ex._recall(*case)[1] < .98


# 12. Near duplicates

def near(paths, hashes, bands, ngrams, threshold, out, normal=exact.normalize, last=False, ratio=lambda x, y: len(x & y)/len(x | y)):
    "Compares all pairs"
    texts = {Path(p).name: Path(p).read_text(encoding="utf-8") for p in paths}
    sets = {n: minhash.shingles(t, ngrams) if normal is exact.normalize else {tuple(normal(t).split()[i:i + ngrams]) for i in range(max(1, len(normal(t).split()) - ngrams + 1))} - {()} for n, t in texts.items()}
    first = {n: n for n in texts}
    for _ in texts:
        for a in texts:
            for b in texts:
                if sets[a] and sets[b] and ratio(sets[a], sets[b]) >= threshold: first[a] = first[b] = (max if last else min)(first[a], first[b])
    for n, t in texts.items():
        if first[n] == n: (Path(out)/n).write_text(t, encoding="utf-8")


def near_in_turn(paths, hashes, bands, ngrams, threshold, out, kept_only=True):
    "Compares each file with the earlier ones, or only with those that were kept: no chains"
    earlier = []
    for p in sorted(map(Path, paths)):
        s = minhash.shingles(p.read_text(encoding="utf-8"), ngrams)
        copy = any(minhash.jaccard(s, x) >= threshold for x in earlier)
        if not copy: (Path(out)/p.name).write_text(p.read_text(encoding="utf-8"), encoding="utf-8")
        if not copy or not kept_only: earlier.append(s)


NEAR = [(near_in_turn, "chain"), (partial(near_in_turn, kept_only=False), "chain"), (partial(near, last=True), "first by name"), (partial(near, normal=lambda t: t), "normalize"), (partial(near, ratio=lambda x, y: len(x & y)/min(len(x), len(y))), "containment"),
        (lambda *a: near(*a[:4], .75, a[5]), "threshold is an argument"), (lambda *a: near(*a[:3], 5, *a[4:]), "ngrams is an argument"), (partial(near, ratio=lambda x, y: len(x & y)/len(x | y) - 1e-9), "at the threshold"),
        (partial(near, normal=lambda t: "".join(c for c in t.lower() if c not in string.punctuation)), "accents make no"),
        (partial(near, normal=lambda t: exact.normalize(re.sub(r"[^\w\s]", " ", t))), "expected the names ['a.txt', 'c.txt'], got ['a.txt', 'b.txt', 'c.txt']: punctuation is removed"),
        (partial(near, normal=lambda t: " ".join(exact.normalize(t))), "not of letters")]


def near_with_blanks(*a):
    "A text without words has an empty run"
    near(*a)
    words = [n for n in sorted(Path(p).name for p in a[0]) if not exact.normalize(next(Path(p) for p in a[0] if Path(p).name == n).read_text()).split()]
    for n in words[1:]: (Path(a[-1])/n).unlink()


NEAR += [(near_with_blanks, "without words resemble nothing")]


# 13. Containment

def containment(t, d, n):
    n = min(n, len(t.split()))
    x, y = ({tuple(s.lower().split()[i:i + n]) for i in range(len(s.split()) - n + 1)} for s in (t, d))
    return len(x & y)/len(x)


def words(t, n): return {tuple(t.split()[i:i + n]) for i in range(max(1, len(t.split()) - n + 1))}


def containment_in_strings(t, d, n):
    words, n = t.lower().split(), min(n, len(t.split()))
    own = {" ".join(words[i:i + n]) for i in range(len(words) - n + 1)}
    return sum(f" {r} " in f" {' '.join(d.lower().split())} " for r in own)/len(own)


CONTAINMENT = [(lambda t, d, n: similarity(t, d, min(n, len(t.split()))), "expected"), (lambda t, d, n: containment(t, d, 1), "single words"), (lambda t, d, n: float(containment(t, d, n) > 0), "how much"),
               (lambda t, d, n: float(containment(t, d, n) == 1), "too strict"), (lambda t, d, n: containment(d, t, n), "expected"),
               (lambda t, d, n: len(words(t.lower(), n) & words(d, min(n, len(t.split()))))/len(words(t, n)), "document in lower case"), (lambda t, d, n: np.mean([" ".join(r) in d.lower() for r in words(t.lower(), n)]), "whole words"),
               (lambda t, d, n: sum(r in runs(d, min(n, len(t.split()))) for r in runs(t, n))/len(runs(t, n)), "counts once")]


# 14. The next source

def turn(taken, shares): return max(shares, key=lambda n: shares[n]*sum(taken.values()) - taken[n])


def turn_by_sorting(taken, shares):
    total = sum(taken.values())
    return sorted(shares, key=lambda n: round(taken[n] - shares[n]*total, 9))[0]


TURN = [(lambda t, s: max(s, key=lambda n: t[n] - s[n]*sum(t.values())), "furthest ahead"), (lambda t, s: max(s, key=s.get), "largest share"), (lambda t, s: min(s, key=t.get), "expected"), (lambda t, s: max(s, key=t.get), "expected"),
        (lambda t, s: next(iter(s)), "expected")]


TASKS = {"mask_emails": (EMAILS, filters.mask_emails, emails_by_words), "mask_phone_numbers": (PHONES, sub(NUMBER, PHONE), phones_in_two), "mask_ips": (IPS, sub(ADDRESS, IP), ips_by_numbers), "gopher_quality_filter": (GOPHER, gopher, gopher_by_reasons),
         "similarity": (SIMILARITY, similarity, similarity_by_counting), "meeting_probability": (CURVE, curve, curve_by_bands), "choose": (CHOOSE, choose, choose_by_max), "containment": (CONTAINMENT, containment, containment_in_strings),
         "next_source": (TURN, turn, turn_by_sorting), "is_noise": (NOISE, noise_by_articles, noise_by_repetition), "edit_recall": (RECALLS, edit_recall, recall_in_loops)}
FILES = {"exact_line_deduplication": (LINES, lines_once, exact.exact_line_deduplication), "minhash_deduplication": (NEAR, near, minhash.minhash_deduplication)}
WRONG = [(task, *pair) for task, (wrong, right, _) in TASKS.items() for pair in wrong + spoiled(right)]
WRONG += [(task, *pair) for task, (wrong, right, _) in FILES.items() for pair in wrong + spoiled_files(right)] + [("letters", *pair) for pair in LETTERS]
RIGHT = [(task, f) for task, (_, *right) in (TASKS | FILES).items() for f in right] + [("gopher_quality_filter", gopher_in_numpy), ("choose", choose_in_numpy), ("letters", RIGHT_LETTERS), ("letters", {k: float(v) for k, v in RIGHT_LETTERS.items()})]
graders = Graders(ex, WRONG, RIGHT)
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


def test_what_the_code_raises_is_kept_and_a_stop_passes():
    for task in graders.tasks:
        if task != "letters": graders.stops(task)
