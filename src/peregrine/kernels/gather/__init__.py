"""Gather between processes that can write into each other's GPU memory."""

from peregrine.kernels.gather.reference import Mailbox, gather, gather_torch, mailbox_words

__all__ = ["Mailbox", "gather", "gather_torch", "mailbox_words"]
