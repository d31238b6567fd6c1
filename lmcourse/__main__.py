"`python -m lmcourse` is the command `lmcourse`."
import sys

from lmcourse.app.cli import main

if __name__ == "__main__": sys.exit(main())
