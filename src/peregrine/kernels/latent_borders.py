"""Where splits of latent attention's keys begin, in plain Python: the host counts with it, and kernels compile it.

Borders are a function of the key index alone, never of a length, a batch or a window.
"""


def latent_splits(num_keys: int) -> int:
    """How many splits so many keys touch: the host's bound, from the width of the page table."""
    return latent_split_of_index(num_keys - 1) + 1


# 128 keys each up to 4k, 320 up to 44k, 768 beyond. There is one KV head only, so that splits have to be narrow for all
# multiprocessors to find work in one row; but a split's state is as large as the latents of a hundred keys.
def latent_split_of_index(index: int) -> int:
    """The split that a key index lies in; works on the host and on the device."""
    return min(index, 4096) // 128 + max(min(index, 45056) - 4096, 0) // 320 + max(index - 45056, 0) // 768


def latent_start_of_split(split: int) -> int:
    """The first key index of a split; works on the host and on the device."""
    return min(split, 32) * 128 + max(min(split, 160) - 32, 0) * 320 + max(split - 160, 0) * 768


# To put a split aside takes as long as to read another 64 keys: by this measure programs get equal shares.
def latent_work_before(split: int) -> int:
    """What all splits before this one cost; works on the host and on the device."""
    return min(split, 32) * 192 + max(min(split, 160) - 32, 0) * 384 + max(split - 160, 0) * 832


def latent_split_of_work(work: int) -> int:
    """The split that is reached after so much work; works on the host and on the device."""
    return min(work, 6144) // 192 + max(min(work, 55296) - 6144, 0) // 384 + max(work - 55296, 0) // 832
