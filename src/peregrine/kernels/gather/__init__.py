"""Gathering the values of processes whose memory each other can write."""

from peregrine.kernels.gather.reference import Mailbox, gather, gather_torch, mailbox_words

__all__ = ["Mailbox", "gather", "gather_torch", "mailbox_words"]
