"Graders of chapter 05's exercises: what each refuses, in which words, and that other right answers pass."
import math
from functools import partial

import numpy as np
import pytest
import torch
from graders import Graders, fails

from lmcourse.exercises import generation as ex
from lmcourse.generation import generate as course
from lmcourse.generation import sampling

NUMBERS = dict(cold=.36/.46, nucleus=4, warm=7, length=49, cut=.98**100, likeliest=math.log(2), typical=1.0297)
BEAM = dict(greedy=.198, kept=.33, beam=.252, likeliest=.2673)


# From logits to probabilities

def soft(z): return (z - z.max()).softmax(-1)


def nucleus(kept=lambda q, s, p: s - q < p, soften=lambda z, t: soft(z/t), scale=True, back=True, greedy=lambda z: torch.nn.functional.one_hot(z.argmax(), len(z)).float()):
    def f(logits, temperature, top_p):
        if temperature == 0 and greedy: return greedy(logits)
        q, ids = soften(logits, temperature).sort(descending=True, stable=True)
        q = q*kept(q, q.cumsum(-1), top_p)
        if scale: q = q/q.sum()
        return torch.zeros_like(q).scatter(-1, ids, q) if back else q
    return f


def nucleus_np(logits, temperature, top_p):
    z = logits.double().numpy()
    order = np.lexsort((np.arange(len(z)), -z))
    if not temperature: return torch.tensor([float(i == order[0]) for i in range(len(z))])
    e, total, out = np.exp((z - z.max())/temperature), 0., np.zeros(len(z))
    for i in order:
        if total >= top_p*(1 - 1e-12)*e.sum(): break
        out[i], total = e[i], total + e[i]
    return torch.from_numpy(out/out.sum())


def divides_in_place(logits, temperature, top_p): logits /= temperature or 1; return nucleus()(logits, 1 if temperature else 0, top_p)


def cut_first(z, t, p): return soft(torch.log(nucleus()(z, 1, p))/t) if t else nucleus()(z, t, p)


def greedy_all(z): return (z == z.max()).float()/(z == z.max()).sum()


# Cuts

def only(mask): return lambda z, v: z.masked_fill(~mask(z, v), -math.inf).softmax(-1)


def first(z, k, ids=lambda z: z.argsort(descending=True, stable=True)): return torch.zeros_like(z, dtype=torch.bool).scatter(-1, ids(z)[:k], True)


def one_by_one(logits, k):
    z, kept = logits.clone(), torch.full_like(logits, -math.inf)
    for _ in range(min(k, len(z))):
        i = z.argmax()
        kept[i], z[i] = logits[i], -math.inf
    return kept.softmax(-1)


def min_p_of(how=lambda q, p: q >= p*q.max(), scale=True):
    def f(logits, p):
        q = logits.softmax(-1)
        q = q*how(q, p)
        return q/q.sum() if scale else q
    return f


# Drawing

def search(probs, u, right=True): return int(torch.searchsorted((s := probs.double().cumsum(-1))/s[-1], u, right=right))


def walk(probs, u):
    total, last = 0., 0
    for i, p in enumerate(probs.tolist()):
        if p > 0: last = i
        total += p
        if u < total and p > 0: return torch.tensor(i)
    return last


def largest_first(probs, u):
    q, ids = probs.sort(descending=True)
    return ids[search(q, u)].item()


# The loop

def loop(window=lambda ids, c: ids[-c:], pick=lambda z: z[0, -1], most=lambda n: n, start=list, keep_end=False, with_prompt=False, ends=lambda i, e, ids: i == e, grad=False):
    def f(model, ids, max_tokens, context_length, end_of_text, choose):
        text, new = start(ids), []
        with torch.set_grad_enabled(grad):
            for _ in range(most(max_tokens)):
                i = choose(pick(model(torch.tensor([window(text, context_length)]))))
                if ends(i, end_of_text, text + [i]):
                    if keep_end: new.append(i)
                    break
                text.append(i)
                new.append(i)
        return ids + new if with_prompt else new
    return f


def prompt_again(model, ids, max_tokens, context_length, *rest):
    return loop(window=lambda text, c: ids[-c:])(model, ids, max_tokens, context_length, *rest)


def while_loop(model, ids, max_tokens, context_length, end_of_text, choose):
    text = torch.tensor(ids)[None]
    while text.shape[1] < len(ids) + max_tokens:
        with torch.inference_mode(): logits = model(text[:, max(0, text.shape[1] - context_length):])
        new = choose(logits[0, -1].clone())
        if new == end_of_text: break
        text = torch.cat((text, torch.tensor([[new]])), 1)
    return text[0, len(ids):].tolist()


def asks_once_more(model, ids, *args):
    new = loop()(model, ids, *args)
    model(torch.tensor([[1]]))
    return new


def extends_prompt(model, ids, *args): ids += (new := loop()(model, list(ids), *args)); return new


# Penalty

def penalty(how=lambda z, t: torch.where(z > 0, z/t, z*t), which=lambda z, seen: torch.isin(torch.arange(len(z)), torch.tensor(seen, dtype=torch.long))):
    return lambda z, seen, t: torch.where(which(z, seen), how(z, t), z)


def twice(z, seen, t):
    for i in seen: z = penalty()(z, [i], t)
    return z


def in_place(z, seen, t):
    for i in set(seen): z[i] = z[i]/t if z[i] > 0 else z[i]*t
    return z


# Streams

def matcher(pieces, stop):
    "Counts how many characters have matched, and begins anew after a false start."
    n = 0
    for piece in pieces:
        out = ""
        for c in piece:
            if c == stop[n]:
                n += 1
                if n == len(stop):
                    if out: yield out
                    return
            else:
                out += stop[:n]
                n = 1 if c == stop[0] else 0
                if not n: out += c
        if out: yield out
    if n: yield stop[:n]


def knuth(pieces, stop):
    fail, k = [0]*(len(stop) + 1), 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]: k = fail[k]
        k += stop[i] == stop[k]
        fail[i + 1] = k
    n = 0
    for piece in pieces:
        out = ""
        for c in piece:
            while n and c != stop[n]:
                out += stop[:n - fail[n]]
                n = fail[n]
            if c == stop[n]: n += 1
            else: out += c
            if n == len(stop): break
        if out: yield out
        if n == len(stop): return
    if n: yield stop[:n]


def hold_always(pieces, stop):
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            if held.index(stop): yield held[:held.index(stop)]
            return
        if sure := held[:max(0, len(held) - len(stop) + 1)]: yield sure
        held = held[len(sure):]
    if held: yield held


def whole_text(pieces, stop):
    text = "".join(pieces).split(stop)[0]
    if text: yield text


def no_end(pieces, stop):
    held = ""
    for piece in pieces:
        shown, held = course.split_at_stop(held + piece, [stop])
        if shown: yield shown
        if held is None: return


def shows_stop(pieces, stop):
    seen = []
    yield from ex._course_stop((seen.append(p) or p for p in pieces), stop)
    if stop in "".join(seen): yield stop


def part_shown(pieces, stop):
    text = ""
    for piece in pieces:
        text += piece
        if stop in text: return
        if piece: yield piece


def reads_on(pieces, stop):
    yield from ex._course_stop(pieces, stop)
    for _ in pieces: pass


def empty_ones(pieces, stop):
    yield from ex._course_stop(pieces, stop)
    yield ""


def as_bytes(pieces, stop): return (p.encode() for p in ex._course_stop(pieces, stop))


# Log-probability

def at(z, ids): return z.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def chain(z, ids): return sum(z[t].double().log_softmax(-1)[i].item() for t, i in enumerate(ids[1:]))


WRONG = [
    ("next_probs", nucleus(kept=lambda q, s, p: s <= p + 1e-6), "top_p = 0.7: expected [0.625, 0, 0.375, 0], got [1, 0, 0, 0]: the token that crosses top_p is missing"),
    ("next_probs", nucleus(kept=lambda q, s, p: s < p), "missing"), ("next_probs", nucleus(kept=lambda q, s, p: s - q <= p), "one token too many"),
    ("next_probs", nucleus(kept=lambda q, s, p: q >= p), "each probability is compared with top_p"), ("next_probs", nucleus(kept=lambda q, s, p: q > -1), "top_p is not used"),
    ("next_probs", nucleus(soften=lambda z, t: soft(z*t)), "the logits are multiplied by the temperature"), ("next_probs", nucleus(soften=lambda z, t: soft(z)), "the temperature is not used"),
    ("next_probs", nucleus(soften=lambda z, t: (z/t).exp()/(z/t).exp().sum()), "subtract the largest logit first"), ("next_probs", lambda z, t, p: (z/t).exp()/(z/t).exp().sum(), "got [nan, nan, 0]: exp overflows or underflows: subtract the largest logit first"), ("next_probs", nucleus(scale=False), "is not scaled to sum to 1"),
    ("next_probs", nucleus(back=False), "are in falling order"), ("next_probs", nucleus(greedy=None), "at temperature 0 all goes to the largest logit"),
    ("next_probs", nucleus(greedy=greedy_all), "of equal ones to the lowest id"), ("next_probs", cut_first, "the cut comes before the temperature"),
    ("next_probs", lambda *a: nucleus()(*a).softmax(-1), "a softmax of probabilities"), ("next_probs", divides_in_place, "changed its"),
    ("next_probs", lambda *a: nucleus()(*a).tolist(), "expected a tensor, got [0.5"), ("next_probs", lambda *a: nucleus()(*a)[None], "expected the shape (4,), got (1, 4)"),
    ("next_probs", lambda z, t, p: nucleus()(z, t or 1e-4, p) if t else nucleus()(z, 1e-4, p), "all goes to the largest logit"), ("next_probs", None, "expected a function"), ("next_probs", fails, "raised RuntimeError"),

    ("top_k", only(lambda z, k: z >= z.sort(descending=True)[0][min(k, len(z)) - 1]), "all tokens equal to the k-th are kept, expected exactly k"),
    ("top_k", only(lambda z, k: z > z.sort(descending=True)[0][min(k, len(z)) - 1]), "the k-th token is missing"),
    ("top_k", only(lambda z, k: first(z, k, lambda z: z.flip(0).argsort(descending=True, stable=True)).flip(0)), "of equal logits the higher ids are kept"),
    ("top_k", lambda z, k: z.softmax(-1)*first(z, k), "is not scaled to sum to 1"), ("top_k", lambda z, k: (z*first(z, k)).softmax(-1), "a logit of 0 is not a probability of 0"),
    ("top_k", lambda z, k: z.masked_fill(~first(z, k), -math.inf), "these are logits"), ("top_k", only(lambda z, k: first(-z, k)), "the smallest are kept"),
    ("top_k", lambda z, k: z.softmax(-1), "k is not used"), ("top_k", lambda z, k: only(lambda z, k: z >= torch.topk(z, k)[0][-1])(z, k), "expected exactly k"),
    ("top_k", lambda z, k: torch.topk(z, k)[0].softmax(-1), "expected the shape (4,), got (2,)"), ("top_k", lambda z, k: one_by_one(z, k) if k <= len(z) else fails(), "raised RuntimeError"), ("top_k", fails, "raised RuntimeError"),

    ("min_p", min_p_of(lambda q, p: q >= p), "p is compared with the probability itself"), ("min_p", min_p_of(lambda q, p: q > p*q.max()), "what reaches p exactly is missing"),
    ("min_p", min_p_of(scale=False), "is not scaled to sum to 1"), ("min_p", only(lambda z, p: z >= p*z.max()), "shares of the largest logit"),
    ("min_p", min_p_of(lambda q, p: q > -1), "p is not used"), ("min_p", min_p_of(lambda q, p: q >= (1 - p)*q.max()), "the cut is at 1 - p"),
    ("min_p", lambda z, p: only(lambda z, p: first(z, 1) if p == 1 else z.softmax(-1) >= p*z.softmax(-1).max())(z, p), "all that are as likely as the likeliest stay"),
    ("min_p", lambda z, p: (q := z.exp()/z.exp().sum()*(z.exp() >= p*z.exp().max()))/q.sum(), "exp overflows"), ("min_p", fails, "raised RuntimeError"),

    ("draw", partial(search, right=False), "for probs = [0, 0.5, 0, 0.5, 0], u = 0.0: expected 1, got 0: token 0 has the probability 0"), ("draw", lambda p, u: int((p.cumsum(-1) < u).sum()), "token 0 has the probability 0"),
    ("draw", lambda p, u: int(torch.multinomial(p, 1)), "u decides, not a new random number"),
    ("draw", lambda p, u: int(p.argmax()), "expected 3, got 1: that is the likeliest, whatever u is"), ("draw", lambda p, u: int((p.cumsum(-1) <= u).sum()), "expected 3, got 5: in float32 this u is 1: compare in float64"),
    ("draw", lambda p, u: int((p.double().cumsum(-1) <= u).sum()), "u = 0.9995: expected 2, got 3: the sum is a little below 1"),
    ("draw", lambda p, u: min(int((p.double().cumsum(-1) <= u).sum()), len(p) - 1), "for probs = [0.333, 0.333, 0.333, 0], u = 0.9995: expected 2, got 3"), ("draw", largest_first, "the pieces lie in the order of the ids"),
    ("draw", lambda p, u: search(p, u*p.double().sum()), "u = 0.3335: expected 1, got 0: the first piece ends at 0.333, or stretched"), ("draw", lambda p, u: search(p, 1 - u if u else u), "u = 0.25: expected 1, got 3"), ("draw", lambda p, u: search(p, u) + 1, "expected 1, got 2"), ("draw", lambda p, u: p, "expected an id, got float32 (5,)"),
    ("draw", lambda p, u: search(p, round(u, 1) if u < .9 else u), "expected"), ("draw", lambda p, u: float(search(p, u)), "expected an id, got 1.0"), ("draw", fails, "raised RuntimeError"),
    ("draw", lambda p, u: search(p, u + .004) if len(p) == 4 and p[0] < .2 and u < .9 else search(p, u), "for 1,000 even u"),

    ("generate", loop(with_prompt=True), "got [1, 2, 3, 2, 5, 4, 2]: the prompt is not among the new ids"), ("generate", prompt_again, "the model is shown the prompt each time, without the new ids"), ("generate", loop(keep_end=True), "the end of text is not among the new ids"),
    ("generate", loop(ends=lambda i, e, ids: False), "it goes on after the end of text"), ("generate", loop(ends=lambda i, e, ids: e in ids), "an end of text in the prompt ends nothing"),
    ("generate", loop(most=lambda n: n + 1), "that is more than max_tokens"), ("generate", loop(most=lambda n: n - 1), "it stops too early"), ("generate", loop(window=lambda ids, c: ids), "the model was shown 6 tokens, more than its context"),
    ("generate", loop(window=lambda ids, c: ids[:c]), "the model is shown the first tokens, expected the latest"), ("generate", loop(pick=lambda z: z[0, 0]), "whose logits were chosen from"),
    ("generate", loop(pick=lambda z: z[0]), "choose was given (3, 7), expected the logits (V,) of the last position"), ("generate", loop(window=lambda ids, c: ids[-1:]), "which tokens was the model shown?"),
    ("generate", loop(grad=True), "the ids are right, but the model ran with gradients"), ("generate", loop(pick=lambda z: z[0, -1].softmax(-1)), "the ids are right, but choose was given [0."), ("generate", extends_prompt, "changed its"), ("generate", asks_once_more, "each once"),
    ("generate", lambda *a: tuple(loop()(*a)), "expected a list of ids"), ("generate", lambda model, ids, *a: loop()(lambda x: model(x[0]), ids, *a), "expected a tensor of ids (1, T)"), ("generate", fails, "raised RuntimeError"),

    ("sampler_numbers", NUMBERS | dict(cold=.6), "cold: 0.6 is that of temperature 1"), ("sampler_numbers", NUMBERS | dict(cold=.36), "is not scaled"), ("sampler_numbers", NUMBERS | dict(cold=.473), "is that of temperature 2"),
    ("sampler_numbers", NUMBERS | dict(nucleus=3.99), "nucleus: 3.99 is not a whole number"), ("sampler_numbers", NUMBERS | dict(nucleus=3), "leaves out the token that crosses 0.9"), ("sampler_numbers", NUMBERS | dict(nucleus=5), "is one more than needed"), ("sampler_numbers", NUMBERS | dict(warm=4), "is that of temperature 1"),
    ("sampler_numbers", NUMBERS | dict(warm=2), "is that of temperature 1/2"), ("sampler_numbers", NUMBERS | dict(warm=6), "crosses 0.9"), ("sampler_numbers", NUMBERS | dict(length=50), "counts the end itself"),
    ("sampler_numbers", NUMBERS | dict(length=.02), "is the probability of the end"), ("sampler_numbers", NUMBERS | dict(cut=math.exp(-2)), "a good guess"), ("sampler_numbers", NUMBERS | dict(cut=1 - .1326), "is the probability that it is over"),
    ("sampler_numbers", NUMBERS | dict(cut=0), "nearly as long as the mean"), ("sampler_numbers", NUMBERS | dict(likeliest=1), "is in bits"), ("sampler_numbers", NUMBERS | dict(likeliest=1.03), "is that of typical texts"),
    ("sampler_numbers", NUMBERS | dict(typical=.693), "is that of the likeliest text"), ("sampler_numbers", NUMBERS | dict(typical=1.4855), "is in bits"), ("sampler_numbers", NUMBERS | dict(typical=1.0986), "is ln 3"),
    ("sampler_numbers", NUMBERS | dict(length=math.nan), "nan is not a number"), ("sampler_numbers", dict(cold=1), "is missing"), ("sampler_numbers", [], "expected a dict"),

    ("penalise", penalty(lambda z, t: z/t), "negative logits are divided too, which makes the token likelier"), ("penalise", penalty(lambda z, t: z - t), "theta is subtracted"),
    ("penalise", penalty(lambda z, t: torch.where(z > 0, z/t, z)), "negative logits are left as they are"), ("penalise", penalty(which=lambda z, seen: torch.ones(len(z), dtype=torch.bool)), "all tokens are penalised"),
    ("penalise", penalty(which=lambda z, seen: ~torch.isin(torch.arange(len(z)), torch.tensor(seen))), "the tokens that did not come are penalised"), ("penalise", twice, "theta = 2.0: expected [1, -2, 0.5], got [1, -8, 0.5]: a token that came twice is penalised twice"),
    ("penalise", lambda z, seen, t: penalty()(z, seen, t).softmax(-1), "these are probabilities"), ("penalise", in_place, "changed its"), ("penalise", lambda z, seen, t: z, "nothing is penalised"),
    ("penalise", penalty(lambda z, t: torch.where(z > 0, z*t, z/t)), "positive logits are multiplied"), ("penalise", lambda z, seen, t: penalty()(z, seen, t).tolist(), "expected a tensor, got ["),
    ("penalise", lambda z, seen, t: penalty()(z, seen or fails(), t), "raised RuntimeError"), ("penalise", 3, "expected a function, got 3"), ("penalise", fails, "raised RuntimeError"),

    ("beam", BEAM | dict(greedy=.2673), "is the likeliest of all"), ("beam", BEAM | dict(greedy=.252), "is what width 2 finds"), ("beam", BEAM | dict(greedy=.216), "takes 0.6 for each letter"), ("beam", BEAM | dict(kept=.36), "is the better of the two"),
    ("beam", BEAM | dict(kept=.27), "is the third: ba and aa are better"), ("beam", BEAM | dict(beam=.198), "is what greedy finds"), ("beam", BEAM | dict(beam=.2673), "is that of aba, whose beginning ab is the third best after two letters, and dropped"),
    ("beam", BEAM | dict(likeliest=.252), "the beam has dropped a better beginning"), ("beam", BEAM | dict(likeliest=.9), "is too large"), ("beam", None, "expected a dict"),

    ("until_stop", lambda ps, s: (q for p in ps for q in [p.split(s)[0]] if q), "the stop string lies over two pieces"), ("until_stop", matcher, "after a false start the stop string can begin inside what was held back"),
    ("until_stop", hold_always, "is sure, but only"), ("until_stop", whole_text, "is sure, but only '' was shown: yield as soon as you can, not at the end"), ("until_stop", no_end, "the text is over: what was held back is shown"),
    ("until_stop", shows_stop, "the stop string itself is not shown"), ("until_stop", part_shown, "a part of the stop string was shown"), ("until_stop", reads_on, "more pieces were asked for after the stop string was complete"),
    ("until_stop", empty_ones, "an empty piece was yielded"), ("until_stop", as_bytes, "expected pieces of text, got b'The end'"), ("until_stop", lambda ps, s: ps, "the stop string lies over two pieces"),
    ("until_stop", lambda ps, s: None, "expected pieces of text, got None: is a return or yield missing? Printing a value doesn't return it"), ("until_stop", type("Stop", (), {}), "expected a function, got the class Stop"), ("generate", type("Loop", (), {}), "expected a function, got the class Loop"), ("until_stop", "x", "expected a function, got 'x'"), ("until_stop", fails, "raised RuntimeError"),

    ("text_log_prob", lambda z, ids: at(z, ids).sum(), "row t is compared with token t, expected token t + 1"), ("text_log_prob", lambda z, ids: at(z[1:], ids[1:]).sum(), "and the first is left out"),
    ("text_log_prob", lambda z, ids: at(z[:-1], ids[:-1]).sum(), "and the last is left out"), ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]).mean(), "that is the mean"),
    ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]).sum()/math.log(2), "that is in bits"), ("text_log_prob", lambda z, ids: -at(z[:-1], ids[1:]).sum(), "the sign is that of a loss"),
    ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]).exp().prod(), "that is the probability"), ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]).exp().prod().log(), "expected -"),
    ("text_log_prob", lambda z, ids: at(z[:-1].clamp(-60, 60), ids[1:]).sum(), "use log_softmax"), ("text_log_prob", lambda z, ids: (z.softmax(-1)[:-1].log()[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]).sum(), "exp overflows, or log 0: use log_softmax"),
    ("text_log_prob", lambda z, ids: math.log(p) if (p := at(z[:-1], ids[1:]).exp().prod().item()) else chain(z, ids) if len(ids) < 9 else -math.inf, "the product of the probabilities is 0"),
    ("text_log_prob", lambda z, ids: z[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum(), "these are logits"), ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]), "expected a number, got float32 (4,)"),
    ("text_log_prob", lambda z, ids: torch.nn.functional.cross_entropy(z[:-1], torch.tensor(ids[1:])), "that is the mean loss, expected the sum of log-probabilities, below 0"),
    ("text_log_prob", fails, "raised RuntimeError"),
]

RIGHT = [
    ("next_probs", nucleus()), ("next_probs", nucleus_np), ("next_probs", lambda z, t, p: sampling.next_token_probs(z, t, top_p=p)),
    ("top_k", one_by_one), ("top_k", only(first)), ("top_k", sampling.top_k), ("min_p", only(lambda z, p: (z - z.max()).exp() >= p)), ("min_p", min_p_of(lambda q, p: q/q.max() >= p)), ("min_p", sampling.min_p),
    ("draw", search), ("draw", walk), ("generate", loop()), ("generate", while_loop),
    ("sampler_numbers", NUMBERS), ("sampler_numbers", dict(cold=.7826, nucleus=4., warm=np.int64(7), length=49.0, cut=.1326, likeliest=.693, typical=torch.tensor(1.03))),
    ("penalise", penalty()), ("penalise", lambda z, seen, t: in_place(z.clone(), seen, t)), ("penalise", lambda z, seen, t: penalty()(z, seen, t).double()),
    ("beam", BEAM), ("beam", {k: round(v, 3) for k, v in reversed(BEAM.items())}), ("until_stop", ex._course_stop), ("until_stop", knuth),
    ("text_log_prob", chain), ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]).sum()), ("text_log_prob", lambda z, ids: -torch.nn.functional.cross_entropy(z[:-1].double(), torch.tensor(ids[1:]), reduction="sum")),
    ("text_log_prob", lambda z, ids: np.float32(chain(z, ids))), ("text_log_prob", lambda z, ids: at(z[:-1], ids[1:]).sum().numpy())]

GRADERS = Graders(ex, WRONG, RIGHT)
test_wrong_answers_are_refused_in_one_line_that_says_why, test_right_answers_pass_in_silence, test_every_grader_is_tried, test_a_grader_says_the_same_each_time = GRADERS.tests()


@pytest.mark.parametrize("task", ["next_probs", "top_k", "min_p", "draw", "generate", "penalise", "until_stop", "text_log_prob"])
def test_what_the_students_code_raises_is_kept(task): GRADERS.stops(task)


def test_stop_strings_are_cut_as_the_chapter_cuts_them():
    class Letters:
        def token_bytes(self, i): return bytes([i])
    for pieces, stop, _ in ex._stop_cases():
        assert "".join(ex._course_stop(iter(pieces), stop)) == "".join(course.stream_text(Letters(), "".join(pieces).encode(), [stop]))


def test_a_sampler_of_ones_own_draws_what_the_course_draws():
    "The student's three parts together, with the course's uniform numbers."
    table = torch.tensor([[.2, .6, .2], [.3, .2, .5], [.4, .4, .2]])
    for seed in range(20):
        source = sampling.uniforms(seed)
        def choose(logits): return search(nucleus()(logits, .8, .9), next(source))
        own = loop()(lambda ids: table.log()[ids], [0], 20, 8, 0, choose)
        assert own == list(course.generate(lambda ids: table.log()[ids], [0], 20, .8, top_p=.9, stop=[0], seed=seed))
