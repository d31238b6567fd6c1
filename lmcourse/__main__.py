"`python -m lmcourse` is the command `lmcourse`. What needs none of the course is answered before the rest is imported."
import signal
import sys

from lmcourse import __version__


def main():
    if sys.argv[1:] == ["--version"]:
        try: return print(f"lmcourse {__version__}", flush=True)
        except OSError: pass                                # The command tries again, and says why it can't
    try: from lmcourse.app.cli import main as command
    except KeyboardInterrupt: return 130                    # Ctrl-C while modules are imported
    try: return command()
    except KeyboardInterrupt: return 130                    # Again, while the first one is answered
    finally: signal.signal(signal.SIGINT, signal.SIG_IGN)   # Again, while Python ends


if __name__ == "__main__": sys.exit(main())
