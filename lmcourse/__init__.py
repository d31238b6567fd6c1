"Build a language model from scratch, one notebook at a time."
__version__ = "0.1.0"
