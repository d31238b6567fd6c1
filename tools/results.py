"Files of saved runs in nbs/results: a line of JSON a run, after one that says where and how they were made."
import datetime, json
from pathlib import Path

from lmcourse.tools.machine import machine_name

RESULTS = Path(__file__).resolve().parent.parent/"nbs/results"


def made_by(command, **more):
    "Where, when and how"
    return dict(machine=machine_name(), date=str(datetime.date.today()), command=command, **more)


def saved(name):
    "The lines of a file, none if it is not there"
    path = RESULTS/name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def done(name, job):
    "The saved run of this job, or none"
    return next((r for r in saved(name) if r.items() >= job.items()), None)


def write(name, row, command, more=dict):
    "One more line; `more` is called for a new file, and what it gives joins the first line"
    path = RESULTS/name
    if not path.exists(): path.write_text(json.dumps(dict(kind="about") | made_by(command) | more()) + "\n")
    with path.open("a") as f: f.write(json.dumps(row) + "\n")
