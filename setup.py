"Build script: everything it needs is in settings.ini."
import shlex
from configparser import ConfigParser
from pathlib import Path

import setuptools
from setuptools.command.build_py import build_py

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

needed = ("version description keywords author author_email lib_name lib_path user branch "
          "license status min_python max_python audience language requirements").split()
if missing := [k for k in needed if k not in cfg]: raise KeyError(f"settings.ini lacks {', '.join(missing)}")

spdx = {"apache2": "Apache-2.0", "mit": "MIT", "bsd3": "BSD-3-Clause"}
statuses = ["1 - Planning", "2 - Pre-Alpha", "3 - Alpha", "4 - Beta", "5 - Production/Stable", "6 - Mature", "7 - Inactive"]
status = next(s for s in statuses if s.startswith(cfg["status"]))
first, last = (int(cfg[k].split(".")[1]) for k in ("min_python", "max_python"))


FOR_THE_SITE = {("lmcourse", "_modidx"), ("lmcourse.tools", "pages"), ("lmcourse.app", "benchmarks")}   # Needed only where the notebooks are: in a clone


class WithoutSite(build_py):
    "What pip installs, without the index that nbdev reads and the tools that look after pages."
    def find_package_modules(self, package, package_dir):
        return [m for m in super().find_package_modules(package, package_dir) if m[:2] not in FOR_THE_SITE]


setuptools.setup(
    cmdclass={"build_py": WithoutSite},
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    author_email=cfg["author_email"],
    license=spdx.get(cfg["license"], cfg["license"]),
    url=cfg["git_url"],
    python_requires=">=" + cfg["min_python"],
    packages=setuptools.find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    include_package_data=True,                                    # what MANIFEST.in names inside the package
    install_requires=shlex.split(cfg["requirements"]),
    extras_require={k.removesuffix("_requirements"): shlex.split(v) for k, v in cfg.items() if k.endswith("_requirements")},
    classifiers=[
        f"Development Status :: {status}",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ] + [f"Programming Language :: Python :: 3.{m}" for m in range(first, last + 1)],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    entry_points={
        "console_scripts": shlex.split(cfg.get("console_scripts", "")),
        "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],   # links from names in prose to the pages that define them
    },
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"]},
)
