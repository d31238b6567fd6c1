"""The run of the first page's picture: a small model's loss, and what it writes on the way.

Writes nbs/results/first_run.json, and draws nbs/images/first.svg from it.
Usage: python tools/first_run.py [--steps 5000] [--draw]     --draw only draws what is there.
"""
import argparse, html, json, math, re, sys, tempfile, textwrap
from dataclasses import replace
from datetime import date
from itertools import count, islice
from pathlib import Path

import torch

from lmcourse.app.data_commands import learn_tokenizer, prepare, training_documents
from lmcourse.app.generation_commands import story
from lmcourse.app.quickstart import quickstart_configs
from lmcourse.app.training_commands import open_data
from lmcourse.tools.machine import processor_name
from lmcourse.training.evaluation import evaluate
from lmcourse.training.trainer import Trainer

NBS = Path(__file__).resolve().parent.parent/"nbs"
RESULT, PICTURE = NBS/"results/first_run.json", NBS/"images/first.svg"
SIZE, VALID, EVERY, SHOWN = 12_000_000, 400, 10, (0, 100, 1000)


def sample(model, tokenizer, max_tokens):
    "The first story of some words: an untrained model may end one at once."
    stories = (story(model, tokenizer, seed=seed, max_tokens=max_tokens) for seed in count(1))
    return next(t for t in stories if len(t.strip()) >= 40)


def first_run(folder, steps):
    "What the picture shows: losses, the floor, and samples at the steps of `SHOWN` and the end."
    training = list(training_documents("stories", SIZE))
    tokenizer = learn_tokenizer(islice(training, 4000), 2048)
    prepare("stories", folder/"data", tokenizer, SIZE, VALID)
    train, valid = open_data(folder/"data")
    config, how = quickstart_configs(tokenizer.vocab_size)
    trainer = Trainer(config, replace(how, steps=steps), train, valid)
    samples, losses, recent = {}, [], []
    for step in range(steps + 1):
        if step in (*SHOWN, steps):
            samples[step] = sample(trainer.model, tokenizer, 400 if step == steps else 60)
        if step == steps: break
        recent.append(trainer.train_step())
        if (step + 1) % EVERY and step: continue
        losses.append((step + 1, round(sum(recent)/len(recent), 4)))
        recent = []
    result = evaluate(trainer.model, valid, config.context_length)
    return dict(losses=losses, samples=samples, valid_loss=round(result.loss, 4),
                floor=round(result.floor, 4), seconds=round(trainer.elapsed),
                tokens=steps*trainer.plan.tokens,
                parameters=sum(p.numel() for p in trainer.model.parameters()))


WIDTH, TOP, BOTTOM, LEFT, HIGHEST = 580, 42, 290, 44, 9.5  # Of the picture; its plot ends at BOTTOM
BLUE, GREEN, GREY = "#2f7fd6", "#2a9461", "#7b7f85"        # Read on a light and on a dark page


def text(x, y, words, size=16, **more):
    style = dict(fill=GREY, font_size=size) | more
    style = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{style}>{html.escape(words)}</text>'


def mark(x, y, n):
    circle = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="13" fill="{BLUE}"/>'
    return circle + text(x, y + 6, str(n), fill="#fff", font_weight=700, text_anchor="middle")


def draw(made):
    "As SVG: the loss over steps on a log scale, and what the model wrote at four of them."
    last, floor, right = made["losses"][-1][0], made["floor"], WIDTH - 14
    x = lambda step: LEFT + (right - LEFT)*math.log(max(step, 1))/math.log(last)
    y = lambda loss: BOTTOM - (BOTTOM - TOP)*loss/HIGHEST
    parts = [text(LEFT, 24, "loss: how surprised the model is by the next token (nats)", 17)]
    for n in (0, 2, 4, 6, 8):
        parts.append(text(LEFT - 10, y(n) + 6, str(n), text_anchor="end"))
        parts.append(f'<path d="M{LEFT} {y(n):.1f}H{right}" stroke="{GREY}" stroke-opacity=".25"/>')
    for n in (1, 10, 100, 1000, last):
        name, side = f"{n:,}" if n > 1 else "step 1", "end" if n == last else "middle"
        parts.append(text(x(n), BOTTOM + 24, name, text_anchor=side))
    curve = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in made["losses"])
    said = f"the floor: best possible, {floor:.2f}"
    line = f'<path d="M{LEFT} {y(floor):.1f}H{right}" stroke="{GREEN}"'
    parts += [f'{line} stroke-width="2.5" stroke-dasharray="7 5"/>',
              text(LEFT + 8, y(floor) - 9, said, 17, fill=GREEN, font_weight=600),
              f'<polyline points="{curve}" fill="none" stroke="{BLUE}" stroke-width="3" '
              'stroke-linejoin="round"/>']
    at, losses = BOTTOM + 66, dict(made["losses"])
    for n, (step, words) in enumerate(made["samples"].items(), 1):
        step = int(step)
        words = re.sub(r"[^\x20-\x7e]+", "·", " ".join(words.split()))
        words = re.sub(r"(\S{44})\S+", r"\1…", words)         # Untrained, it may never make a space
        lines = textwrap.wrap(words, 56, max_lines=2, placeholder=" …")
        name = f"step {step:,}" if step else "before training"
        parts += [mark(x(step), y(losses[max(step, 1)]), n), mark(LEFT, at - 5, n)]
        parts += [text(LEFT + 24, at, name, 17, font_weight=700)]
        parts += [text(LEFT + 24, at + 23*(k + 1), line, 17) for k, line in enumerate(lines)]
        at += 31 + 23*len(lines)
    label = (f"The loss falls to {made['valid_loss']:.2f}, close to the floor at {floor:.2f}, "
             "while noise becomes a story")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{at - 14}" '
            f'viewBox="0 0 {WIDTH} {at - 14}" role="img" '
            f'aria-label="{label}" font-family="system-ui, sans-serif">\n'
            + "\n".join(parts) + "\n</svg>\n")


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=5000)
    p.add_argument("--draw", action="store_true", help="only draw the run that is there")
    args = p.parse_args()
    if args.steps < SHOWN[-1]: sys.exit(f"--steps {args.steps}: expected {SHOWN[-1]} or more")
    if not args.draw:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            made = first_run(Path(folder), args.steps)
        made |= dict(processor=processor_name(), threads=1, date=str(date.today()))
        lines = json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n"
        RESULT.write_text(lines, encoding="utf-8")
        print({k: v for k, v in made.items() if k not in ("losses", "samples")})
    PICTURE.write_text(draw(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__": main()
