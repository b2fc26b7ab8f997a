"""The command line. Commands import torch only once they run, so that help is instant."""
