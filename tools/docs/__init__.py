"""The parts of `tools/build_docs.py`: notebooks read, pages written, and what stands beside them."""
